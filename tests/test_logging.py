"""Each thing that happens is one line with fields, and debug adds lines and changes nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg


@pytest.fixture(autouse=True)
def _no_grad(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "bcg")
    with torch.no_grad():
        yield


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0, limit: Tensor | None = None) -> Tensor:
        result = self.linear(x) * scale
        return result.clamp(max=limit.item()) if limit is not None else result


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    return [record for record in caplog.records if getattr(record, "bcg_event", None) == event]


def test_every_line_says_what_happened_and_to_whom(caplog: pytest.LogCaptureFixture) -> None:
    runner = bcg.wrap(Scaled(), max_entries=1)
    runner.capture(torch.randn(1, 4))
    runner.capture(torch.randn(2, 4))
    runner.recapture()
    runner.compact()
    runner.release()
    records = [record for record in caplog.records if record.name == "bcg"]
    assert {record.bcg_event for record in records} == {"capture", "evict", "recapture", "compact", "release"}  # type: ignore[attr-defined]
    assert {record.bcg_module for record in records} == {"Scaled"}  # type: ignore[attr-defined]
    assert all(record.getMessage().startswith("Scaled: ") for record in records)


def test_a_capture_is_one_line_with_its_facts(caplog: pytest.LogCaptureFixture) -> None:
    runner = bcg.wrap(Scaled())
    runner.capture(torch.randn(1, 4))
    [line] = lines(caplog, "capture")
    [entry] = runner.entries.values()
    assert line.levelno == logging.INFO
    assert line.bcg_signature == "x float32[1,4]"
    assert (line.bcg_segments, line.bcg_breaks, line.bcg_guards) == (1, 0, 0)
    assert line.bcg_capture_s == entry.capture_s > 0
    assert (line.bcg_verified, line.bcg_bytes) == ("exact", entry.bytes)
    assert "captured <Entry x float32[1,4]" in line.getMessage()


def test_a_rejection_is_one_line_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(3, generator=torch.Generator().manual_seed(1))

    runner = bcg.wrap(Draws())
    for _ in range(2):
        with bcg.warmup():
            runner(torch.randn(3))
    [line] = lines(caplog, "reject")
    assert line.levelno == logging.WARNING
    assert line.bcg_signature == "x float32[3]"
    assert line.bcg_reason in line.getMessage()
    assert "generator of its own" in line.bcg_reason


def test_an_eviction_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    runner = bcg.wrap(Scaled(), max_entries=1)
    for rows in (1, 2):
        runner.capture(torch.randn(rows, 4))
    [line] = lines(caplog, "evict")
    assert line.bcg_signature == "x float32[1,4]"


def test_the_first_miss_of_a_signature_names_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    runner = bcg.wrap(Scaled())
    runner.capture(torch.randn(1, 4))
    for _ in range(3):
        runner(torch.randn(1, 4), 2.0)
    [line] = lines(caplog, "miss")
    assert line.levelno == logging.WARNING
    assert line.bcg_differences == ("scale: expected 1.0, got 2.0",)
    assert line.bcg_signature == "x float32[1,4]"
    runner(torch.randn(3, 4))
    assert lines(caplog, "miss")[-1].bcg_differences == ("x: expected float32[1,4] on cpu, got float32[3,4] on cpu",)


def test_a_miss_of_a_changed_module_names_the_change(caplog: pytest.LogCaptureFixture) -> None:
    runner = bcg.wrap(Scaled())
    runner.capture(torch.randn(1, 4))
    runner.threshold = 3
    runner(torch.randn(1, 4))
    [line] = lines(caplog, "miss")
    assert line.bcg_differences == ("module: threshold: expected nothing, got 3",)


def test_a_guard_miss_names_the_guard(caplog: pytest.LogCaptureFixture) -> None:
    runner = bcg.wrap(Scaled(), module_breaks=False)
    assert runner.capture(torch.randn(1, 4), limit=torch.tensor(0.5))
    runner(torch.randn(1, 4), limit=torch.tensor(0.25))
    [line] = lines(caplog, "miss")
    [difference] = line.bcg_differences
    assert "expected 0.5, got 0.25" in difference


def test_an_unwarmed_runner_does_not_log_its_misses(caplog: pytest.LogCaptureFixture) -> None:
    runner = bcg.wrap(Scaled())
    runner(torch.randn(1, 4))
    assert lines(caplog, "miss") == []


def test_a_refusal_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    runner = bcg.wrap(Scaled())
    with torch.enable_grad():
        for _ in range(2):
            runner(torch.randn(1, 4))
    [line] = lines(caplog, "refusal")
    assert "gradients are required" in line.bcg_reason
    assert line.bcg_reason in line.getMessage()


def test_percent_signs_in_reasons_are_no_formats(caplog: pytest.LogCaptureFixture) -> None:
    class Percent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise_in_capture()
            return x * 2

    def raise_in_capture() -> None:
        if bcg.graph.current_capture() is not None:
            raise ValueError("100% of %s %d")

    runner = bcg.wrap(Percent())
    assert not runner.capture(torch.randn(3))
    [line] = lines(caplog, "reject")
    assert "100% of %s %d" in line.getMessage()


def serve(runner: Any) -> list[Any]:
    """Run a mixed stream and return all results."""
    torch.manual_seed(1)
    results = []
    with bcg.warmup():
        for rows in (3, 2):
            results.append(runner(torch.randn(rows, 4)))
        results.append(runner(torch.randn(2, 4), limit=torch.tensor(0.5)))
    for rows in (3, 2, 5, 5, 1):
        results.append(runner(torch.randn(rows, 4)))
    results += [runner(torch.randn(2, 4), limit=torch.tensor(limit)) for limit in (0.5, 0.25, 0.25)]
    return results


def test_debug_adds_lines_and_changes_no_result_and_no_counter(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    module = Scaled()
    plain, debug = bcg.wrap(module), bcg.wrap(module, debug=True)
    expected = serve(plain)
    quiet = len(caplog.records)
    got = serve(debug)
    assert all(map(torch.equal, expected, got))
    assert plain.stats == debug.stats
    assert [entry.bytes for entry in plain.entries.values()] == [entry.bytes for entry in debug.entries.values()]
    assert [miss.count for miss in plain.misses] == [miss.count for miss in debug.misses]
    assert [miss.reason for miss in plain.misses] == [miss.reason for miss in debug.misses]
    added = caplog.records[quiet:]
    assert len(added) > quiet
    texts = [record.getMessage() for record in added]
    assert any("of its own" in text for text in texts)
    assert any("met guard" in text or "met break" in text for text in texts)
    again = [record for record in added if getattr(record, "bcg_first", True) is False]
    assert len(again) == 2
    assert all(record.levelno == logging.INFO for record in again)
