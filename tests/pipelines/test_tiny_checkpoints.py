"""Every tiny checkpoint is written, read by its diffusers pipeline, and draws what the prompt and the seed say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from bcg.pipelines.tiny_registry import TINY, TinyPipeline

PROMPT = "a red fox in the snow"
LONGER_PROMPT = "a small blue boat on a quiet lake, seen from the shore at dawn, painted in oil"
MAX_CHECKPOINT_BYTES = 20 * 2**20


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=list(TINY.values()), ids=list(TINY), scope="module")
def tiny(request: pytest.FixtureRequest) -> TinyPipeline:
    """One of the registered checkpoints."""
    result: TinyPipeline = request.param
    return result


@pytest.fixture(scope="module")
def folder(tiny: TinyPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint on disk."""
    path = tmp_path_factory.mktemp(tiny.name)
    tiny.build(path)
    return path


@pytest.fixture(scope="module")
def pipe(tiny: TinyPipeline, folder: Path) -> Any:
    """The pipeline as read from disk."""
    result = tiny.load(folder)
    result.set_progress_bar_config(disable=True)
    return result


def _draw(pipe: Any, tiny: TinyPipeline, prompt: str, **more: Any) -> torch.Tensor:
    call = {**tiny.example_call(prompt=prompt, seed=1), **more}
    return torch.as_tensor(pipe(**call, return_dict=False)[0])


def test_each_prompt_has_its_own_finite_result(pipe: Any, tiny: TinyPipeline) -> None:
    first, second = _draw(pipe, tiny, PROMPT), _draw(pipe, tiny, LONGER_PROMPT)
    assert first.isfinite().all()
    assert second.isfinite().all()
    assert first.shape == second.shape
    assert not torch.equal(first, second)


def test_same_call_twice_is_equal(pipe: Any, tiny: TinyPipeline) -> None:
    assert torch.equal(_draw(pipe, tiny, PROMPT), _draw(pipe, tiny, PROMPT))


def test_runs_in_bfloat16(tiny: TinyPipeline, folder: Path) -> None:
    pipe = tiny.load(folder, torch_dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    call = tiny.example_call(prompt=PROMPT, seed=1, dtype=torch.bfloat16)
    assert torch.as_tensor(pipe(**call, return_dict=False)[0]).isfinite().all()


def test_sizes_can_be_chosen(pipe: Any, tiny: TinyPipeline) -> None:
    usual = tiny.example_call(prompt=PROMPT, seed=1)
    call = tiny.example_call(prompt=PROMPT, seed=1, height=2 * usual["height"], width=2 * usual["width"], steps=3)
    latents = torch.as_tensor(pipe(**call, return_dict=False)[0])
    assert latents.isfinite().all()
    assert latents.numel() == 4 * _draw(pipe, tiny, PROMPT).numel()


def test_result_can_be_decoded(pipe: Any, tiny: TinyPipeline) -> None:
    call = tiny.example_call(prompt=PROMPT, seed=1)
    pixels = _draw(pipe, tiny, PROMPT, output_type="pt")
    assert pixels.isfinite().all()
    assert pixels.shape[-2:] == (call["height"], call["width"])


def test_denoisers_are_those_that_are_called(pipe: Any, tiny: TinyPipeline) -> None:
    calls = dict.fromkeys(tiny.denoisers, 0)

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    handles = [getattr(pipe, name).register_forward_pre_hook(count(name)) for name in tiny.denoisers]
    _draw(pipe, tiny, PROMPT)
    for handle in handles:
        handle.remove()
    assert all(calls.values()), calls
    assert sum(calls.values()) >= 2, "every step calls a denoiser"


def test_no_denoiser_parameter_is_all_zero(pipe: Any, tiny: TinyPipeline) -> None:
    zeros = [
        f"{component}.{name}"
        for component in tiny.denoisers
        for name, parameter in getattr(pipe, component).named_parameters()
        if not parameter.any()
    ]
    assert not zeros


def test_checkpoint_is_small_and_safe(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_CHECKPOINT_BYTES
    assert not [path for path in files if path.suffix in {".bin", ".pt", ".pth", ".ckpt"}]


def test_building_again_gives_the_same_weights(tiny: TinyPipeline, folder: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    tiny.build(tmp_path)
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers are left alone"
    weights = [path.relative_to(folder) for path in folder.rglob("*.safetensors")]
    assert weights
    assert all((folder / path).read_bytes() == (tmp_path / path).read_bytes() for path in weights)


def test_names_are_keys() -> None:
    assert [tiny.name for tiny in TINY.values()] == list(TINY)
