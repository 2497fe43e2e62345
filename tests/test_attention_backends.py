"""Captures under another attention backend of diffusers than the module's own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bcg
from bcg import probes
from bcg.autotune import EAGER, GRAPH, Tuner
from bcg.functions import redirected
from bcg.recipe import Recipe

diffusers = pytest.importorskip("diffusers")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch")

MATH = "_native_math"  # the one that gives other bits on a CPU


class Processor:
    """An attention processor as diffusers writes them."""

    _attention_backend = None

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = dispatch.dispatch_attention_fn(x, x, x, attn_mask=mask, backend=self._attention_backend)
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.processor(x * self.scale, mask)


def queries() -> torch.Tensor:
    return torch.randn(1, 64, 2, 16)


@pytest.fixture
def math_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_NEVER_FASTER", frozenset())


def test_installed_backends_are_listed_without_the_present_one_and_those_that_must_be_downloaded() -> None:
    module = Attention()
    listed = probes.attention_backends(module)
    assert "_native_flash" in listed and "native" not in listed
    assert not any(name.endswith("_hub") for name in listed)
    assert "xformers" not in listed  # not installed here
    assert MATH not in listed
    module.processor._attention_backend = dispatch.AttentionBackendName("_native_flash")  # type: ignore[assignment]
    assert "_native_flash" not in probes.attention_backends(module)
    assert "native" in probes.attention_backends(module)


def test_a_module_whose_attention_takes_no_backend_has_none() -> None:
    assert probes.attention_backends(nn.Linear(2, 2)) == ()


def test_an_entry_replays_the_backend_of_its_capture_and_the_module_is_left_as_it_was() -> None:
    module = Attention()
    runner = bcg.wrap(module)
    key_before, function = runner._self_state.key(), dispatch.dispatch_attention_fn
    with torch.no_grad():
        call = runner._bind((queries(),), {})
        plain = runner._capturer().capture(call)
        entry = runner._capturer().capture(call, Recipe(attention=MATH))
        x = queries()
        own = module(x)
        with dispatch.attention_backend(MATH):
            other = module(x)
        assert not torch.equal(own, other)
        assert torch.equal(entry.replay([x]), other)
        assert torch.equal(plain.replay([x]), own)
    assert (entry.verified, plain.verified) == ("close", "exact")
    assert entry.key == plain.key
    assert runner._self_state.key() == key_before
    assert dispatch.dispatch_attention_fn is function
    assert vars(module.processor) == {}


def test_who_asks_for_exact_images_gets_no_backend_that_moves_bits() -> None:
    runner = bcg.wrap(Attention().bfloat16(), verify="exact")
    with torch.no_grad():
        call = runner._bind((queries().bfloat16(),), {})
        with pytest.raises(bcg.VerificationError):
            runner._capturer().capture(call, Recipe(attention=MATH))
        assert runner._capturer().capture(call, Recipe(attention="_native_flash")).verified == "exact"


def test_other_threads_go_on_with_their_own_backend() -> None:
    module, x = Attention(), queries()
    results: list[torch.Tensor] = []
    with torch.no_grad():
        own = module(x)

    def serve() -> None:
        with torch.no_grad():
            results.append(module(x))

    with redirected(probes.attention_redirection(MATH)), torch.no_grad():
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
        here = module(x)
    assert torch.equal(results[0], own)
    assert not torch.equal(here, own)


def test_an_argument_that_a_backend_would_leave_out_is_no_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers drops what a backend does not know, and a result without its mask may still be nearly close."""
    name = dispatch.AttentionBackendName(MATH)
    known = dispatch._AttentionBackendRegistry._supported_arg_names
    monkeypatch.setitem(known, name, known[name] - {"attn_mask"})
    _, substitute = probes.attention_redirection(MATH)
    x = queries()
    substitute(x, x, x, attn_mask=None)
    with pytest.raises(ValueError, match="does not take attn_mask"):
        substitute(x, x, x, attn_mask=torch.ones(1, 1, 64, 64, dtype=torch.bool))


def tuner(tmp_path: Path, milliseconds: list[float], **options: Any) -> tuple[Tuner, Any]:
    runner = bcg.wrap(Attention(), cache_dir=str(tmp_path), **options)
    turns = iter(range(10_000))

    def elapsed_ms(function: Any) -> float:
        function()
        turn = next(turns)
        return milliseconds[(turn + turn // len(milliseconds)) % len(milliseconds)]

    call = runner._bind((queries(),), {})
    return Tuner(runner.transformer, runner._capturer(), runner._self_config, elapsed_ms), call


@pytest.mark.usefixtures("math_is_listed")
@pytest.mark.parametrize(
    ("options", "milliseconds", "arm"),
    [
        ({}, [10.0, 8.0], GRAPH),  # nobody asked for other bits
        ({"attention_backends": (MATH,)}, [10.0, 8.0, 4.0], f"graph+attention {MATH}"),
        ({"attention_backends": (MATH,)}, [10.0, 8.0, 7.9], GRAPH),
        ({"attention_backends": (MATH,), "verify": "exact"}, [10.0, 8.0], GRAPH),
        ({"attention_backends": ("not a backend",)}, [10.0, 8.0], GRAPH),
    ],
)
def test_a_backend_is_chosen_where_it_is_allowed_and_measured_to_be_faster(
    options: dict[str, Any], milliseconds: list[float], arm: str, tmp_path: Path
) -> None:
    tuning, call = tuner(tmp_path, milliseconds, **options)
    with torch.no_grad():
        entry = tuning.capture(call)
    assert entry.choice.arm == arm
    assert len(entry.choice.median_ms) == len(milliseconds)
    assert entry.choice.median_ms[EAGER] == 10.0
    assert entry.verified == ("exact" if arm == GRAPH else "close")


def test_all_installed_backends_are_tried_under_one_word(tmp_path: Path) -> None:
    tuning, call = tuner(tmp_path, [10.0, 8.0], attention_backends=("installed",))
    assert set(tuning._recipes(call)) == {
        GRAPH,
        *(f"graph+attention {name}" for name in probes.attention_backends(Attention())),
    }


def test_attention_that_is_an_eager_break_has_no_backends(tmp_path: Path) -> None:
    function = "diffusers.models.attention_dispatch:dispatch_attention_fn"
    tuning, call = tuner(tmp_path, [1.0], attention_backends=("installed",), eager_functions=(function,))
    assert set(tuning._recipes(call)) == {GRAPH}


def test_a_diffusers_transformer_honours_its_backends() -> None:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    assert "_native_flash" in probes.attention_backends(model)
