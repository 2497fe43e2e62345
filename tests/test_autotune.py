"""The choice among eager, graph and graph of compiled code."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bcg
from bcg.autotune import EAGER, GRAPH, Choice, ChoiceStore, Tuner, arm_of, choose, time_arms
from bcg.capture import Capturer
from bcg.entry import Entry
from bcg.recipe import PLAIN, Recipe
from bcg.signature import CallBinder

MODULE = nn.Linear(4, 2).requires_grad_(False)
COMPILED = "graph+blocks"
STATIC = "graph+blocks static"
AOT = {"compile_backend": "aot_eager"}  # makes no machine code; its name is in those of the arms
AOT_COMPILED, AOT_STATIC = "graph+blocks aot_eager", "graph+blocks aot_eager static"


def host_ms(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1e3


def call_of(runner: Any, rows: int = 3) -> Any:
    return CallBinder(runner.transformer.forward).call((torch.randn(rows, 4),), {})


def tuner_of(runner: Any, elapsed_ms: Callable[[Callable[[], Any]], float]) -> Tuner:
    return Tuner(runner.transformer, runner._capturer(), runner._self_config, elapsed_ms)


def scripted(milliseconds: list[float]) -> Callable[[Callable[[], Any]], float]:
    """Return a clock that gives each arm, in the order in which they are captured, milliseconds of its own."""
    turns = iter(range(10_000))
    arms = len(milliseconds)

    def elapsed_ms(function: Callable[[], Any]) -> float:
        function()
        turn = next(turns)
        return milliseconds[(turn + turn // arms) % arms]

    return elapsed_ms


def forbidden(function: Callable[[], Any]) -> float:
    raise AssertionError("measured again")


def test_a_slowed_arm_loses() -> None:
    arms = {"eager": lambda: time.sleep(0.004), "graph": lambda: None}
    assert choose(time_arms(arms, host_ms), 1.02).arm == "graph"
    arms = {"eager": lambda: None, "graph": lambda: time.sleep(0.004)}
    assert choose(time_arms(arms, host_ms), 1.02).arm == EAGER


def test_arms_run_in_turns_and_one_slow_spell_does_not_decide() -> None:
    order: list[str] = []
    arms = {name: (lambda name=name: order.append(name)) for name in ("a", "b", "c")}
    samples = {"a": [1.0] * 7, "b": [2.0] * 7, "c": [1.5, 90.0, 90.0, 90.0, 1.5, 1.5, 1.5]}
    counts = dict.fromkeys(arms, 0)

    def elapsed_ms(function: Callable[[], Any]) -> float:
        function()
        name = order[-1]
        counts[name] += 1
        return samples[name][counts[name] - 1]

    assert time_arms(arms, elapsed_ms) == {"a": 1.0, "b": 2.0, "c": 1.5}
    assert order[3:6] == ["a", "b", "c"] and order[6:9] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("median_ms", "arm"),
    [
        ({EAGER: 10.0, GRAPH: 9.0}, GRAPH),
        ({EAGER: 10.0, GRAPH: 9.9}, EAGER),
        ({EAGER: 10.0, GRAPH: 9.0, COMPILED: 5.0}, COMPILED),
        ({EAGER: 10.0, GRAPH: 9.0, COMPILED: 9.5}, GRAPH),
        ({EAGER: 10.0, GRAPH: 5.0, COMPILED: 4.95}, GRAPH),  # bits are given up for a gain alone
        ({EAGER: 10.0, GRAPH: 9.9, COMPILED: 9.85}, EAGER),
        ({EAGER: 10.0, GRAPH: 12.0, COMPILED: 9.0}, COMPILED),
        ({EAGER: 10.0, GRAPH: 9.0, COMPILED: 5.0, STATIC: 4.0}, STATIC),
    ],
)
def test_the_fastest_arm_that_beats_eager_is_chosen(median_ms: dict[str, float], arm: str) -> None:
    assert choose(median_ms, 1.02).arm == arm


def test_a_graph_that_does_not_pay_is_dropped_and_the_reason_says_the_times(tmp_path: Path) -> None:
    runner = bcg.wrap(MODULE, cache_dir=str(tmp_path))
    with torch.no_grad(), pytest.raises(bcg.DoesNotPayError, match=r"eager 1\.00 ms, graph 1\.00 ms"):
        tuner_of(runner, lambda function: float(function() is not None)).capture(call_of(runner))


def test_a_choice_is_stored_and_reused_without_measuring(tmp_path: Path) -> None:
    runner = bcg.wrap(MODULE, cache_dir=str(tmp_path))
    with torch.no_grad():
        entry = tuner_of(runner, scripted([10.0, 1.0])).capture(call_of(runner))
        assert entry.choice == Choice(GRAPH, {EAGER: 10.0, GRAPH: 1.0})
        again = tuner_of(bcg.wrap(MODULE, cache_dir=str(tmp_path)), forbidden).capture(call_of(runner))
        assert again.choice == entry.choice
        with pytest.raises(AssertionError, match="measured again"):
            tuner_of(runner, forbidden).capture(call_of(runner, rows=5))
    [path] = tmp_path.rglob("*.json")
    assert path.relative_to(tmp_path).parts[:3] == ("autotune", torch.__version__, "cpu")


def test_without_the_cache_every_run_measures_into_a_file_of_its_own(tmp_path: Path) -> None:
    runner = bcg.wrap(MODULE, cache_dir=str(tmp_path), autotune_cache=False)
    with torch.no_grad():
        for _ in range(2):
            tuner = tuner_of(runner, scripted([10.0, 1.0]))
            tuner.capture(call_of(runner))
            tuner._elapsed_ms = forbidden
            tuner.capture(call_of(runner))  # a recapture in the same run
    names = [path.name for path in tmp_path.rglob("*.json") if path.parent.name == "runs"]
    assert len(names) == len(list(tmp_path.rglob("*.json"))) == 2
    assert all(re.fullmatch(r"\d{8}T\d{6}_\d+_\d+_rank_tp1_dp1\.json", name) for name in names)
    assert tuner_of(bcg.wrap(MODULE, cache_dir=str(tmp_path)), host_ms)._store.find(call_of(runner).signature) is None


@pytest.mark.parametrize(
    "content", ["no json", "{}", json.dumps({"format": 99, "choices": {}}), json.dumps({"format": 2, "choices": [1]})]
)
def test_a_foreign_or_corrupt_cache_is_ignored_with_one_warning(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = bcg.wrap(MODULE, cache_dir=str(tmp_path))
    with torch.no_grad():
        tuner_of(runner, scripted([10.0, 1.0])).capture(call_of(runner))
        [path] = tmp_path.rglob("*.json")
        path.write_text(content)
        tuner_of(runner, scripted([10.0, 1.0])).capture(call_of(runner))
    assert sum("is ignored" in record.getMessage() for record in caplog.records) == 1
    assert json.loads(path.read_text())["format"] == 2


def test_a_folder_that_cannot_be_written_costs_a_warning_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = ChoiceStore(MODULE, torch.device("cpu"), bcg.RunnerConfig(cache_dir=str(blocked)))
    call = call_of(bcg.wrap(MODULE))
    store.keep(call.signature, Choice(GRAPH, {}))
    assert store.find(call.signature) == Choice(GRAPH, {})
    assert any("is not written" in record.getMessage() for record in caplog.records)


class Blocks(nn.Module):
    """A module of repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def fail_to_compile(error: Exception) -> Callable[..., Any]:
    capture = Capturer.capture

    def failing(self: Capturer, call: Any, recipe: Recipe = PLAIN) -> Any:
        if recipe.compiled:
            raise error
        return capture(self, call)

    return failing


def test_an_arm_that_cannot_be_captured_is_no_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Capturer, "capture", fail_to_compile(RuntimeError("the compiler has a bug")))
    runner = bcg.wrap(Blocks(), cache_dir=str(tmp_path), compile="blocks")
    with torch.no_grad():
        entry = tuner_of(runner, scripted([10.0, 1.0])).capture(call_of(runner))
        assert entry.choice.failed == {COMPILED: "RuntimeError: the compiler has a bug"}
        tuner_of(runner, forbidden).capture(call_of(runner))  # and is not tried again
    assert entry.choice.arm == GRAPH
    assert caplog.text.count("the compiler has a bug") == 1


def test_without_autotuning_a_call_is_captured_uncompiled_where_compiling_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Capturer, "capture", fail_to_compile(RuntimeError("the compiler has a bug")))
    runner = bcg.wrap(Blocks(), compile="blocks")
    with torch.no_grad(), bcg.warmup():
        runner(torch.randn(3, 4))
    assert [entry.verified for entry in runner.entries.values()] == ["exact"]
    assert "captured without compiled code: RuntimeError: the compiler has a bug" in caplog.text


@pytest.mark.parametrize("fails", ["the compiled arm", "the clock"])
def test_entries_that_were_captured_before_an_error_give_their_memory_back(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets: list[Any] = []
    monkeypatch.setattr(Entry, "reset", lambda self: resets.append(self))
    error = torch.OutOfMemoryError("no room (simulated)")

    def clock(function: Callable[[], Any]) -> float:
        raise error

    if fails == "the compiled arm":
        monkeypatch.setattr(Capturer, "capture", fail_to_compile(error))
    runner = bcg.wrap(Blocks(), cache_dir=str(tmp_path), compile="blocks" if fails == "the compiled arm" else "off")
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        tuner_of(runner, clock).capture(call_of(runner))
    assert len(resets) == 1
    assert list(tmp_path.rglob("*.json")) == []


def test_the_tape_never_measures() -> None:
    runner = bcg.wrap(MODULE, autotune=True, min_speedup=100.0)
    with torch.no_grad(), bcg.warmup():
        runner(torch.ones(1, 4))
    assert runner.stats.captures == 1


# --- stored timings under other options


def test_stored_timings_are_read_anew_under_other_options(tmp_path: Path) -> None:
    def tuner(elapsed_ms: Callable[[Callable[[], Any]], float], **options: Any) -> Tuner:
        return tuner_of(bcg.wrap(MODULE, cache_dir=str(tmp_path), **options), elapsed_ms)

    call = call_of(bcg.wrap(MODULE))
    with torch.no_grad():
        assert tuner(scripted([10.0, 8.0])).capture(call).choice.arm == GRAPH
        with pytest.raises(bcg.DoesNotPayError, match="as measured before"):
            tuner(forbidden, min_speedup=1.5).capture(call)


def test_an_arm_that_was_never_tried_is_measured(tmp_path: Path) -> None:
    def tuner(elapsed_ms: Callable[[Callable[[], Any]], float], **options: Any) -> Tuner:
        return tuner_of(bcg.wrap(Blocks(), cache_dir=str(tmp_path), **options), elapsed_ms)

    call = call_of(bcg.wrap(Blocks()))
    with torch.no_grad():
        tuner(scripted([10.0, 8.0])).capture(call)
        compiled = tuner(scripted([10.0, 8.0, 4.0]), compile="blocks", **AOT).capture(call)
        assert compiled.choice.arm == AOT_COMPILED and compiled.verified == "close"
        assert tuner(forbidden).capture(call).choice.arm == GRAPH
        assert tuner(forbidden, compile="blocks", **AOT).capture(call).choice.arm == AOT_COMPILED


def test_two_processes_that_store_at_once_lose_nothing(tmp_path: Path) -> None:
    stores = [ChoiceStore(MODULE, torch.device("cpu"), bcg.RunnerConfig(cache_dir=str(tmp_path))) for _ in range(3)]
    calls = [call_of(bcg.wrap(MODULE), rows) for rows in (3, 5)]
    assert stores[0].find(calls[1].signature) is None  # both have read the file before either writes
    stores[1].find(calls[0].signature)
    for store, call in zip(stores, calls, strict=False):
        store.keep(call.signature, Choice(GRAPH, {EAGER: 2.0, GRAPH: 1.0}))
    assert all(stores[2].find(call.signature) is not None for call in calls)


def test_a_choice_is_found_again_after_torch_ordered_its_attention_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the first call of a process moves the ambient state, and which call is the first may differ."""
    runner = bcg.wrap(MODULE, cache_dir=str(tmp_path))
    call = call_of(runner)
    later = call.signature.under((*call.signature.ambient[:-1], "moved"))
    monkeypatch.setattr("bcg.autotune.ambient_state", lambda: later.ambient)
    with torch.no_grad():
        tuner_of(runner, scripted([10.0, 1.0])).capture(call)
    store = ChoiceStore(MODULE, torch.device("cpu"), runner._self_config)
    assert store.find(call.signature) is not None and store.find(later) is not None


# --- arms of compiled code


def recorded_captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Return a list to which captures are added, as rows of the call and arm."""
    seen: list[tuple[int, str]] = []
    capture = Capturer.capture

    def recording(self: Capturer, call: Any, recipe: Recipe = PLAIN) -> Any:
        seen.append((call.tensors[0].shape[0], arm_of(recipe, self._config)))
        return capture(self, call, recipe)

    monkeypatch.setattr(Capturer, "capture", recording)
    return seen


@pytest.mark.parametrize(("static_ms", "faster"), [(3.0, AOT_STATIC), (3.95, AOT_COMPILED), (9.0, AOT_COMPILED)])
def test_static_shapes_are_compared_with_dynamic_ones_once_and_the_faster_are_kept(
    static_ms: float, faster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = recorded_captures(monkeypatch)
    runner = bcg.wrap(Blocks(), cache_dir=str(tmp_path), compile="blocks", **AOT)
    tuner = tuner_of(runner, scripted([10.0, 8.0, 4.0]))
    with torch.no_grad():
        tuner.capture(call_of(runner, rows=3))
        tuner._elapsed_ms = scripted([10.0, 8.0, 4.0, static_ms])
        entry = tuner.capture(call_of(runner, rows=5))
        tuner._elapsed_ms = scripted([10.0, 8.0, 4.0])
        for rows in (6, 7):
            tuner.capture(call_of(runner, rows))
    assert entry.choice.arm == (AOT_STATIC if static_ms < 4.0 else AOT_COMPILED)  # compiled already, so the faster
    assert [pair for pair in seen if pair[1] != GRAPH] == [
        (3, AOT_COMPILED), (5, AOT_COMPILED), (5, AOT_STATIC), (6, faster), (7, faster),
    ]  # fmt: skip


def test_a_later_process_knows_from_stored_timings_which_shapes_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = bcg.wrap(Blocks(), cache_dir=str(tmp_path), compile="blocks", **AOT)
    first = tuner_of(runner, scripted([10.0, 8.0, 4.0]))
    with torch.no_grad():
        first.capture(call_of(runner, rows=3))
        first._elapsed_ms = scripted([10.0, 8.0, 4.0, 2.0])
        first.capture(call_of(runner, rows=5))
        seen = recorded_captures(monkeypatch)
        second = tuner_of(runner, forbidden)
        for rows in (3, 5):
            second.capture(call_of(runner, rows))
        second._elapsed_ms = scripted([10.0, 8.0, 4.0])
        second.capture(call_of(runner, rows=6))
    assert seen == [(3, AOT_COMPILED), (5, AOT_STATIC), (6, GRAPH), (6, AOT_STATIC)]


@pytest.mark.parametrize("dynamic", ["yes", "no"])
def test_shapes_that_the_user_decided_on_are_not_compared(
    dynamic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = recorded_captures(monkeypatch)
    runner = bcg.wrap(Blocks(), cache_dir=str(tmp_path), compile="blocks", compile_dynamic=dynamic, **AOT)
    tuner = tuner_of(runner, scripted([10.0, 8.0, 4.0]))
    with torch.no_grad():
        for rows in (3, 5):
            tuner.capture(call_of(runner, rows))
    assert len([arm for _, arm in seen if arm != GRAPH]) == 2


@pytest.mark.parametrize("slowed", [EAGER, GRAPH])
def test_a_slowed_arm_of_a_real_capture_loses(slowed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = bcg.wrap(MODULE, cache_dir=str(tmp_path))
    tuner, call = tuner_of(runner, host_ms), call_of(runner)
    if slowed == GRAPH:
        replay = Entry.replay
        monkeypatch.setattr(Entry, "replay", lambda self, live: (time.sleep(0.02), replay(self, live))[1])
    else:
        tuner._module = lambda *args: time.sleep(0.02)  # type: ignore[assignment]
    with torch.no_grad():
        if slowed == GRAPH:
            with pytest.raises(bcg.DoesNotPayError):
                tuner.capture(call)
        else:
            assert tuner.capture(call).choice.arm == GRAPH


class Drawing(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(4)


def test_random_numbers_go_on_as_in_eager_where_an_arm_fails_before_it_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bcg.compilation.repeated_blocks", lambda module: ())
    runner = bcg.wrap(Drawing(), cache_dir=str(tmp_path), compile="blocks", **AOT)
    call, before = call_of(runner), torch.get_rng_state()
    with torch.no_grad():
        entry = tuner_of(runner, scripted([10.0, 1.0])).capture(call)
    assert "finds nothing in Drawing" in entry.choice.failed[AOT_COMPILED]
    assert torch.equal(torch.get_rng_state(), before)
