"""The failures that people met with this kind of software, one test each where no other file has it.

``docs/failure-cases.md`` lists all of them with the test that shows each. The letters are those of that table: recovery
(R), memory (M), wrong images (W), distribution (D), serving (S).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import random
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.backends import backend_for
from bcg.backends.tape import TapePool, TapeRecording
from bcg.graph import current_capture

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Forward(nn.Module):
    """A module around a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = [function]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function[0](*args, **kwargs)


@bcg.eager_on_graph
def halved(x: Tensor) -> Tensor:
    return x / 2


class Seen:
    """What a test learns from inside of a forward; a variable of it would be put back after a failed capture."""

    tensors: tuple[weakref.ref[Tensor], ...] = ()
    facts: tuple[bool, ...] = ()


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    Seen.tensors, Seen.facts = (), ()


def assert_healthy() -> None:
    """After any failure: random numbers, generator states and a new capture work, and nothing is left open."""
    assert current_capture() is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    torch.manual_seed(7)
    first = torch.rand(4)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(4), first)
    state = torch.default_generator.get_state()
    torch.rand(4)
    torch.default_generator.set_state(state)
    runner = bcg.wrap(nn.Linear(2, 2))
    assert runner.capture(torch.ones(1, 2))
    x = torch.randn(1, 2)
    assert torch.equal(runner(x), runner.transformer(x))
    assert runner.stats.replays == 1


def explained(runner: Any, *args: Any) -> str:
    return str(runner.explain(*args))


# -- R: recovery -------------------------------------------------------------------------------------------------------


class FaultError(Exception):
    pass


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory (simulated)")


def raise_fault() -> None:
    raise FaultError("from the model")


def interrupt() -> None:
    raise KeyboardInterrupt


def end_the_thread() -> None:
    raise SystemExit


FAULTS = [out_of_memory, raise_fault, interrupt, end_the_thread]


@pytest.mark.parametrize("place", ["segment", "break"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_r1_the_process_is_healthy_after_each_fault_in_a_capture_and_the_next_capture_works(
    fault: Callable[[], None], place: str
) -> None:
    broken = [True]

    def strike(x: Tensor) -> Tensor:
        if broken[0] and current_capture() is not None:
            fault()
        return x + 1

    breaking = bcg.eager_on_graph(strike)
    runner = bcg.wrap(Forward(lambda x: (breaking if place == "break" else strike)(halved(x) * 3) * 2))
    x = torch.randn(3)
    for _ in range(3):
        torch.manual_seed(3)
        if issubclass(raised_by(fault), Exception):
            with bcg.warmup():
                assert torch.equal(runner(x), runner.transformer(x))
        else:
            with pytest.raises(raised_by(fault)), bcg.warmup():
                runner(x)
        torch.manual_seed(3)
        assert_healthy()
        runner.reset()
    broken[0] = False
    assert runner.capture(x)
    assert torch.equal(runner(x + 1), runner.transformer(x + 1))


def raised_by(fault: Callable[[], None]) -> type[BaseException]:
    try:
        fault()
    except BaseException as error:
        return type(error)
    raise AssertionError


@pytest.mark.parametrize("where", ["abort", "close"])
def test_r3_an_error_of_a_break_is_not_masked_by_an_error_of_the_cleanup(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = getattr(TapeRecording, where)

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        done(self, *args, **kwargs)
        raise RuntimeError("the cleanup failed as well")

    @bcg.eager_on_graph
    def refuse(x: Tensor) -> Tensor:
        raise FaultError("from the break")

    monkeypatch.setattr(TapeRecording, where, fail)
    with pytest.raises(FaultError, match="from the break"), bcg.BreakableCUDAGraphCapture():
        refuse(torch.ones(2) * 2)
    monkeypatch.undo()
    assert_healthy()


def test_r4_out_of_memory_frees_the_failed_capture_before_the_eager_call() -> None:
    """Frames in the traceback of the failed capture would hold its tensors while the eager call needs their memory."""

    def hungry(x: Tensor) -> Tensor:
        if current_capture() is not None:
            big = x * 3
            Seen.tensors += (weakref.ref(big),)
            out_of_memory()
        Seen.facts += (any(reference() is not None for reference in Seen.tensors),)
        return x * 2

    runner = bcg.wrap(Forward(hungry))
    for attempt in (1, 2):
        x = torch.randn(1000)
        with bcg.warmup():
            assert torch.equal(runner(x), x * 2)
        assert len(Seen.tensors) == attempt, "out of memory passes: the capture is tried again in the next window"
        assert Seen.facts[-1] is False
    assert runner.stats.rejections == 2
    assert len(runner.entries) == 0
    assert runner.rejections == {}
    assert_healthy()


class BrokenSegment:
    """A segment whose launch fails, as an asynchronous CUDA error shows."""

    is_stale = False

    def replay(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered (simulated)")

    def reset(self) -> None:
        pass


def test_r5_where_the_context_lives_only_the_signature_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    runner = bcg.wrap(nn.Linear(4, 4))
    x, other = torch.randn(2, 4), torch.randn(3, 4)
    assert runner.capture(x) and runner.capture(other)
    [broken] = [entry for key, entry in runner.entries.items() if "2,4" in key.key.signature.summary()]
    broken.graph.steps.append(BrokenSegment())
    with caplog.at_level(logging.WARNING, "bcg"):
        for _ in range(3):
            assert torch.equal(runner(x), runner.transformer(x))
    assert runner.stats.replay_failures == 1
    assert "illegal memory access" in explained(runner, x)
    assert torch.equal(runner(other), runner.transformer(other))
    assert runner.stats.replays == 1
    assert_healthy()


def test_r5_a_failed_replay_is_the_reason_for_all_variants_of_its_signature(caplog: pytest.LogCaptureFixture) -> None:
    runner = bcg.wrap(Forward(lambda x, mask: x[:, : int(mask.sum().item())] * 2))
    x = torch.randn(2, 3)
    masks = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])
    for mask in masks:
        with bcg.warmup():
            runner(x, mask)
    assert len(runner.entries) == 2
    for entry in runner.entries.values():
        entry.graph.steps.insert(0, BrokenSegment())
    with caplog.at_level(logging.WARNING, "bcg"):
        assert torch.equal(runner(x, masks[0]), runner.transformer(x, masks[0]))
    assert runner.stats.replay_failures == 1
    assert "illegal memory access" in explained(runner, x, masks[0])
    assert_healthy()


def test_r5_a_graph_that_draws_is_dropped_and_captured_again(caplog: pytest.LogCaptureFixture) -> None:
    """A later capture that fails may part it from the generator, which is no fault of the signature."""
    runner = bcg.wrap(Forward(lambda x: x + torch.rand_like(x)))
    x = torch.randn(3)
    assert runner.capture(x)
    [entry] = runner.entries.values()

    class PartedSegment(BrokenSegment):
        def replay(self) -> None:
            raise bcg.ReplayError("the graph draws random numbers from a state that was left (simulated)")

    entry.graph.steps.insert(0, PartedSegment())
    assert "a state that was left" in explained(runner, x)
    for window, served in ((contextlib.nullcontext(), "eager_calls"), (bcg.warmup(), "capture_calls")):
        torch.manual_seed(3)
        want = [runner.transformer(x), torch.rand(2)]
        torch.manual_seed(3)
        with window, caplog.at_level(logging.WARNING, "bcg"):
            got = [runner(x), torch.rand(2)]
        assert all(map(torch.equal, got, want))
        assert getattr(runner.stats, served) == 1
    assert runner.stats.replay_failures == 1 and runner.rejections == {}
    assert "until it is captured again" in caplog.text
    torch.manual_seed(3)
    assert torch.equal(runner(x), want[0])
    assert runner.stats.replays == 1
    assert_healthy()


@pytest.mark.parametrize("again", ["capture", "recapture"])
def test_r5_a_graph_that_was_parted_from_the_generator_is_not_taken_for_captured(again: str) -> None:
    runner = bcg.wrap(Forward(lambda x: x + torch.rand_like(x)))
    x = torch.randn(3)
    assert runner.capture(x)
    [entry] = runner.entries.values()

    class StaleSegment(BrokenSegment):
        is_stale = True

        def replay(self) -> None:
            raise bcg.ReplayError("the generator left the state (simulated): capture it again.")

    entry.graph.steps.insert(0, StaleSegment())
    assert "capture it again" in explained(runner, x)
    assert runner.capture(x) if again == "capture" else runner.recapture() == 1
    [fresh] = runner.entries.values()
    assert fresh is not entry
    for seed in (3, 4):
        torch.manual_seed(seed)
        want = [runner.transformer(x), torch.rand(2)]
        torch.manual_seed(seed)
        assert all(map(torch.equal, [runner(x), torch.rand(2)], want))
    assert (runner.stats.replays, runner.stats.replay_failures) == (2, 0)
    assert_healthy()


def test_r5_a_replay_that_finds_no_memory_is_tried_again_by_the_next_call() -> None:
    runner = bcg.wrap(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    runner.capture(x)
    [entry] = runner.entries.values()
    errors: list[Exception] = [torch.OutOfMemoryError("CUDA out of memory (simulated)")]

    class ScarceSegment(BrokenSegment):
        def replay(self) -> None:
            if errors:
                raise errors.pop()

    entry.graph.steps.append(ScarceSegment())
    for _ in range(2):
        assert torch.equal(runner(x), runner.transformer(x))
    assert (runner.stats.replay_failures, runner.stats.eager_calls, runner.stats.replays) == (1, 1, 1)
    assert_healthy()


def test_r5_where_the_context_is_dead_the_error_surfaces_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = bcg.wrap(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    runner.capture(x)
    [entry] = runner.entries.values()
    entry.graph.steps.append(BrokenSegment())

    def synchronize(device: torch.device) -> None:
        raise RuntimeError("another error, from the dead context")

    monkeypatch.setattr(entry.pool.backend, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner(x)


def test_r6_other_threads_work_while_a_capture_is_open_and_are_not_recorded() -> None:
    opened, finished = threading.Event(), threading.Event()
    results: list[Tensor] = []

    @bcg.eager_on_graph(enable=False)
    def wait_for_the_other(x: Tensor) -> Tensor:
        if current_capture() is not None:
            opened.set()
            assert finished.wait(60)
        return x

    def other() -> None:
        assert opened.wait(60)
        with torch.no_grad():
            batch = torch.arange(6.0).reshape(2, 3).clone()
            results.append(batch @ batch.t() + torch.rand(2, 2) * 0)
            results.append(torch.tensor(batch.sum().item()))
        finished.set()

    runner = bcg.wrap(Forward(lambda x: wait_for_the_other(x * 2) + 1))
    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    assert runner.capture(torch.ones(3)), runner.rejections
    thread.join(60)
    assert [result.tolist() for result in results] == [[[5.0, 14.0], [14.0, 50.0]], 15.0]
    [entry] = runner.entries.values()
    assert (entry.segments, entry.guards) == (1, 0)
    assert torch.equal(runner(torch.full((3,), 5.0)), torch.full((3,), 11.0))


def test_r6_the_default_capture_mode_leaves_other_threads_alone() -> None:
    """CUDA's own default, global, fails any unsafe call of any thread while a capture is open."""
    assert bcg.RunnerConfig().capture_error_mode == "thread_local"


# -- M: memory and lifetime --------------------------------------------------------------------------------------------


def churn() -> None:
    gc.collect()
    _ = [torch.full((size,), float("nan")) for size in (3, 7, 64, 1024) for _ in range(8)]


def test_m1_results_of_breaks_are_owned_by_the_graph() -> None:
    @bcg.eager_on_graph
    def gathered(x: Tensor) -> Tensor:
        return x[x > 0]

    def forward(x: Tensor) -> Tensor:
        kept = gathered(x * 2)
        if current_capture() is not None:
            Seen.tensors += (weakref.ref(kept),)
        return kept.square()

    runner = bcg.wrap(Forward(forward))
    x = torch.tensor([1.0, -1.0, 2.0])
    assert runner.capture(x)
    churn()
    assert Seen.tensors[-1]() is not None
    for scale in (3.0, 0.5):
        churn()
        assert torch.equal(runner(x * scale), runner.transformer(x * scale))
    assert runner.stats.replays == 2
    runner.reset()
    gc.collect()
    assert Seen.tensors[-1]() is None


def test_m2_largest_first_then_smaller_with_breaks_in_both_and_churn_between() -> None:
    """On the tape each entry owns its memory; tests/gpu has the same for a shared pool."""
    runner = bcg.wrap(Forward(lambda x: halved(halved(x * 3) + 1) * x))
    for size in (64, 32, 5, 1):
        assert runner.capture(torch.randn(size))
    for size in (64, 1, 32, 5, 64):
        churn()
        x = torch.randn(size)
        assert torch.equal(runner(x), runner.transformer(x))
    assert runner.stats.replays == 5


@functools.lru_cache(maxsize=1)
def frequencies(length: int) -> Tensor:
    return torch.arange(float(length)).sin()


def test_m3_a_bounded_cache_that_a_later_capture_fills_anew_leaves_earlier_graphs_exact() -> None:
    frequencies.cache_clear()
    runner = bcg.wrap(Forward(lambda x: halved(x) * frequencies(len(x))))
    first, second = torch.randn(6), torch.randn(9)
    assert runner.capture(first)
    table = weakref.ref(frequencies(6))
    assert runner.capture(second)
    churn()
    assert table() is not None, "the entry holds what its graph reads"
    for x in (first, second, first * 2):
        churn()
        assert torch.equal(runner(x), x / 2 * torch.arange(float(len(x))).sin())
    assert runner.stats.replays == 3
    runner.reset()
    gc.collect()
    assert table() is None


def test_m3_a_table_that_the_module_itself_replaces_is_another_state() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.length = 0
            self.table = torch.zeros(0)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) != self.length:
                self.length, self.table = len(x), torch.arange(float(len(x)))
            return x + self.table

    runner = bcg.wrap(Table())
    for size in (4, 6):
        runner.capture(torch.randn(size))
    for size in (4, 6, 6, 4, 4):
        x = torch.randn(size)
        assert torch.equal(runner(x), x + torch.arange(float(size)))


def test_m5_an_eviction_waits_for_replays_in_flight_before_it_gives_the_graph_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    monkeypatch.setattr(TapePool, "wait", lambda self: events.append("wait"))
    runner = bcg.wrap(nn.Linear(4, 4), max_entries=1)
    runner.capture(torch.ones(1, 4))
    [entry] = runner.entries.values()
    [segment] = entry.graph.steps
    reset = segment.reset
    monkeypatch.setattr(segment, "reset", lambda: (events.append("reset"), reset()))
    events.clear()
    runner.capture(torch.ones(2, 4))
    assert runner.stats.evictions == 1
    assert events.index("wait") < events.index("reset")


def test_m6_ten_thousand_random_signatures_stay_within_the_bounds() -> None:
    """A host that captures now and then, and never sees a shape twice for long."""
    drawn = random.Random(0)
    max_bytes = 40_000
    runner = bcg.wrap(
        nn.Linear(2, 2), max_entries=20, max_bytes=max_bytes, max_rejections=8, verify="off",
        capture_when=lambda: drawn.random() < 0.02,
    )  # fmt: skip
    most = 0
    for number in range(10_000):
        x = torch.zeros(1 + drawn.randrange(3000), 2)
        runner(x)
        if number % 50 == 0:
            entries = list(runner.entries.values())
            most = max(most, len(entries))
            assert len(entries) == 1 or sum(entry.bytes for entry in entries) <= max_bytes
    assert runner.stats.captures > 100
    assert runner.stats.evictions >= runner.stats.captures - 20
    assert 1 < most <= 20
    assert len(runner.misses) <= 256
    x = torch.randn(5, 2)
    assert torch.equal(runner(x), runner.transformer(x))


# -- W: wrong images without an error ----------------------------------------------------------------------------------


def test_w1_conditional_and_unconditional_results_of_one_signature_are_two_tensors() -> None:
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    runner = bcg.wrap(Forward(lambda x: Transformer2DModelOutput(sample=halved(x) + 1)))
    runner.capture(torch.zeros(3))
    conditional = runner(torch.full((3,), 2.0)).sample
    unconditional = runner(torch.full((3,), 4.0)).sample
    assert (conditional.tolist(), unconditional.tolist()) == ([2.0] * 3, [3.0] * 3)
    assert runner.stats.replays == 2


def test_w7_a_length_read_from_a_mask_is_read_again_in_every_replay() -> None:
    def forward(x: Tensor, mask: Tensor) -> Tensor:
        return x[: int(mask.sum().item())].cumsum(0)

    runner = bcg.wrap(Forward(forward))
    x, mask = torch.randn(6), torch.tensor([1, 1, 1, 0, 0, 0])
    assert runner.capture(x, mask)
    for length in (3, 5, 1, 3):
        live, mask = torch.randn(6), (torch.arange(6) < length).long()
        assert torch.equal(runner(live, mask), forward(live, mask))
    assert (runner.stats.replays, runner.stats.guard_misses) == (2, 2)


def test_w9_step_0_passes_a_transposed_latent_and_an_expanded_timestep() -> None:
    linear = nn.Linear(4, 4)
    runner = bcg.wrap(Forward(lambda x, timestep: linear(x) * timestep[:, None, None]))

    def calls() -> list[tuple[Tensor, Tensor]]:
        latents = torch.randn(2, 4, 3)
        return [
            (latents.transpose(1, 2), torch.tensor(0.5).expand(2)),
            (latents.transpose(1, 2).contiguous(), torch.full((2,), 0.25)),
        ]

    for args in calls():
        runner.capture(*args)
    for args in calls() + calls():
        assert torch.equal(runner(*args), runner.transformer(*args))
    assert runner.stats.replays == 4


def test_w9_the_next_input_is_a_view_of_the_last_output_and_given_twice() -> None:
    runner = bcg.wrap(Forward(lambda x, y: halved(x) + y.cumsum(0)))
    x = torch.randn(4)
    assert runner.capture(x, x)
    want = x
    for _ in range(5):
        x, want = runner(x, x), want / 2 + want.cumsum(0)
        assert torch.equal(x, want)
        x, want = x.view(2, 2).flatten(), want.view(2, 2).flatten()
    assert runner.stats.replays == 5


def test_w10_a_float_of_each_step_ends_in_one_message_and_bounded_captures(caplog: pytest.LogCaptureFixture) -> None:
    runner = bcg.wrap(Forward(lambda x, sigma: x * sigma))
    x = torch.randn(3)
    with caplog.at_level(logging.WARNING, "bcg"), bcg.warmup():
        for step in range(50):
            assert torch.equal(runner(x, 1 / (step + 1)), x * (1 / (step + 1)))
    assert runner.stats.captures < 10
    assert any("Pass it as a tensor" in record.getMessage() for record in caplog.records)


# -- D: distribution (the hook points) ---------------------------------------------------------------------------------


def test_d1_d4_barrier_and_capture_context_take_part_in_every_capture_and_in_no_replay() -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        events.append("enter")
        yield
        events.append("exit")

    runner = bcg.wrap(
        Forward(lambda x: halved(halved(x) + 1)), barrier=lambda: events.append("barrier"), capture_context=context
    )
    for size in (2, 3):
        events.clear()
        assert runner.capture(torch.ones(size))
        assert events == ["enter", "barrier", "barrier", "exit"]
    events.clear()
    runner(torch.ones(2))
    assert events == []
    assert runner.stats.replays == 1


def test_d1_a_rank_whose_barrier_fails_rejects_the_capture_and_serves_eagerly() -> None:
    def barrier() -> None:
        raise FaultError("a peer rejected its capture")

    runner = bcg.wrap(Forward(lambda x: halved(x) + 1), barrier=barrier)
    x = torch.randn(3)
    with bcg.warmup():
        assert torch.equal(runner(x), x / 2 + 1)
    assert runner.stats.captures == 0
    assert "a peer rejected its capture" in explained(runner, x)
    assert_healthy()


# -- S: serving --------------------------------------------------------------------------------------------------------


def test_s1_captures_are_constant_over_a_mixed_stream_of_known_and_unknown_requests() -> None:
    linear = nn.Linear(4, 4)
    runner = bcg.wrap(linear)
    with bcg.warmup():
        for size in (1, 2, 3):
            runner(torch.randn(size, 4))
    captures, drawn = runner.stats.captures, random.Random(1)
    unusual: list[Callable[[], Any]] = [
        contextlib.nullcontext,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.backends.mkldnn.flags(enabled=False),
    ]
    for number in range(400):
        x = torch.randn(drawn.randrange(1, 6), 4)
        if number % 50 == 25:
            linear.register_forward_hook(lambda module, args, output: output * 2)
        elif number % 50 == 0:
            linear._forward_hooks.clear()
        with drawn.choice(unusual)():
            assert torch.equal(runner(x), linear(x))
    stats = runner.stats
    assert stats.captures == captures == 3
    assert stats.rejections == 0
    assert stats.replays > 20
    assert stats.misses > 100


@pytest.mark.parametrize(
    ("served", "difference"),
    [
        ({"frames": torch.zeros(1, 9, 4)}, "frames: expected float32[1,5,4] on cpu, got float32[1,9,4] on cpu"),
        ({"timestep": torch.ones(1, dtype=torch.int64)}, "timestep: expected float32[1] on cpu, got int64[1] on cpu"),
        ({"mask": torch.ones(1, 5)}, "mask: expected None, got"),
    ],
    ids=["frames", "dtype of step 0", "mask given"],
)
def test_s2_the_first_miss_says_which_argument_differs(
    served: dict[str, Tensor], difference: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Video(nn.Module):
        def forward(self, frames: Tensor, timestep: Tensor, mask: Tensor | None = None) -> Tensor:
            result = frames * timestep[:, None, None]
            return result if mask is None else result.sum()

    runner = bcg.wrap(Video())
    warmed = {"frames": torch.zeros(1, 5, 4), "timestep": torch.ones(1)}
    assert runner.capture(**warmed)
    with caplog.at_level(logging.WARNING, "bcg"):
        for _ in range(3):
            runner(**{**warmed, **served})
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert difference in messages[0]


def test_s3_a_capture_of_three_hundred_segments_is_kept_by_default() -> None:
    def forward(x: Tensor) -> Tensor:
        for _ in range(300):
            x = halved(x + 1)
        return x

    runner = bcg.wrap(Forward(forward))
    assert runner.capture(torch.randn(2)), runner.rejections
    [entry] = runner.entries.values()
    assert (entry.segments, entry.breaks) == (300, 300)
    x = torch.randn(2)
    assert torch.equal(runner(x), forward(x))


def test_s4_what_compiles_at_first_use_has_compiled_before_the_capture() -> None:
    def compiler(graph: Any, example_inputs: Any) -> Any:
        Seen.facts += (current_capture() is not None,)
        return graph.forward

    torch._dynamo.reset()
    module = nn.Sequential(Forward(lambda x: x.sin() + 1), nn.GELU())
    module[0].compile(backend=compiler)
    runner = bcg.wrap(module)
    assert runner.capture(torch.randn(2, 4)), runner.rejections
    assert Seen.facts and not any(Seen.facts)
    x = torch.randn(2, 4)
    assert torch.equal(runner(x), module(x))
    torch._dynamo.reset()


def test_the_table_names_tests_that_exist() -> None:
    root = Path(__file__).resolve().parent.parent
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (root / "docs" / "failure-cases.md").read_text())
    assert len(named) > 60
    for file, name in named:
        assert re.search(rf"^ *def {name}\(", (root / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_the_tape_stands_in_for_the_gpu_in_all_of_these() -> None:
    assert bcg.wrap(nn.Linear(2, 2)).pool.backend.name == backend_for("auto", CPU).name == "tape"
