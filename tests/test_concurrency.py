"""Threads that serve, warm up and change things at the same time: every result is exact, and no thread stands still."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.backends.tape import TapePool
from bcg.graph import current_capture
from bcg.static_inputs import StaticInputs

WAIT_S = 120


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@bcg.eager_on_graph
def normalised(x: Tensor) -> Tensor:
    return x / (1 + x.abs().max())


class Block(nn.Module):
    """A matrix product on each side of an eager break."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(normalised(self.first(x))) * self.gain


def run_in_threads(*works: Callable[[], None]) -> None:
    """Run functions at the same time; raise the first error of any, and fail where one does not end."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], None]) -> None:
        try:
            start.wait(WAIT_S)
            with torch.no_grad():
                work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads), "a thread stands still"
    for error in errors:
        raise error


def serve(runner: Any, sizes: list[int], calls: int, seed: int) -> Callable[[], None]:
    """Make a thread's work: calls of random sizes, each compared with eager."""

    def work() -> None:
        drawn, made = random.Random(seed), torch.Generator().manual_seed(seed)
        for _ in range(calls):
            x = torch.randn(drawn.choice(sizes), 8, generator=made)
            assert torch.equal(runner(x), bcg.unwrap(runner)(x))

    return work


def test_four_threads_with_mixed_shapes_get_exact_results_and_capture_nothing() -> None:
    runner = bcg.wrap(Block())
    known, unknown = [1, 2, 3, 5, 8], [4, 6]
    with bcg.warmup():
        for size in known:
            runner(torch.randn(size, 8))
    before = runner.stats
    run_in_threads(*(serve(runner, known + unknown, 100, seed) for seed in range(4)))
    after = runner.stats
    assert after.captures == before.captures == len(known)
    assert after.rejections == after.replay_failures == 0
    assert after.calls - before.calls == 400 == after.replays + after.eager_calls
    assert after.replays > after.eager_calls > 0


def test_a_warm_up_in_one_thread_while_others_serve_and_draw_random_numbers() -> None:
    """The default generator belongs to all threads: a capture that draws nothing must not set it back under them."""
    runner = bcg.wrap(Block())
    runner.capture(torch.randn(1, 8))
    drawn: list[float] = []
    done = threading.Event()

    def draw() -> None:
        while not done.is_set():
            drawn.extend(torch.rand(4, dtype=torch.float64).tolist())

    def warm_up() -> None:
        try:
            with bcg.warmup():
                for size in range(2, 22):
                    x = torch.ones(size, 8)
                    assert torch.equal(runner(x), bcg.unwrap(runner)(x))
        finally:
            done.set()

    run_in_threads(warm_up, draw, serve(runner, [1, 30], 200, 7))
    assert runner.stats.rejections == 0, runner.rejections
    assert runner.stats.captures == 21
    assert len(set(drawn)) == len(drawn), "numbers were drawn twice"


def test_a_forward_that_seeds_is_told_from_a_thread_that_draws() -> None:
    """No operation shows a seed, and with a second thread around the generator may have been moved by that one."""

    class Seeds(Block):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(5)
            return super().forward(x)

    runner, idle = bcg.wrap(Seeds()), threading.Event()
    thread = threading.Thread(target=idle.wait, args=(WAIT_S,), daemon=True)
    thread.start()
    try:
        for _ in range(3):
            x = torch.randn(2, 8)
            with bcg.warmup():
                got, drawn = runner(x), torch.rand(2)
            want = bcg.unwrap(runner)(x)
            assert torch.equal(got, want)
            assert torch.equal(drawn, torch.rand(2)), "the next numbers are those after the seed"
    finally:
        idle.set()
        thread.join(WAIT_S)


def test_threads_that_serve_outside_of_the_window_of_another_thread_capture_nothing() -> None:
    runner = bcg.wrap(Block())
    captured_by: list[int] = []
    capture = runner._capture

    def watched(*args: Any) -> Any:
        captured_by.append(threading.get_ident())
        return capture(*args)

    runner._capture = watched
    mine: list[int] = []

    def warm_up() -> None:
        mine.append(threading.get_ident())
        with bcg.warmup():
            for size in range(1, 10):
                runner(torch.randn(size, 8))

    run_in_threads(warm_up, *(serve(runner, list(range(1, 20)), 100, seed) for seed in range(3)))
    assert set(captured_by) == set(mine)
    assert runner.stats.captures == 9


def test_two_runners_on_one_pool_in_two_threads() -> None:
    one = bcg.wrap(Block())
    other = bcg.wrap(Block(), pool=one)
    sizes = list(range(1, 9))

    def work(runner: Any, seed: int) -> Callable[[], None]:
        def warm_up_and_serve() -> None:
            with bcg.warmup():
                for size in sizes:
                    runner(torch.randn(size, 8))
            serve(runner, sizes, 150, seed)()

        return warm_up_and_serve

    run_in_threads(work(one, 1), work(other, 2))
    assert one.pool is other.pool
    for runner in (one, other):
        assert (runner.stats.captures, runner.stats.rejections) == (8, 0)
        assert runner.stats.replays == 150


def test_two_runners_of_one_module_in_two_threads() -> None:
    module = Block()
    runners = [bcg.wrap(module), bcg.wrap(module)]

    def work(runner: Any) -> Callable[[], None]:
        def warm_up_and_serve() -> None:
            with bcg.warmup():
                for size in range(1, 6):
                    runner(torch.randn(size, 8))
            serve(runner, list(range(1, 6)), 100, 3)()

        return warm_up_and_serve

    run_in_threads(*map(work, runners))
    for runner in runners:
        assert (runner.stats.captures, runner.stats.rejections, runner.stats.replays) == (5, 0, 100)


def test_entries_are_evicted_by_one_thread_while_others_replay() -> None:
    runner = bcg.wrap(Block(), max_entries=2)

    def warm_up() -> None:
        with bcg.warmup():
            for size in [1, 2, 3, 4] * 4:
                runner(torch.randn(size, 8))

    run_in_threads(warm_up, *(serve(runner, [1, 2, 3, 4], 120, seed) for seed in range(2)))
    assert runner.stats.evictions > 0
    assert len(runner.entries) == 2


def test_resets_while_others_serve() -> None:
    runner = bcg.wrap(Block())

    def reset() -> None:
        for _ in range(10):
            with bcg.warmup():
                runner(torch.randn(1, 8))
            runner.reset()

    run_in_threads(reset, *(serve(runner, [1, 2], 150, seed) for seed in range(2)))
    assert len(runner.entries) == 0


def test_a_switch_between_calls_is_seen_by_every_thread() -> None:
    """Threads agree on when the switch is made, as a server that drains its queue before it loads an adapter."""
    runner = bcg.wrap(Block())
    x = torch.randn(3, 8)
    with bcg.warmup():
        for gain in (1.0, 2.0):
            runner.gain = gain
            runner(x)
    round_ends = threading.Barrier(4)

    def work() -> None:
        for number in range(40):
            if round_ends.wait(WAIT_S) == 0:
                runner.gain = 1.0 + number % 2
            round_ends.wait(WAIT_S)
            assert torch.equal(runner(x), bcg.unwrap(runner)(x))

    run_in_threads(*[work] * 4)
    assert runner.stats.captures == 2
    assert runner.stats.replays == 160


def test_a_thread_that_ends_inside_a_failed_capture_leaves_the_runner_usable() -> None:
    class Exits(Block):
        def forward(self, x: Tensor) -> Tensor:
            if current_capture() is not None and threading.current_thread() is not threading.main_thread():
                raise SystemExit
            return super().forward(x)

    runner = bcg.wrap(Exits())
    x = torch.randn(2, 8)
    with pytest.raises(SystemExit):
        run_in_threads(lambda: bool(runner.capture(x)) and None)
    assert current_capture() is None
    assert runner.capture(x)
    run_in_threads(serve(runner, [2], 20, 1), serve(runner, [2], 20, 2))
    assert runner.stats.replays == 40


@pytest.mark.parametrize("work", ["capture", "observe"])
def test_a_capture_runs_behind_a_replay_in_flight_on_another_stream(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    load = StaticInputs.load

    def noted_load(self: StaticInputs, live: Sequence[Tensor]) -> None:
        happened.append("load")
        load(self, live)

    monkeypatch.setattr(StaticInputs, "load", noted_load)
    monkeypatch.setattr(TapePool, "before_replay", lambda self: happened.append("before"))
    monkeypatch.setattr(TapePool, "after_replay", lambda self: happened.append("after"))
    runner = bcg.wrap(nn.Linear(4, 4), verify="off")
    with torch.no_grad():
        getattr(runner, work)(torch.ones(2, 4))
    # The first load writes to memory that the entries share with the one in flight.
    assert happened == ["before", "load", "after"]


def test_misses_and_rejections_are_read_while_another_thread_serves() -> None:
    runner = bcg.wrap(nn.Linear(4, 4), max_rejections=20)
    serving = threading.Event()

    def serve() -> None:
        try:
            with torch.no_grad():
                for number in range(600):
                    x = torch.ones(1 + number % 300, 4)
                    runner(x)
                    runner._self_cache.reject(runner._key(runner._bind((x,), {})), "no reason")
        finally:
            serving.set()

    def read() -> None:
        while not serving.is_set():
            assert isinstance(runner.misses, tuple)
            assert len(runner.rejections) <= 21

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run_in_threads(serve, read)
    finally:
        sys.setswitchinterval(interval)
