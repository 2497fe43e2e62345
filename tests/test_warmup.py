"""The warmup window: where a call may capture, who sees it, and when it warns."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
    assert not bcg.in_warmup()


@pytest.fixture
def runner() -> bcg.BreakableCudaGraphRunner:
    return bcg.wrap(Double())


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert results, "the thread hangs or raised"
    return results[0]


def captures_of_a_call(runner: bcg.BreakableCudaGraphRunner, size: int = 3) -> int:
    """Call and return how many captures that made; the result is right whatever happens."""
    before = runner.stats.captures
    x = torch.randn(size)
    assert torch.equal(runner(x), x * 2)
    return runner.stats.captures - before


# -- where a call captures ---------------------------------------------------------------------------------------------


def test_a_call_captures_inside_a_window_and_nowhere_else(runner: bcg.BreakableCudaGraphRunner) -> None:
    assert captures_of_a_call(runner) == 0
    with bcg.warmup():
        assert captures_of_a_call(runner) == 1
        assert captures_of_a_call(runner) == 0
    assert captures_of_a_call(runner, size=4) == 0
    assert runner.stats.replays == 2 - 1


def test_in_warmup_tells(runner: bcg.BreakableCudaGraphRunner) -> None:
    assert not bcg.in_warmup()
    with bcg.warmup():
        assert bcg.in_warmup()
    assert not bcg.in_warmup()


def test_a_window_serves_every_runner_of_its_context() -> None:
    one, other = bcg.wrap(Double()), bcg.wrap(Double())
    with bcg.warmup() as window:
        assert captures_of_a_call(one) + captures_of_a_call(other) == 2
    assert (window.calls, window.captures) == (2, 2)


def test_a_window_counts_only_calls_that_could_have_captured(runner: bcg.BreakableCudaGraphRunner) -> None:
    with bcg.warmup() as window:
        for _ in range(3):
            captures_of_a_call(runner)
    assert (window.calls, window.captures, window.is_open) == (1, 1, False)


def test_a_window_can_be_opened_again(runner: bcg.BreakableCudaGraphRunner) -> None:
    for size in (2, 3):
        with bcg.warmup():
            assert captures_of_a_call(runner, size) == 1


# -- nesting and errors ------------------------------------------------------------------------------------------------


def test_a_window_inside_another_one_closes_alone(runner: bcg.BreakableCudaGraphRunner) -> None:
    with bcg.warmup() as outer:
        with bcg.warmup() as inner:
            assert captures_of_a_call(runner, 2) == 1
        assert bcg.in_warmup()
        assert captures_of_a_call(runner, 3) == 1
    assert (outer.captures, inner.captures) == (1, 1)
    assert captures_of_a_call(runner, 4) == 0


def test_a_runners_window_inside_its_own_closes_alone(runner: bcg.BreakableCudaGraphRunner) -> None:
    with bcg.warmup(runner):
        with bcg.warmup(runner):
            assert captures_of_a_call(runner, 2) == 1
        assert captures_of_a_call(runner, 3) == 1
    assert captures_of_a_call(runner, 4) == 0


@pytest.mark.parametrize("of_runner", [False, True])
def test_an_error_inside_a_window_passes_and_closes_it(runner: bcg.BreakableCudaGraphRunner, of_runner: bool) -> None:
    error = ValueError("from the pipeline")
    with pytest.raises(ValueError) as caught, bcg.warmup(runner if of_runner else None) as window:
        captures_of_a_call(runner)
        raise error
    assert caught.value is error
    assert not window.is_open
    assert not bcg.in_warmup()
    assert captures_of_a_call(runner, 4) == 0
    with bcg.warmup():
        assert captures_of_a_call(runner, 5) == 1


# -- threads and tasks -------------------------------------------------------------------------------------------------


def test_threads_do_not_inherit_a_window(runner: bcg.BreakableCudaGraphRunner) -> None:
    with bcg.warmup():
        assert in_thread(bcg.in_warmup) is False
        with torch.no_grad():
            assert in_thread(lambda: captures_of_a_call(runner)) == 0
        assert captures_of_a_call(runner) == 1


def test_the_window_of_a_runner_is_open_for_all_threads_and_for_that_runner_alone(
    runner: bcg.BreakableCudaGraphRunner,
) -> None:
    other = bcg.wrap(Double())
    with bcg.warmup(runner) as window:
        assert not bcg.in_warmup()
        assert in_thread(lambda: captures_of_a_call(runner, 2)) == 1
        assert captures_of_a_call(runner, 3) == 1
        assert captures_of_a_call(other) == 0
    assert window.captures == 2
    assert in_thread(lambda: captures_of_a_call(runner, 4)) == 0


def test_the_window_of_a_runner_is_not_that_of_another_runner_of_the_same_module() -> None:
    module = Double()
    one, other = bcg.wrap(module), bcg.wrap(module)
    with bcg.warmup(one):
        assert captures_of_a_call(other) == 0
        assert captures_of_a_call(one) == 1


def test_tasks_started_inside_a_window_capture_while_it_is_open(runner: bcg.BreakableCudaGraphRunner) -> None:
    async def call() -> int:
        return captures_of_a_call(runner)

    async def main() -> int:
        with bcg.warmup():
            return await asyncio.create_task(call())

    assert asyncio.run(main()) == 1


def test_a_task_that_outlives_its_window_captures_no_more(runner: bcg.BreakableCudaGraphRunner) -> None:
    async def late(closed: asyncio.Event) -> tuple[bool, int]:
        await closed.wait()
        return bcg.in_warmup(), captures_of_a_call(runner)

    async def main() -> tuple[bool, int]:
        closed = asyncio.Event()
        with bcg.warmup():
            task = asyncio.create_task(late(closed))
            captures_of_a_call(runner, 7)
        closed.set()
        return await task

    assert asyncio.run(main()) == (False, 0)


def test_a_copied_context_that_outlives_its_window_captures_no_more(runner: bcg.BreakableCudaGraphRunner) -> None:
    with bcg.warmup():
        captures_of_a_call(runner, 7)
        context = contextvars.copy_context()
    assert context.run(captures_of_a_call, runner) == 0
    assert context.run(bcg.in_warmup) is False


def test_a_late_task_still_captures_in_the_window_of_its_runner(runner: bcg.BreakableCudaGraphRunner) -> None:
    with bcg.warmup():
        captures_of_a_call(runner, 7)
        context = contextvars.copy_context()
    with bcg.warmup(runner):
        assert context.run(captures_of_a_call, runner) == 1


def test_concurrent_tasks_do_not_share_their_windows(runner: bcg.BreakableCudaGraphRunner) -> None:
    async def warming(entered: asyncio.Event, done: asyncio.Event) -> int:
        with bcg.warmup():
            entered.set()
            await done.wait()
            return captures_of_a_call(runner, 2)

    async def serving(entered: asyncio.Event, done: asyncio.Event) -> int:
        await entered.wait()
        made = captures_of_a_call(runner, 3)
        done.set()
        return made

    async def main() -> list[int]:
        entered, done = asyncio.Event(), asyncio.Event()
        return list(await asyncio.gather(warming(entered, done), serving(entered, done)))

    assert asyncio.run(main()) == [1, 0]


# -- warnings ----------------------------------------------------------------------------------------------------------


class Growing(nn.Module):
    """Appends in every forward, which no graph can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return x * 2


def window_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "warmup window" in record.getMessage()]


def test_a_window_that_saw_calls_and_captured_nothing_warns(caplog: pytest.LogCaptureFixture) -> None:
    runner = bcg.wrap(Growing())
    with caplog.at_level(logging.WARNING, "bcg"), bcg.warmup():
        captures_of_a_call(runner)
        captures_of_a_call(runner)
    assert window_warnings(caplog) == [
        "a warmup window saw 2 calls and captured nothing: runner.explain(...) tells why for one call."
    ]


def test_a_window_that_saw_only_calls_with_gradients_warns(caplog: pytest.LogCaptureFixture) -> None:
    runner = bcg.wrap(nn.Linear(2, 2))
    with caplog.at_level(logging.WARNING, "bcg"), bcg.warmup(), torch.enable_grad():
        runner(torch.ones(1, 2))
    assert len(window_warnings(caplog)) == 1


def test_a_window_that_captured_does_not_warn(
    runner: bcg.BreakableCudaGraphRunner, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "bcg"), bcg.warmup():
        captures_of_a_call(runner)
        captures_of_a_call(bcg.wrap(Growing()))
    assert window_warnings(caplog) == []


def test_a_window_without_calls_or_with_replays_alone_does_not_warn(
    runner: bcg.BreakableCudaGraphRunner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.capture(torch.ones(3))
    with caplog.at_level(logging.WARNING, "bcg"):
        with bcg.warmup():
            pass
        with bcg.warmup():
            captures_of_a_call(runner)
    assert runner.stats.replays == 1
    assert window_warnings(caplog) == []


# -- hosts with a flag of their own ------------------------------------------------------------------------------------


def test_capture_when_is_asked_at_misses_outside_a_window() -> None:
    asked: list[bool] = []
    flag = [False]

    def capture_when() -> bool:
        asked.append(flag[0])
        return flag[0]

    runner = bcg.wrap(Double(), capture_when=capture_when)
    assert captures_of_a_call(runner) == 0
    flag[0] = True
    assert captures_of_a_call(runner) == 1
    assert captures_of_a_call(runner) == 0
    with bcg.warmup():
        assert captures_of_a_call(runner, 4) == 1
    assert asked == [False, True]


def test_a_runner_that_is_gone_leaves_no_window_behind() -> None:
    runner = bcg.wrap(Double())
    with bcg.warmup(runner):
        captures_of_a_call(runner)
    identity = weakref.ref(runner._self_identity)
    del runner
    gc.collect()
    assert identity() is None
