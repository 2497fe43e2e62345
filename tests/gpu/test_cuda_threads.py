"""Threads and streams on the GPU: results are exact, nothing is captured while serving, and no thread stands still."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg
from streams import run_in_threads

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@bcg.eager_on_graph
def normalised(x: Tensor) -> Tensor:
    return x / (1 + x.abs().max())


class Block(nn.Module):
    """A matrix product on each side of an eager break."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(normalised(self.first(x)))


def serve(runner: Any, sizes: list[int], calls: int, seed: int) -> Callable[[], None]:
    """Make a thread's work: calls of random sizes, each compared with eager."""

    def work() -> None:
        drawn, made = random.Random(seed), torch.Generator(DEVICE).manual_seed(seed)
        for _ in range(calls):
            x = torch.randn(drawn.choice(sizes), 256, generator=made, device=DEVICE)
            assert torch.equal(runner(x), bcg.unwrap(runner)(x))

    return work


def warmed(sizes: list[int], **options: Any) -> Any:
    runner = bcg.wrap(Block().to(DEVICE), **options)
    with torch.no_grad(), bcg.warmup():
        for size in sizes:
            runner(torch.randn(size, 256, device=DEVICE))
    return runner


def test_two_thousand_calls_of_four_threads_on_four_streams_are_exact() -> None:
    known, unknown = [2048, 1024, 500, 64, 7], [300, 90]
    runner = warmed(known)
    before = runner.stats
    run_in_threads(*(serve(runner, known + unknown, 500, seed) for seed in range(4)))
    after = runner.stats
    assert after.captures == before.captures == len(known)
    assert after.rejections == after.replay_failures == 0
    assert after.calls - before.calls == 2000
    assert after.replays > after.eager_calls > 0


def warm_up(runner: Any, done: threading.Event) -> Callable[[], None]:
    """Make a thread's work: twenty captures, each compared with eager."""

    def work() -> None:
        try:
            with bcg.warmup():
                for size in range(100, 120):
                    x = torch.randn(size, 256, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(size))
                    assert torch.equal(runner(x), bcg.unwrap(runner)(x))
        finally:
            done.set()

    return work


def test_a_warm_up_while_others_serve_copy_and_allocate() -> None:
    """A loader that pins memory, a metrics poller and a serving thread must not notice a capture, nor disturb it."""
    runner, done = warmed([64]), threading.Event()

    def load() -> None:
        while not done.is_set():
            pinned = torch.ones(1 << 16).pin_memory()
            assert pinned.to(DEVICE, non_blocking=True).sum().item() == 1 << 16

    def allocate() -> None:
        number = 0
        while not done.is_set():
            number += 1
            block = torch.empty((8 + number % 7) << 20, dtype=torch.uint8, device=DEVICE)
            del block
            torch.cuda.memory_stats()
            if number % 50 == 0:
                torch.cuda.empty_cache()

    run_in_threads(warm_up(runner, done), load, allocate, serve(runner, [64, 33], 200, 7))
    assert runner.stats.rejections == 0, runner.rejections
    assert runner.stats.captures == 21
    torch.randn(3, device=DEVICE)


def test_two_runners_on_one_pool_in_two_threads() -> None:
    sizes = [1024, 200, 8]
    first = warmed(sizes)
    second = warmed(sizes, pool=first.pool)
    run_in_threads(serve(first, sizes, 300, 1), serve(second, sizes, 300, 2), serve(first, sizes, 300, 3))
    assert first.stats.eager_calls == second.stats.eager_calls == 0
    assert first.stats.captures == second.stats.captures == len(sizes)


def test_evictions_while_others_replay() -> None:
    runner = warmed([512, 256, 128], max_entries=3)

    def warm_up() -> None:
        for size in range(300, 330):
            runner.capture(torch.randn(size, 256, device=DEVICE))

    run_in_threads(warm_up, *(serve(runner, [512, 256, 128, 301, 310], 150, seed) for seed in range(3)))
    assert runner.stats.evictions > 0
    assert len(runner.entries) == 3
