"""Device memory: one pool for many signatures, given back when asked, under every allocator that torch has."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20
WIDTH = 1024
ROWS = [8192 - 512 * step for step in range(12)]  # 32 MiB a float32 tensor of the largest


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Layers(nn.Module):
    """Matrix products with intermediates four times as large as the input, and a break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(nn.functional.gelu(self.up(x)))
        bcg.break_graph()
        return self.down(nn.functional.gelu(self.up(x)))


def inputs(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, device=DEVICE)


def free_bytes() -> int:
    """Return the device's free memory when torch caches nothing."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(DEVICE)[0]


def warmed_module() -> Layers:
    """Return a module whose kernels are loaded, so that what they take is no part of a measurement."""
    module = Layers().to(DEVICE)
    runner = bcg.wrap(module)
    for rows in ROWS:
        runner.capture(inputs(rows))
    runner.reset()
    return module


def check_exact(runner: Any, rows: list[int]) -> None:
    for count in rows:
        before = runner.stats.replays
        for _ in range(2):
            x = inputs(count)
            assert torch.equal(runner(x), bcg.unwrap(runner)(x))
        assert runner.stats.replays == before + 2, runner.explain(inputs(count))


def test_twelve_signatures_in_one_pool_need_little_more_than_the_largest() -> None:
    module = warmed_module()
    before = free_bytes()
    alone = bcg.wrap(module)
    assert alone.capture(inputs(ROWS[0]))
    largest_bytes = before - free_bytes()
    alone.reset()
    before = free_bytes()
    runner = bcg.wrap(module)
    for rows in ROWS:
        assert runner.capture(inputs(rows))
    held_bytes = before - free_bytes()
    print(f"largest {largest_bytes / MIB:.1f} MiB, twelve {held_bytes / MIB:.1f} MiB\n{runner.memory()}")
    assert held_bytes <= 1.05 * largest_bytes + len(ROWS) * 15 * MIB
    check_exact(runner, [*ROWS, *reversed(ROWS)])


def test_the_report_is_what_the_device_says() -> None:
    module = warmed_module()
    before = free_bytes()
    runner = bcg.wrap(module)
    for rows in ROWS:
        assert runner.capture(inputs(rows))
    held_bytes = before - free_bytes()
    report = runner.memory()
    print(f"device {held_bytes / MIB:.1f} MiB\n{report}")
    assert report.pool_bytes > 0
    assert report.total_bytes == pytest.approx(held_bytes, rel=0.1, abs=32 * MIB)


def test_many_kernel_nodes_show_as_memory_outside_the_allocator() -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for step in range(20_000):
                x = x + step
            return x

    module = Many()
    runner = bcg.wrap(nn.Sequential(nn.Linear(8, 8), module).to(DEVICE))
    assert runner.capture(torch.randn(4, 8, device=DEVICE))
    outside_bytes = runner.memory().outside_bytes
    print(f"{outside_bytes / 20_000:.0f} bytes a node")
    assert outside_bytes > 20_000 * 1000
    for _ in range(2):
        x = torch.randn(4, 8, device=DEVICE)
        assert torch.equal(runner(x), bcg.unwrap(runner)(x))
    # What the driver took for a graph it keeps for the next one: after a reset it does not show as free memory.
    runner.reset()
    assert runner.memory().outside_bytes == 0


def test_compact_gives_an_evicted_share_back_to_the_device() -> None:
    module = warmed_module()
    runner = bcg.wrap(module, max_entries=2)
    for rows in (8192, 1024, 512):
        assert runner.capture(inputs(rows))
    abandoned_bytes = runner.memory().abandoned_bytes
    assert abandoned_bytes > 100 * MIB
    before = free_bytes()
    freed_bytes = runner.compact()
    given_back_bytes = free_bytes() - before
    print(f"compact() says {freed_bytes / MIB:.1f} MiB, the device {given_back_bytes / MIB:.1f} MiB")
    assert given_back_bytes > 0.8 * abandoned_bytes
    assert freed_bytes == pytest.approx(given_back_bytes, abs=64 * MIB)
    check_exact(runner, [1024, 512])
    assert runner.compact() == 0


def test_a_budget_holds_on_the_device_after_the_largest_was_evicted() -> None:
    module = warmed_module()
    runner = bcg.wrap(module, max_bytes=200 * MIB)
    before = free_bytes()
    for rows in (8192, 1024, 512, 256):
        assert runner.capture(inputs(rows))
    assert before - free_bytes() <= 200 * MIB + 32 * MIB
    assert len(runner.entries) == 3
    check_exact(runner, [1024, 512, 256])


def test_release_makes_room_for_an_allocation_elsewhere_and_recapture_restores_the_graphs() -> None:
    module = warmed_module()
    runner = bcg.wrap(module)
    before = free_bytes()
    for rows in ROWS[:3]:
        assert runner.capture(inputs(rows))
    held_bytes = before - free_bytes()
    ballast = torch.empty(free_bytes() - 64 * MIB, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(held_bytes - 16 * MIB, dtype=torch.uint8, device=DEVICE)
    freed_bytes = runner.release()
    assert freed_bytes == pytest.approx(held_bytes, rel=0.1, abs=32 * MIB)
    room = torch.empty(held_bytes - 16 * MIB, dtype=torch.uint8, device=DEVICE)
    del room, ballast
    torch.cuda.empty_cache()
    assert runner.recapture() == 3
    check_exact(runner, ROWS[:3])


def test_reset_returns_the_device_to_what_it_was() -> None:
    module = warmed_module()
    before = free_bytes()
    for _ in range(3):
        runner = bcg.wrap(module)
        for rows in ROWS:
            assert runner.capture(inputs(rows))
        check_exact(runner, ROWS[:2])
        runner.reset()
        assert free_bytes() >= 0.99 * before


def test_an_eviction_during_replays_on_another_stream_leaves_their_results_right() -> None:
    runner = bcg.wrap(warmed_module(), max_entries=2)
    for rows in (8192, 4096):
        assert runner.capture(inputs(rows))
    stream = torch.cuda.Stream()
    for turn in range(3):
        x = inputs(8192 if turn == 0 else 8192 - 64 * turn)
        runner.capture(x)
        expected = bcg.unwrap(runner)(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            results = [runner(x) for _ in range(4)]
        for rows in (300 + turn, 200 + turn):  # evicts the entry whose replays are queued
            assert runner.capture(inputs(rows))
        churn = [torch.full((1 << 22,), float("nan"), device=DEVICE) for _ in range(8)]
        torch.cuda.synchronize()
        del churn
        assert all(torch.equal(result, expected) for result in results)


def test_two_runners_in_one_pool_replay_in_turn() -> None:
    torch.manual_seed(1)
    first = bcg.wrap(Layers().to(DEVICE))
    second = bcg.wrap(Layers().to(DEVICE), pool=first.pool)
    for rows in (2048, 1024):
        for runner in (first, second):
            assert runner.capture(inputs(rows))
    assert first.memory().pool_runners == 2
    for _ in range(3):
        check_exact(first, [1024, 2048])
        check_exact(second, [2048, 1024])
    first.reset()
    churn = [torch.full((1 << 22,), float("nan"), device=DEVICE) for _ in range(8)]
    del churn
    check_exact(second, [2048, 1024])


def test_recapture_after_the_weights_moved() -> None:
    runner = bcg.wrap(Layers().to(DEVICE))
    for rows in (2048, 1024):
        assert runner.capture(inputs(rows))
    runner.up.weight = nn.Parameter(torch.randn_like(runner.up.weight), requires_grad=False)
    assert runner.recapture() == 2
    check_exact(runner, [2048, 1024])


PROGRAM = """
    import torch
    from torch import nn
    import bcg

    torch.manual_seed(0)
    runner = bcg.wrap(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda(), max_entries=3)
    with torch.no_grad():
        with bcg.warmup():
            for rows in (4096, 2048, 1024, 512):
                runner(torch.randn(rows, 512, device="cuda"))
        for turn in range(2):
            for rows in (2048, 1024, 512):
                churn = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
                x = torch.randn(rows, 512, device="cuda")
                got = runner(x)
                del churn
                assert torch.equal(got, bcg.unwrap(runner)(x)), rows
            if turn == 0 and runner.entries:
                runner.compact()
        torch.randn(3, device="cuda")
    print("replays", runner.stats.replays, "refusals", runner.stats.refusals, "eager", runner.stats.eager_calls)
    print("memory", runner.memory().total_bytes)
    runner.reset()
"""


def run_under(allocator: str) -> subprocess.CompletedProcess[str]:
    # The older name of the variable is read by every version.
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTORCH_ALLOC_CONF": allocator}
    command = [sys.executable, "-c", "import logging; logging.basicConfig()\n" + textwrap.dedent(PROGRAM)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)


def test_expandable_segments_work() -> None:
    done = run_under("expandable_segments:True")
    assert done.returncode == 0, done.stderr
    assert "replays 6 refusals 0 eager 0" in done.stdout, done.stdout + done.stderr


def test_the_asynchronous_allocator_is_refused_with_one_message_and_eager_images_are_right() -> None:
    done = run_under("backend:cudaMallocAsync")
    assert done.returncode == 0, done.stderr
    assert "replays 0 refusals 10 eager 10" in done.stdout, done.stdout + done.stderr
    assert done.stderr.count("cudaMallocAsync") == 1, done.stderr
