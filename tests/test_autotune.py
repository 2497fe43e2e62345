"""The choice among eager, graph and graph of compiled code."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bcg
from bcg.autotune import COMPILED, EAGER, GRAPH, Choice, ChoiceStore, Tuner, choose, time_arms
from bcg.capture import Capturer
from bcg.entry import Entry
from bcg.signature import CallBinder

MODULE = nn.Linear(4, 2).requires_grad_(False)


def host_ms(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1e3


def call_of(runner: Any, rows: int = 3) -> Any:
    return CallBinder(runner.transformer.forward).call((torch.randn(rows, 4),), {})


def tuner_of(runner: Any, elapsed_ms: Callable[[Callable[[], Any]], float]) -> Tuner:
    return Tuner(runner.transformer, runner._capturer(), runner._self_config, elapsed_ms)


def scripted(milliseconds: list[float]) -> Callable[[Callable[[], Any]], float]:
    """Return a clock for two arms, whose turns alternate in order."""
    turns = iter(range(10_000))

    def elapsed_ms(function: Callable[[], Any]) -> float:
        function()
        turn = next(turns)
        return milliseconds[(turn + turn // 2) % 2]

    return elapsed_ms


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

        def forbidden(function: Callable[[], Any]) -> float:
            raise AssertionError("measured again")

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
            tuner_of(runner, scripted([10.0, 1.0])).capture(call_of(runner))
    assert all(path.parent.name == "runs" for path in tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    "content", ["no json", "{}", json.dumps({"format": 99, "choices": {}}), json.dumps({"format": 1, "choices": [1]})]
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
    assert json.loads(path.read_text())["format"] == 1


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

    def failing(self: Capturer, call: Any, *, compiled: bool = False) -> Any:
        if compiled:
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
    assert entry.choice.arm == GRAPH
    assert "the compiler has a bug" in caplog.text


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
