"""What entries hold is counted once and honestly, and given back when that is asked for."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.backends.tape import TapeBackend, TapePool
from bcg.memory import Ledger, OutsideMeter, bytes_text
from bcg.pools import is_working, working_in
from bcg.static_inputs import StaticArena, StaticInputs

FLOAT_BYTES, INTEGER_BYTES = 4, 8
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0), requires_grad=False)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        return x * self.weight if ids is None else x[ids] * self.weight


def capture(runner: Any, *sizes: int) -> None:
    for size in sizes:
        assert runner.capture(torch.randn(size))


def check_replays(runner: Any, *sizes: int) -> None:
    for size in sizes:
        before = runner.stats.replays
        for _ in range(2):
            x = torch.randn(size)
            assert torch.equal(runner(x), bcg.unwrap(runner)(x))
        assert runner.stats.replays == before + 2, runner.explain(torch.randn(size))


# -- the report --------------------------------------------------------------------------------------------------------


def test_static_inputs_that_entries_share_are_counted_once() -> None:
    runner = bcg.wrap(Double())
    capture(runner, 100, 10, 50)
    report = runner.memory()
    assert [entry.shared_static_bytes for entry in report.entries] == [400, 40, 200]
    assert report.shared_static_bytes == report.static_bytes == report.total_bytes == 400
    assert [entry.bytes for entry in runner.entries.values()] == [400, 0, 0]
    check_replays(runner, 100, 10, 50)


def test_memory_from_before_the_arena_grew_is_counted_while_an_entry_holds_it() -> None:
    runner = bcg.wrap(Double())
    capture(runner, 10, 50)
    assert runner.memory().shared_static_bytes == (10 + 50) * FLOAT_BYTES
    assert runner.memory().abandoned_bytes == 10 * FLOAT_BYTES
    check_replays(runner, 10, 50)


def test_integers_are_an_entrys_own() -> None:
    runner = bcg.wrap(Double())
    for size in (10, 5):
        assert runner.capture(torch.randn(10), torch.arange(size))
    report = runner.memory()
    assert [entry.static_bytes for entry in report.entries] == [10 * INTEGER_BYTES, 5 * INTEGER_BYTES]
    assert report.shared_static_bytes == 10 * FLOAT_BYTES
    assert report.total_bytes == 15 * INTEGER_BYTES + 10 * FLOAT_BYTES
    assert [entry.own_bytes for entry in report.entries] == [entry.own_bytes for entry in runner.entries.values()]


def test_results_of_eager_breaks_are_an_entrys_own() -> None:
    @bcg.eager_on_graph
    def middle(x: Tensor) -> Tensor:
        return x + 1

    class Breaking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return middle(x * 2) * 3

    runner = bcg.wrap(Breaking())
    capture(runner, 6)
    [entry] = runner.memory().entries
    assert entry.break_bytes == 6 * FLOAT_BYTES
    assert runner.memory().break_bytes == 6 * FLOAT_BYTES
    check_replays(runner, 6)


def test_hoists_outside_and_pool_bytes_are_in_the_sums() -> None:
    runner = bcg.wrap(Double())
    capture(runner, 3)
    [entry] = runner.entries.values()
    entry.hoists = [SimpleNamespace(value=torch.zeros(5))]  # the tape has none
    entry.outside_bytes, entry.pool_bytes = 1000, 300
    report = runner.memory()
    assert (report.hoist_bytes, report.outside_bytes, report.entries[0].pool_bytes) == (20, 1000, 300)
    assert report.entries[0].own_bytes == entry.own_bytes == 1020
    assert report.total_bytes == 1020 + 12
    assert entry.bytes == 1020 + 12 + 300


def test_the_report_prints_a_table() -> None:
    runner = bcg.wrap(Double())
    capture(runner, 1000, 10)
    head, *lines, summary = str(runner.memory()).splitlines()
    assert "static own" in head
    assert len(lines) == 2
    assert "x float32[1000]" in lines[0] and "3.9 KiB" in lines[0]
    assert summary.startswith("2 entries hold 3.9 KiB")
    assert "0 entries" in str(bcg.wrap(Double()).memory())


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1.0 MiB"), (5 << 40, "5.0 TiB")])
def test_sizes_are_told_in_units(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_memory_is_told_while_another_thread_captures() -> None:
    inside, told = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if wait[0]:
                inside.set()
                told.wait(10)
            return x * 2

    wait = [False]
    runner = bcg.wrap(Slow())
    capture(runner, 3)
    wait[0] = True

    def work() -> None:
        with torch.no_grad():
            runner.capture(torch.randn(4))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert inside.wait(10)
    assert len(runner.memory().entries) == 1
    told.set()
    thread.join(20)
    assert len(runner.memory().entries) == 2


# -- the ledger --------------------------------------------------------------------------------------------------------


class GrowingPool(TapePool):
    """A pool with a size, as the tape's has none."""

    size_bytes = 0

    def bytes(self) -> int:
        return self.size_bytes


def an_entry(pool_bytes: int) -> Any:
    return SimpleNamespace(pool_bytes=pool_bytes, inputs=StaticInputs([], CPU, StaticArena()))


def test_growth_of_the_pool_is_charged_to_whose_capture_it_was_also_where_that_failed() -> None:
    pool = GrowingPool(TapeBackend(), CPU)
    ledger, other = Ledger(pool, StaticArena()), Ledger(pool, StaticArena())
    with ledger.charging() as charge:
        pool.size_bytes += 100
    with other.charging():
        pool.size_bytes += 30
    with contextlib.suppress(RuntimeError), ledger.charging():
        pool.size_bytes += 7
        raise RuntimeError
    assert charge.pool_bytes == 100
    assert (ledger.shared_bytes([]), other.shared_bytes([])) == (107, 30)
    assert ledger.abandoned_bytes([an_entry(100)]) == 7
    assert ledger.abandoned_bytes([]) == 107


def test_a_pool_that_went_with_its_last_graph_is_on_nobodys_account() -> None:
    pool = GrowingPool(TapeBackend(), CPU)
    ledger = Ledger(pool, StaticArena())
    with ledger.charging():
        pool.size_bytes += 100
    pool.size_bytes = 0
    assert ledger.shared_bytes([]) == 0
    with ledger.charging():
        pool.size_bytes += 10
    assert ledger.shared_bytes([]) == 10


def test_the_outside_meter_takes_torchs_own_memory_off() -> None:
    backend: Any = SimpleNamespace(free_bytes=lambda _: free[0], reserved_bytes=lambda _: reserved[0])
    free, reserved = [1000], [200]
    meter = OutsideMeter(backend, CPU)
    free[0], reserved[0] = 600, 500  # 400 taken, 300 of them by torch
    assert meter.grown_bytes() == 100
    free[0] = 2000  # somebody else gave back more
    assert meter.grown_bytes() == 0


# -- the budget --------------------------------------------------------------------------------------------------------


def sizes(runner: Any) -> list[int]:
    return [key.key.signature.tensor_specs[0].shape[0] for key in runner.entries]


def test_shared_memory_does_not_use_the_budget_up_once_for_every_entry() -> None:
    runner = bcg.wrap(Double(), max_bytes=450)
    capture(runner, 100, 90, 80, 70)
    assert sizes(runner) == [100, 90, 80, 70]
    check_replays(runner, 100, 90, 80, 70)


def test_evicted_memory_that_others_keep_alive_is_given_back_to_meet_the_budget() -> None:
    runner = bcg.wrap(Double(), max_bytes=100)
    capture(runner, 1000)  # alone and too large: it stays, as the budget holds one entry at least
    assert runner.memory().total_bytes == 4000
    capture(runner, 20)
    assert sizes(runner) == [20]
    assert runner.memory().total_bytes == 80
    capture(runner, 10, 5)
    assert sizes(runner) == [20, 10, 5]
    assert runner.memory().total_bytes == 80
    check_replays(runner, 20, 10, 5)


def test_a_capture_in_a_window_is_served_through_such_a_compaction() -> None:
    runner = bcg.wrap(Double(), max_bytes=100)
    with bcg.warmup():
        for size in (1000, 20, 10):
            x = torch.randn(size)
            assert torch.equal(runner(x), x * 2)
    assert runner.stats.capture_calls == 3
    check_replays(runner, 20, 10)


# -- compact, release, reset -------------------------------------------------------------------------------------------


def test_compact_gives_an_evicted_share_back_and_the_rest_replays() -> None:
    runner = bcg.wrap(Double(), max_entries=2)
    capture(runner, 1000, 20, 10)
    assert runner.memory().total_bytes == 4000
    assert runner.compact() == 4000 - 80
    assert runner.memory().total_bytes == 80
    assert "may free" not in str(runner.memory())
    check_replays(runner, 20, 10)


def test_compact_does_nothing_where_it_does_not_pay() -> None:
    runner = bcg.wrap(Double())
    capture(runner, 20, 10)
    entries = list(runner.entries.values())
    assert runner.compact() == 0
    assert list(runner.entries.values()) == entries
    assert runner.stats.captures == 2


def test_compact_keeps_entries_of_another_state_rather_than_memory() -> None:
    runner = bcg.wrap(Double(), max_entries=3)
    capture(runner, 1000, 20)
    old = runner.weight
    runner.weight = nn.Parameter(torch.full((), 3.0), requires_grad=False)
    capture(runner, 20, 10)
    assert runner.memory().abandoned_bytes > 0
    assert runner.compact() == 0
    check_replays(runner, 20, 10)
    runner.weight = old
    check_replays(runner, 20)


def test_compact_leaves_a_pool_alone_that_another_runner_uses() -> None:
    runner = bcg.wrap(Double(), max_entries=1)
    other = bcg.wrap(Double(), pool=runner.pool)
    capture(runner, 1000, 10)
    capture(other, 5)
    assert runner.memory().pool_runners == 2
    assert runner.compact() == 0
    del other
    gc.collect()
    assert runner.memory().pool_runners == 1
    assert runner.compact() > 0
    check_replays(runner, 10)


def test_release_gives_everything_back_and_recapture_restores_it() -> None:
    runner = bcg.wrap(Double())
    capture(runner, 100, 10)
    held = list(runner.entries.values())  # a user may hold entries
    memory = [weakref.ref(tensor) for entry in held for tensor in entry.inputs.tensors]
    assert runner.release() == 400
    gc.collect()
    assert all(reference() is None for reference in memory)
    assert all(entry.inputs.tensors == [] for entry in held)
    assert runner.memory().total_bytes == 0
    x = torch.randn(100)
    assert torch.equal(runner(x), x * 2)
    assert (runner.stats.replays, runner.stats.eager_calls) == (0, 1)
    assert runner.recapture() == 2
    check_replays(runner, 100, 10)
    assert runner.recapture() == 0


def test_release_twice_remembers_each_call_once_and_reset_forgets() -> None:
    runner = bcg.wrap(Double())
    capture(runner, 100, 10)
    for _ in range(3):
        runner.release()
        assert runner.recapture() == 2
    runner.release()
    assert runner.release() == 0
    capture(runner, 10)
    assert runner.recapture() == 1
    runner.release()
    runner.reset()
    assert runner.recapture() == 0


def test_a_released_call_is_captured_again_by_a_window_too() -> None:
    runner = bcg.wrap(Double())
    capture(runner, 10)
    runner.release()
    with bcg.warmup():
        runner(torch.randn(10))
    check_replays(runner, 10)
    assert runner.recapture() == 0


def test_a_module_that_goes_to_another_device_and_comes_back_has_its_calls_known() -> None:
    runner = bcg.wrap(Double())
    capture(runner, 10)
    weight = runner.weight
    runner.weight = nn.Parameter(torch.empty((), device="meta"), requires_grad=False)
    assert runner.recapture() == 0
    assert len(runner.entries) == 0
    runner.weight = weight
    assert runner.recapture() == 1
    check_replays(runner, 10)


class SpyPool(TapePool):
    """Notes who waits for replays in flight."""

    def __init__(self) -> None:
        super().__init__(TapeBackend(), CPU)
        self.happened: list[str] = []

    def wait(self) -> None:
        self.happened.append("wait")


@pytest.mark.parametrize("give_back", ["evict", "release", "reset", "compact"])
def test_memory_is_given_back_only_after_replays_in_flight(give_back: str) -> None:
    pool = SpyPool()
    runner = bcg.wrap(Double(), max_entries=2, pool=pool)
    capture(runner, 100, 10, 5)
    for entry in runner.entries.values():
        for step in entry.graph.steps:
            reset = step.reset
            step.reset = lambda reset=reset: (pool.happened.append("free"), reset())  # type: ignore[method-assign,misc]
    pool.happened.clear()
    if give_back == "evict":
        capture(runner, 3)
    else:
        getattr(runner, give_back)()
    assert "free" in pool.happened
    first = pool.happened.index("free")
    assert "wait" in pool.happened[:first]


# -- a pool for several runners ----------------------------------------------------------------------------------------


def test_static_inputs_are_a_runners_own_where_the_pool_is_shared() -> None:
    one = bcg.wrap(Double())
    other = bcg.wrap(Double(), pool=one.pool)
    for runner in (one, other):
        capture(runner, 10)
    inputs = [runner.entries[next(iter(runner.entries))].inputs.tensors[0] for runner in (one, other)]
    assert inputs[0].data_ptr() != inputs[1].data_ptr()
    for _ in range(2):
        check_replays(one, 10)
        check_replays(other, 10)
    one.reset()
    check_replays(other, 10)


def test_a_wrapped_module_inside_a_replay_runs_eagerly() -> None:
    """In a shared pool its replay would overwrite what the outer one has computed, and locks could wait in a circle."""
    outer_pool = bcg.wrap(Double()).pool
    inner = bcg.wrap(Double(), pool=outer_pool)

    @bcg.eager_on_graph
    def middle(x: Tensor) -> Tensor:
        return inner(x)

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return middle(x + 1) + x

    runner = bcg.wrap(Outer(), pool=outer_pool)
    capture(inner, 4)
    capture(runner, 4)
    before = inner.stats
    for _ in range(2):
        x = torch.randn(4)
        assert torch.equal(runner(x), (x + 1) * 2 + x)
    assert runner.stats.replays == 2
    assert inner.stats.replays == before.replays
    assert inner.stats.eager_calls == before.eager_calls + 2
    check_replays(inner, 4)


def test_a_thread_knows_that_it_works_in_a_pool_and_others_do_not() -> None:
    pool = TapePool(TapeBackend(), CPU)
    seen: list[bool] = []
    with working_in(pool), working_in(pool):
        thread = threading.Thread(target=lambda: seen.append(is_working()))
        thread.start()
        thread.join()
        assert is_working()
    assert seen == [False]
    assert not is_working()


def test_threads_with_runners_that_share_a_pool_and_call_each_other_do_not_wait_for_ever() -> None:
    first = bcg.wrap(Double())
    second = bcg.wrap(Double(), pool=first.pool)

    def nested(inner: Any) -> Any:
        @bcg.eager_on_graph
        def middle(x: Tensor) -> Tensor:
            return inner(x)

        class Outer(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return middle(x) + 1

        return bcg.wrap(Outer(), pool=first.pool)

    runners = [first, second, nested(first), nested(second)]
    for runner in runners:
        capture(runner, 4)
    wrong: list[str] = []

    def work(number: int) -> None:
        with torch.no_grad():
            for turn in range(40):
                runner = runners[(number + turn) % 4]
                x = torch.randn(4)
                expected = x * 2 + (1 if (number + turn) % 4 > 1 else 0)
                if not torch.equal(runner(x), expected):
                    wrong.append(f"{number}, {turn}")
                if turn % 13 == number:
                    runner.recapture()
                if turn == 20 and number == 0:
                    first.release()
                    first.recapture()

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


# -- what stands in the way --------------------------------------------------------------------------------------------


def test_a_capture_that_runs_out_of_memory_leaves_the_call_known() -> None:
    class Hungry(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if full[0] and bcg.graph.current_capture() is not None:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return x * 2

    full = [False]
    runner = bcg.wrap(Hungry())
    capture(runner, 10)
    runner.release()
    full[0] = True
    assert runner.recapture() == 0
    full[0] = False
    assert runner.recapture() == 1
    check_replays(runner, 10)


def test_an_allocator_that_cannot_be_used_is_refused_with_one_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TapeBackend, "refusal", lambda _: "the allocator tells nothing of its blocks")
    runner = bcg.wrap(Double())
    for _ in range(3):
        with bcg.warmup():
            x = torch.randn(3)
            assert torch.equal(runner(x), x * 2)
    assert not runner.capture(torch.randn(3))
    assert (runner.stats.captures, runner.stats.eager_calls, runner.stats.refusals) == (0, 3, 4)
    assert caplog.text.count("the allocator tells nothing") == 1
    assert runner.explain(torch.randn(3)) == "runs eagerly: the allocator tells nothing of its blocks."
