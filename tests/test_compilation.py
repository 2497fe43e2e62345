"""Captures of compiled code, on the tape with a compiler backend that makes no machine code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg import _torch
from bcg.compilation import repeated_blocks

ARGUMENTS = {"compile_backend": "aot_eager"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.nn.functional.gelu(self.linear(x))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = Block, number: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(number)])
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Breaking(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_compiled_captures_replay_close_to_eager(compiled: str, mode: type) -> None:
    runner = bcg.wrap(Model(), compile=compiled, **ARGUMENTS)
    with mode():
        with bcg.warmup():
            runner(torch.randn(4, 8))
        for _ in range(2):
            x = torch.randn(4, 8)
            torch.testing.assert_close(runner(x), runner.transformer(x))
    assert runner.stats.replays == 2
    assert [entry.verified for entry in runner.entries.values()] == ["close"]


def test_eager_calls_stay_uncompiled_and_bit_exact() -> None:
    runner = bcg.wrap(Model(), compile="blocks", **ARGUMENTS)
    with torch.no_grad():
        with bcg.warmup():
            runner(torch.randn(4, 8))
        before = _torch.compiled_graphs()
        for rows in (5, 6):
            x = torch.randn(rows, 8)
            assert torch.equal(runner(x), runner.transformer(x))
    assert _torch.compiled_graphs() == before > 0
    assert runner.stats.eager_calls == 2
    assert all("forward" not in block.__dict__ for block in runner.blocks)


def test_blocks_of_one_class_are_compiled_once() -> None:
    before = _torch.compiled_graphs()
    runner = bcg.wrap(Model(number=6), compile="blocks", **ARGUMENTS)
    with torch.no_grad(), bcg.warmup():
        runner(torch.randn(4, 8))
    assert _torch.compiled_graphs() - before == 1


def test_many_shapes_pass_dynamos_recompile_limit() -> None:
    runner = bcg.wrap(Model(), compile="blocks", compile_dynamic="no", max_entries=64, **ARGUMENTS)
    with torch.no_grad():
        with bcg.warmup():
            for rows in range(1, 13):
                runner(torch.randn(rows, 8))
        for rows in (1, 12):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(runner(x), runner.transformer(x))
    assert (runner.stats.captures, runner.stats.replays) == (12, 2)


def test_blocks_that_cannot_be_one_graph_are_compiled_with_graph_breaks() -> None:
    runner = bcg.wrap(Model(Breaking), compile="blocks", **ARGUMENTS)
    with torch.no_grad():
        with bcg.warmup():
            runner(torch.randn(4, 8))
        for _ in range(2):
            x = torch.randn(4, 8)
            torch.testing.assert_close(runner(x), runner.transformer(x))
    assert runner.stats.replays == 2


def test_diffusers_own_list_of_repeated_blocks_comes_first() -> None:
    model = Model()
    assert repeated_blocks(model) == ("blocks.0", "blocks.1", "blocks.2")
    model._repeated_blocks = ["Linear"]  # type: ignore[assignment]
    assert repeated_blocks(model) == ("blocks.0.linear", "blocks.1.linear", "blocks.2.linear", "out")


def test_a_compile_cache_that_cannot_be_read_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warm() -> None:
        runner = bcg.wrap(Model(), compile="blocks", compile_cache=str(tmp_path), **ARGUMENTS)
        with torch.no_grad(), bcg.warmup():
            runner(torch.randn(4, 8))
        assert runner.stats.captures == 1

    warm()
    [folder] = [path for path in tmp_path.glob("*/*") if path.is_dir()] or [None]
    if folder is None:
        pytest.skip("this compiler backend leaves no artifacts")
    [file] = folder.glob("*.bin")
    file.write_bytes(b"no artifacts")
    torch._dynamo.reset()
    warm()
    assert sum("is ignored" in record.getMessage() for record in caplog.records) == 1
