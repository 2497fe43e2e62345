"""Captures of compiled code and of other attention backends on a GPU, on a transformer of two small blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config

import bcg
from bcg import probes
from bcg.recipe import Recipe

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.inner(self.norm(x) * (1 + scale)), approximate="tanh")
        return x + self.outer(hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale)
        return x


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model().to(DEVICE, torch.bfloat16).requires_grad_(False).eval()


def arguments(rows: int) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(rows, 64, device=DEVICE, dtype=torch.bfloat16),
        torch.randn(64, device=DEVICE, dtype=torch.bfloat16),
    )


def check_replays(runner: Any, rows: int) -> None:
    given = arguments(rows)
    replays = runner.stats.replays
    got, expected = runner(*given), runner.transformer(*given)
    assert runner.stats.replays == replays + 1
    assert ((got - expected).float().norm() / expected.float().norm()).item() < 0.02


@pytest.fixture(autouse=True)
def _fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("BCG_CACHE_DIR", str(tmp_path / "bcg"))


@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_compiled_code_replays_in_one_segment(compiled: str) -> None:
    runner = bcg.wrap(model(), compile=compiled)
    with torch.no_grad():
        with bcg.warmup():
            for rows in (96, 32, 48):  # static, then dynamic, then its code again
                runner(*arguments(rows))
        assert [entry.segments for entry in runner.entries.values()] == [1, 1, 1]
        assert {entry.verified for entry in runner.entries.values()} == {"close"}
        for rows in (32, 96, 48, 32):
            check_replays(runner, rows)


def test_graphs_outlive_a_reset_of_the_compiler() -> None:
    runner = bcg.wrap(model(), compile="blocks")
    with torch.no_grad():
        with bcg.warmup():
            runner(*arguments(64))
        torch._dynamo.reset()
        churn = [torch.full((1 << 20,), float("nan"), device=DEVICE) for _ in range(8)]
        check_replays(runner, 64)
        del churn


def test_the_process_may_have_switched_inductors_own_graphs_on() -> None:
    with inductor_config.patch({"triton.cudagraphs": True}), torch.no_grad():
        runner = bcg.wrap(model(), compile="blocks")
        with bcg.warmup():
            runner(*arguments(64))
        for _ in range(3):
            check_replays(runner, 64)


class Drawing(Block):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x, scale) + 0.001 * torch.rand_like(x)


def test_compiled_code_that_draws_random_numbers_never_replays_others_than_eager() -> None:
    """Inductor draws other numbers than eager: whatever becomes of the capture, the generators stay as in eager."""
    module = model()
    module.blocks = nn.ModuleList(Drawing() for _ in module.blocks)
    runner = bcg.wrap(module.to(DEVICE, torch.bfloat16).requires_grad_(False), compile="blocks")
    given = arguments(64)
    with torch.no_grad():
        before = torch.cuda.get_rng_state()
        runner.capture(*given)
        assert torch.equal(torch.cuda.get_rng_state(), before)
        torch.rand(1, device=DEVICE)  # the default generator works
        given = arguments(64)
        torch.cuda.manual_seed(1)
        expected = runner.transformer(*given)
        torch.cuda.manual_seed(1)
        assert ((runner(*given) - expected).float().norm() / expected.float().norm()).item() < 0.02


def test_autotuning_stores_what_it_measured(tmp_path: Path) -> None:
    runner = bcg.wrap(model(), compile="blocks", autotune=True)
    with torch.no_grad():
        with bcg.warmup():
            for rows in (96, 32):
                runner(*arguments(rows))
        for given in (arguments(96), arguments(32)):
            runner(*given)
    [path] = (tmp_path / "bcg").rglob("rank_tp1_dp1.json")
    choices = json.loads(path.read_text())["choices"].values()
    assert all({"eager", "graph", "graph+blocks"} <= set(choice["median_ms"]) for choice in choices)
    assert any("graph+blocks static" in choice["median_ms"] for choice in choices)


def test_a_compile_cache_is_written(tmp_path: Path) -> None:
    runner = bcg.wrap(model(), compile="blocks", compile_cache=str(tmp_path / "compiled"))
    with torch.no_grad():
        assert runner.capture(*arguments(64))
    assert list((tmp_path / "compiled").rglob("*.bin"))


def test_every_installed_attention_backend_is_captured_or_left_out() -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    module = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=64, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[16, 24, 24],
    ).to(DEVICE, torch.bfloat16).requires_grad_(False)  # fmt: skip
    runner = bcg.wrap(module)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=dtype)

    kwargs = {
        "hidden_states": draw(1, 64, 16), "timestep": draw(1), "pooled_projections": draw(1, 32),
        "encoder_hidden_states": draw(1, 16, 32), "txt_ids": draw(16, 3), "img_ids": draw(64, 3), "return_dict": False,
    }  # fmt: skip
    with torch.no_grad():
        call = runner._bind((), kwargs)
        key = runner._self_state.key()
        captured = []
        for name in probes.attention_backends(module):
            try:
                entry = runner._capturer().capture(call, Recipe(attention=name))
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}")
            else:
                captured.append(name)
                assert entry.segments == 1 and entry.verified == "close"
                entry.reset()
        assert runner._self_state.key() == key
        assert "_native_flash" in captured
        assert runner.capture(**kwargs)  # and the plain capture is as it was
        assert torch.equal(runner(**kwargs)[0], module(**kwargs)[0])
