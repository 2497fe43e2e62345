"""The primitives on the tape: segments, breaks and guards, and what a fault inside a capture leaves behind."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import bcg
from bcg.backends import backend_for
from bcg.backends.tape import TapeBackend, TapeRecording
from bcg.graph import current_capture

VALUES = (3.0, -5.0)  # the fresh inputs of a replay


def capture(block: Callable[[], Any], **options: Any) -> tuple[bcg.BreakableCUDAGraph, Any]:
    with bcg.BreakableCUDAGraphCapture(**options) as graph:
        result = block()
    return graph, result


def assert_clean() -> None:
    """A fault must leave no capture open, nothing recording, the generator working, and a further capture possible."""
    assert current_capture() is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    assert torch.equal(torch.manual_seed(3).get_state(), torch.default_generator.get_state())
    x = torch.ones(2)
    graph, y = capture(lambda: x * 2)
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value] * 2


@bcg.eager_on_graph
def halve(x: Tensor) -> Tensor:
    return x / 2


# -- segments and breaks -----------------------------------------------------------------------------------------------


def test_a_block_without_breaks_is_one_segment() -> None:
    x = torch.ones(2)
    graph, y = capture(lambda: (x * 2 + 1).relu())
    assert (graph.segments, graph.breaks, graph.guards) == (1, 0, 0)
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, (x * 2 + 1).relu())


def test_a_break_stands_between_two_segments_and_feeds_the_second() -> None:
    x = torch.ones(2)
    graph, y = capture(lambda: halve(x + 1) * 3)
    assert (graph.segments, graph.breaks) == (2, 1)
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, (x + 1) / 2 * 3)


def test_steps_replay_in_the_order_of_the_capture() -> None:
    seen: list[float] = []

    @bcg.eager_on_graph
    def note(x: Tensor) -> None:
        seen.append(x.item())

    x = torch.zeros(())

    def block() -> None:
        note(x)
        y = x + 1
        note(y)
        note(y * 2)

    graph, _ = capture(block)
    assert (graph.segments, graph.breaks) == (2, 3)
    for value in VALUES:
        seen.clear()
        x.fill_(value)
        graph.replay()
        assert seen == [value, value + 1, (value + 1) * 2]


def test_break_graph_ends_a_segment_and_empty_segments_are_dropped() -> None:
    x = torch.ones(2)

    def block() -> Tensor:
        bcg.break_graph()
        y = x + 1
        bcg.break_graph()
        bcg.break_graph()
        return y * 2

    graph, y = capture(block)
    assert (graph.segments, graph.breaks) == (2, 0)
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, (x + 1) * 2)


def test_an_empty_block_is_a_graph_without_steps_that_replays() -> None:
    graph, _ = capture(lambda: None)
    assert graph.steps == []
    graph.replay()


def test_outside_a_capture_the_decorated_function_and_break_graph_do_what_they_would_undecorated() -> None:
    x = torch.ones(2)
    bcg.break_graph()
    result = halve(x)
    assert torch.equal(result, x / 2)
    assert halve.__name__ == "halve"


def test_a_decorated_function_inside_another_one_makes_one_break() -> None:
    @bcg.eager_on_graph
    def outer(x: Tensor) -> Tensor:
        bcg.break_graph()
        return halve(x) + 1

    x = torch.ones(2)
    graph, y = capture(lambda: outer(x * 2))
    assert (graph.segments, graph.breaks) == (1, 1)
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x * 2 / 2 + 1)


def test_python_and_operations_of_a_break_run_in_every_replay_and_those_of_a_segment_do_not() -> None:
    runs = {"segment": 0, "break": 0}

    @bcg.eager_on_graph
    def counted(x: Tensor) -> Tensor:
        runs["break"] += 1
        return x + runs["break"]

    def block() -> Tensor:
        runs["segment"] += 1
        return counted(x) + runs["segment"]

    x = torch.zeros(())
    graph, y = capture(block)
    for replay, value in enumerate(VALUES, start=2):
        x.fill_(value)
        graph.replay()
        assert y.item() == value + replay + 1
    assert runs == {"segment": 1, "break": 3}


# -- options of eager_on_graph -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("enable", [False, lambda: False], ids=["value", "callable"])
def test_a_disabled_break_is_captured(enable: Any) -> None:
    runs: list[int] = []

    @bcg.eager_on_graph(enable=enable)
    def double(x: Tensor) -> Tensor:
        runs.append(1)
        return x * 2

    x = torch.ones(2)
    graph, y = capture(lambda: double(x))
    assert (graph.segments, graph.breaks) == (1, 0)
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x * 2)
    assert runs == [1]


def test_enable_is_asked_at_each_call() -> None:
    answers = iter([True, False, True])

    @bcg.eager_on_graph(enable=lambda: next(answers))
    def double(x: Tensor) -> Tensor:
        return x * 2

    x = torch.ones(2)
    graph, y = capture(lambda: double(double(double(x))))
    assert graph.breaks == 2
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x * 8)


def test_a_capture_stub_runs_at_capture_and_the_function_in_replays() -> None:
    ran: list[str] = []

    def stub(x: Tensor) -> Tensor:
        ran.append("stub")
        return torch.empty_like(x)

    @bcg.eager_on_graph(capture_stub=stub)
    def double(x: Tensor) -> Tensor:
        ran.append("function")
        return x * 2

    x = torch.ones(2)
    graph, y = capture(lambda: double(x) + 1)
    assert ran == ["stub"]
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x * 2 + 1)
    assert ran == ["stub", "function", "function"]
    assert torch.equal(double(x), x * 2)


# -- results of breaks -------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    first: Tensor
    second: Tensor


class Plain:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.name = "plain"


RESULTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda x: (x * 2, x * 3), lambda r: r[0] + r[1]),
    "nested": (lambda x: {"a": [x * 2, (x * 3,)]}, lambda r: r["a"][0] + r["a"][1][0]),
    "dataclass": (lambda x: Pair(x * 2, x * 3), lambda r: r.first + r.second),
    "object": (lambda x: Plain(x * 5), lambda r: r.tensor),
    "with plain values": (lambda x: (x * 5, 1, None, "text"), lambda r: r[0] * r[1]),
    "same tensor twice": (lambda x: [x * 2.5] * 2, lambda r: r[0] + r[1]),
    "expanded": (lambda x: (x[:1] * 5).expand(2), lambda r: r + 0),
    "transposed": (lambda x: (x.expand(3, 2) * 5).t(), lambda r: r[:, 0]),
}


@pytest.mark.parametrize("form", RESULTS)
def test_a_break_may_return_tensors_in(form: str) -> None:
    make, use = RESULTS[form]
    function = bcg.eager_on_graph(make)
    x = torch.ones(2)
    graph, y = capture(lambda: use(function(x + 0)))
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x * 5)


def test_the_result_of_a_break_keeps_its_container_types() -> None:
    function = bcg.eager_on_graph(lambda x: {"pair": Pair(x, x * 2), "plain": Plain(x * 3)})
    _, result = capture(lambda: function(torch.ones(2)))
    assert type(result["pair"]) is Pair
    assert (type(result["plain"]), result["plain"].name) == (Plain, "plain")


def test_a_break_that_writes_in_place_and_returns_its_argument_needs_no_copy() -> None:
    @bcg.eager_on_graph
    def shift(x: Tensor) -> Tensor:
        return x.add_(1)

    x = torch.ones(2)

    def block() -> tuple[Tensor, Tensor]:
        y = x * 2
        z = shift(y)
        return z * 3, y * 5

    graph, (a, b) = capture(block)
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(a, (x * 2 + 1) * 3)
        assert torch.equal(b, (x * 2 + 1) * 5)


def test_a_break_that_writes_in_place_and_returns_nothing() -> None:
    @bcg.eager_on_graph
    def shift(x: Tensor) -> None:
        x += 1

    x = torch.ones(2)

    def block() -> Tensor:
        y = x * 2
        shift(y)
        return y * 3

    graph, z = capture(block)
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(z, (x * 2 + 1) * 3)


def test_a_break_that_returns_a_view_of_its_argument() -> None:
    first_row = bcg.eager_on_graph(lambda x: x[0])
    x = torch.ones(2, 2)
    graph, y = capture(lambda: first_row(x * 2) + 1)
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x[0] * 2 + 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x.sum() > 0 else x * 2,
        lambda x: x[0] if x.sum() > 0 else x[1],
        lambda x: x if x.sum() > 0 else x.t(),
    ],
    ids=["fresh tensor", "another view", "another order of dimensions"],
)
def test_a_break_that_returned_its_argument_and_now_returns_something_else_is_a_guard_miss(
    function: Callable[[Tensor], Tensor],
) -> None:
    x = torch.ones(2, 2)
    graph, y = capture(lambda: bcg.eager_on_graph(function)(x) + 0)
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, function(x))
    x.fill_(-1.0)
    with pytest.raises(bcg.GuardMiss, match="expected memory of an argument"):
        graph.replay()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x[x > 0], "another shape"),
        (lambda x: x.double() if x.sum() < 2 else x * 2, "another shape"),
        (lambda x: int(x.sum()), "another value"),
        (lambda x: [x * 1] * int((x > 0).sum()), "another structure"),
        (lambda x: x * 2 if x.sum() == 2 else None, "another"),
    ],
    ids=["shape", "dtype", "value", "structure", "None"],
)
def test_a_result_of_another_form_is_a_guard_miss_that_names_the_break(
    function: Callable[[Tensor], Any], message: str
) -> None:
    x = torch.ones(2)
    graph, _ = capture(lambda: bcg.eager_on_graph(function)(x))
    graph.replay()
    for content in ([-1.0, 1.0], [-2.0, 0.5]):
        x.copy_(torch.tensor(content))
        with pytest.raises(bcg.GuardMiss, match=message) as caught:
            graph.replay()
        assert "<lambda>" in str(caught.value)
        assert __file__.rsplit("/", 1)[-1] in str(caught.value)
    x.fill_(1.0)
    graph.replay()


def test_a_result_that_cannot_be_taken_apart_fails_the_capture() -> None:
    def endless() -> list[Any]:
        value: list[Any] = []
        value.append(value)
        return value

    with pytest.raises(bcg.CaptureError, match="contains itself"):
        capture(lambda: bcg.eager_on_graph(endless)())
    assert_clean()


# -- guards ------------------------------------------------------------------------------------------------------------


def test_a_guard_reads_again_in_every_replay_and_misses_on_another_value() -> None:
    x = torch.ones(2)
    capturing = bcg.BreakableCUDAGraphCapture()
    with capturing as graph:
        place = bcg.graph.where()
        value = capturing.guard(lambda t: t.sum().item(), (x,), {}, name="sum", place=place)
        y = x * value
    assert (graph.segments, graph.guards) == (1, 1)
    for content in ([0.5, 1.5], [2.0, 0.0]):
        x.copy_(torch.tensor(content))
        graph.replay()
        assert torch.equal(y, x * 2)
    x.fill_(7.0)
    with pytest.raises(bcg.GuardMiss, match=r"guard sum at .*: expected 2\.0, got 14\.0"):
        graph.replay()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        ([1, (2,)], [1, (2,)], True),
        ([1], (1,), False),
        ([1], [1, 2], False),
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.ones(2), torch.ones(1, 2), False),
        (torch.tensor([torch.nan, 1]), torch.tensor([torch.nan, 1]), True),
        (torch.tensor([torch.nan, 1]), torch.tensor([torch.nan, 2]), False),
        (torch.tensor([torch.nan, 0]), torch.tensor([0, torch.nan]), False),
        (torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.finfo(torch.float32).max]), False),
        (torch.ones(1), 1.0, False),
    ],
    ids=str,
)
def test_values_of_guards_are_compared_by_type_and_value(one: Any, other: Any, same: bool) -> None:
    assert bcg.steps.same_value(one, other) is same


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_a_replay_token_is_new_in_every_replay_the_same_within_one_and_none_outside() -> None:
    tokens: list[int | None] = []
    note = bcg.eager_on_graph(lambda: tokens.append(bcg.replay_token()))

    def block() -> None:
        note()
        note()

    graph, _ = capture(block)
    assert tokens == [None, None]
    for _ in VALUES:
        graph.replay()
    first, again, second, again2 = tokens[2:]
    assert isinstance(first, int)
    assert (first == again, second == again2, first != second) == (True, True, True)
    assert bcg.replay_token() is None


def test_the_replay_token_is_gone_after_a_replay_that_raised() -> None:
    fail = [False]

    @bcg.eager_on_graph
    def maybe() -> None:
        if fail[0]:
            raise ValueError("in the replay")

    graph, _ = capture(maybe)
    fail[0] = True
    with pytest.raises(ValueError, match="in the replay"):
        graph.replay()
    assert bcg.replay_token() is None
    assert_clean()


# -- validity ----------------------------------------------------------------------------------------------------------


def test_replay_before_a_capture_is_an_error() -> None:
    with pytest.raises(bcg.ReplayError, match="holds no finished capture"):
        bcg.BreakableCUDAGraph().replay()


def test_replay_after_reset_is_an_error_and_the_graph_can_be_captured_into_again() -> None:
    x = torch.ones(2)
    graph, _ = capture(lambda: halve(x) * 2)
    graph.reset()
    assert graph.steps == []
    with pytest.raises(bcg.ReplayError):
        graph.replay()
    with bcg.BreakableCUDAGraphCapture(graph) as same:
        y = x * 7
    assert same is graph
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x * 7)


def test_a_graph_that_holds_a_capture_is_not_captured_into() -> None:
    x = torch.ones(2)
    graph, y = capture(lambda: x * 2)
    with pytest.raises(bcg.CaptureError, match="already holds a capture"), bcg.BreakableCUDAGraphCapture(graph):
        pass
    assert_clean()
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x * 2)


def test_replay_inside_its_own_capture_is_an_error() -> None:
    with pytest.raises(bcg.ReplayError), bcg.BreakableCUDAGraphCapture() as graph:
        graph.replay()
    assert_clean()


def test_the_repr_says_segments_breaks_and_guards() -> None:
    graph, _ = capture(lambda: halve(torch.ones(2) * 2))
    assert repr(graph) == "BreakableCUDAGraph(segments=1, breaks=1, guards=0)"


def test_reset_lets_go_of_the_tensors_of_breaks() -> None:
    x = torch.ones(2)
    with bcg.BreakableCUDAGraphCapture() as graph:
        halve(x)
    reference = weakref.ref(x)
    del x
    assert reference() is not None
    graph.reset()
    assert reference() is None


# -- options of the capture --------------------------------------------------------------------------------------------


def test_more_segments_than_max_segments_fail_the_capture_with_what_to_do() -> None:
    x = torch.ones(2)

    def block() -> Tensor:
        return halve(halve(x * 2) * 2) * 2

    graph, _ = capture(block, max_segments=3)
    assert graph.segments == 3
    with pytest.raises(bcg.SegmentLimitError, match=r"max_segments=2.*eager_modules"):
        capture(block, max_segments=2)
    assert_clean()


def test_the_barrier_is_called_before_every_eager_step_and_not_in_replays() -> None:
    events: list[str] = []
    note = bcg.eager_on_graph(lambda: events.append("break"))

    def block() -> None:
        note()
        torch.ones(1) * 2
        note()

    graph, _ = capture(block, barrier=lambda: events.append("barrier"))
    assert events == ["barrier", "break", "barrier", "break"]
    for _ in VALUES:
        events.clear()
        graph.replay()
        assert events == ["break", "break"]


def test_the_capture_context_stands_around_the_whole_capture() -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        events.append("enter")
        yield
        events.append("exit")

    note = bcg.eager_on_graph(lambda: events.append("break"))
    graph, _ = capture(note, capture_context=context)
    assert events == ["enter", "break", "exit"]
    graph.replay()
    assert events == ["enter", "break", "exit", "break"]


def test_the_capture_context_is_left_when_the_block_raises() -> None:
    seen: list[Any] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        try:
            yield
        finally:
            seen.append("exit")

    def block() -> None:
        raise ValueError("from the block")

    with pytest.raises(ValueError, match="from the block"):
        capture(block, capture_context=context)
    assert seen == ["exit"]
    assert_clean()


def test_a_capture_context_that_cannot_be_entered_leaves_nothing_open() -> None:
    def context() -> contextlib.AbstractContextManager[None]:
        raise ValueError("no context")

    pool = backend_for("tape", torch.device("cpu")).create_pool(torch.device("cpu"))
    with pytest.raises(ValueError, match="no context"):
        capture(lambda: None, pool=pool, capture_context=context)
    assert_clean()
    in_thread(lambda: capture(lambda: None, pool=pool))  # the pool's lock is free


# -- faults ------------------------------------------------------------------------------------------------------------


@bcg.eager_on_graph
def broken(x: Tensor) -> Tensor:
    raise ValueError("from the break")


def raise_in_segment(x: Tensor) -> None:
    raise ValueError("from the segment")


def raise_in_operation(x: Tensor) -> None:
    x @ torch.ones(7)


def interrupt(x: Tensor) -> None:
    raise KeyboardInterrupt("from the keyboard")


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (broken, ValueError, "from the break"),
        (raise_in_segment, ValueError, "from the segment"),
        (raise_in_operation, RuntimeError, "size"),
        (interrupt, KeyboardInterrupt, "from the keyboard"),
    ],
    ids=["break", "segment", "operation", "interrupt"],
)
def test_an_error_in_the_block_passes_unchanged_and_leaves_a_clean_state(
    fault: Callable[[Tensor], None], kind: type[BaseException], message: str
) -> None:
    x, graph = torch.ones(2), bcg.BreakableCUDAGraph()
    with pytest.raises(kind, match=message) as caught, bcg.BreakableCUDAGraphCapture(graph):
        halve(x * 2)
        fault(x)
    assert caught.value.__context__ is None
    assert graph.steps == []
    with pytest.raises(bcg.ReplayError):
        graph.replay()
    assert_clean()


def test_an_interrupt_of_the_cleanup_leaves_the_pool_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TapeBackend().create_pool(torch.device("cpu"))
    monkeypatch.setattr(TapeRecording, "abort", interrupt)
    with pytest.raises(KeyboardInterrupt):
        capture(lambda: raise_in_segment(torch.ones(2)), pool=pool)
    monkeypatch.undo()
    assert_clean()
    in_thread(lambda: capture(lambda: None, pool=pool))


def test_an_error_of_a_break_that_the_block_swallows_fails_the_capture() -> None:
    x = torch.ones(2)

    def block() -> Tensor:
        with contextlib.suppress(ValueError):
            broken(x * 2)
        halve(x)
        bcg.break_graph()
        return x * 3

    with pytest.raises(bcg.CaptureError, match="swallowed"):
        capture(block)
    assert_clean()


def test_an_error_outside_of_breaks_that_the_block_swallows_is_no_matter() -> None:
    x = torch.ones(2)

    def block() -> Tensor:
        with contextlib.suppress(ValueError):
            raise_in_segment(x)
        return x * 3

    graph, y = capture(block)
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x * 3)


def test_an_error_of_the_barrier_passes_and_leaves_a_clean_state() -> None:
    def barrier() -> None:
        raise TimeoutError("a rank is missing")

    with pytest.raises(TimeoutError, match="a rank is missing"):
        capture(lambda: halve(torch.ones(2)), barrier=barrier)
    assert_clean()


def test_a_break_that_raises_in_a_replay_raises_out_of_it_and_the_next_replay_works() -> None:
    @bcg.eager_on_graph
    def positive(x: Tensor) -> Tensor:
        if x.sum() < 0:
            raise ValueError("negative")
        return x * 2

    x = torch.ones(2)
    graph, y = capture(lambda: positive(x) + 1)
    x.fill_(-1)
    with pytest.raises(ValueError, match="negative"):
        graph.replay()
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x * 2 + 1)
    assert_clean()


# -- captures inside of and beside each other --------------------------------------------------------------------------


def test_a_capture_inside_another_one_is_an_error_and_the_outer_one_goes_on() -> None:
    x = torch.ones(2)

    def block() -> Tensor:
        y = x * 2
        with pytest.raises(bcg.NestedCaptureError, match="already open"), bcg.BreakableCUDAGraphCapture():
            pass
        return y + 1

    graph, y = capture(block)
    assert graph.segments == 1
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x * 2 + 1)


def test_a_nested_capture_that_is_not_caught_fails_the_outer_one() -> None:
    def block() -> None:
        with bcg.BreakableCUDAGraphCapture():
            pass

    with pytest.raises(bcg.NestedCaptureError):
        capture(block)
    assert_clean()


def in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a thread of its own and return what it returns."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert results, "the thread hangs or raised"
    return results[0]


def test_threads_with_pools_of_their_own_capture_at_the_same_time_and_see_only_their_own_operations() -> None:
    barrier = threading.Barrier(2, timeout=10)
    graphs: dict[int, Any] = {}

    def work(factor: int) -> None:
        x = torch.ones(2)

        def block() -> Tensor:
            y = x * factor
            barrier.wait()  # both captures are open
            z = halve(y) + factor
            barrier.wait()
            return z

        graphs[factor] = (x, *capture(block))

    threads = [threading.Thread(target=work, args=(factor,), daemon=True) for factor in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    for factor in (3, 5):
        x, graph, y = graphs[factor]
        assert (graph.segments, graph.breaks) == (2, 1)
        for value in VALUES:
            x.fill_(value)
            graph.replay()
            assert torch.equal(y, x * factor / 2 + factor)


def test_a_capture_waits_for_another_one_that_uses_its_pool() -> None:
    pool = backend_for("tape", torch.device("cpu")).create_pool(torch.device("cpu"))
    events: list[str] = []

    def other() -> None:
        with bcg.BreakableCUDAGraphCapture(pool=pool):
            events.append("second")

    with bcg.BreakableCUDAGraphCapture(pool=pool):
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(timeout=0.01)
        events.append("first")
    thread.join(timeout=20)
    assert events == ["first", "second"]


def test_work_of_other_threads_is_not_captured() -> None:
    x = torch.ones(2)

    def block() -> Tensor:
        assert in_thread(lambda: current_capture() is None)
        in_thread(lambda: (halve(x), x.add_(0)))
        return x * 2

    graph, _ = capture(block)
    assert (graph.segments, graph.breaks) == (1, 0)


def test_results_of_a_break_that_share_memory_share_it_in_every_replay() -> None:
    @bcg.eager_on_graph
    def with_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
        doubled = x * 2
        return doubled, doubled[1:]

    x = torch.ones(3)
    with bcg.BreakableCUDAGraphCapture() as graph:
        whole, tail = with_a_view(x)
        whole.add_(1)
        result = tail * 10
    for value in (2.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert result.tolist() == [(2 * value + 1) * 10] * 2
