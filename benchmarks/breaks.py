"""Time one step against the number of breaks in its graph: FLUX.1-dev at 256x256, where a step is launch-bound.

    python -m benchmarks.breaks --json breaks.json
    python -m benchmarks.breaks --tiny                    a test of the benchmark, on a machine without a GPU

Two kinds of breaks are measured beside eager and beside the graph without a break. ``cuts`` ends the segment before
some of the 57 attention calls and begins another, with nothing between: the price of a boundary. ``attention`` runs
each of the 57 calls of ``scaled_dot_product_attention`` eagerly between two segments: a break as one meets it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

import bcg
from benchmarks import harness
from benchmarks.harness import Column, Comparison, Report, Turn, get, verified
from benchmarks.models import Built, Call, build

ATTENTION: Final = "torch.nn.functional:scaled_dot_product_attention"
FRESH_SEEDS: Final = (101, 102)
SHARES: Final = (4, 2, 1)
"""A cut before every fourth, every second and every attention call."""


class Cuts:
    """Break the graph before chosen attention calls.

    The choice is module state as bcg sees it, so a captured call replays only while its cuts are chosen.

    Args:
        module: The transformer; its attention modules are those that have a ``processor``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._chosen: frozenset[int] = frozenset()
        attentions = [part for part in module.modules() if hasattr(part, "processor")]
        self.calls = len(attentions)
        self._handles = [
            part.register_forward_pre_hook(functools.partial(self._before, index))
            for index, part in enumerate(attentions)
        ]

    def _before(self, index: int, module: nn.Module, args: Any) -> None:
        if index in self._chosen:
            bcg.break_graph()

    @contextlib.contextmanager
    def every(self, share: int) -> Iterator[None]:
        """Cut before every ``share``-th call inside this context."""
        self._chosen = frozenset(range(0, self.calls, share))
        try:
            yield
        finally:
            self._chosen = frozenset()

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


Context = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class BreakArm:
    """Hold one way to run the step: its name, what is called, and the context that it is captured and called in."""

    name: str
    run: Callable[..., Any]
    runner: Any = None
    context: Context = contextlib.nullcontext

    def facts(self) -> dict[str, int]:
        """Return segments and breaks of the captured entry; of eager there are none."""
        if self.runner is None or not self.runner.entries:
            return {}
        (entry,) = self.runner.entries.values()
        return {"segments": int(entry.segments), "breaks": int(entry.breaks)}


def _captured(
    name: str, built: Built, call: Call, context: Context = contextlib.nullcontext, **options: Any
) -> BreakArm:
    runner = bcg.wrap(built.module, **options)
    with context(), bcg.warmup():
        call(runner)
    return BreakArm(name, runner, runner, context)


def make_arms(built: Built, call: Call, cuts: Cuts) -> list[BreakArm]:
    """Capture the step without breaks, with cuts and with eager attention."""
    arms = [BreakArm("eager", built.module), _captured("no break", built, call)]
    for share in SHARES:
        name = f"cuts, every {share}" if share > 1 else "cuts, every call"
        arms.append(_captured(name, built, call, functools.partial(cuts.every, share)))
    arms.append(_captured("attention", built, call, eager_functions=(ATTENTION,)))
    return arms


def verify(arm: BreakArm, calls: Sequence[Call], wants: Sequence[Any]) -> tuple[Comparison, str]:
    """Compare an arm with eager on fresh inputs.

    Returns:
        The comparison, and a status: ``ok``, or why the calls were not replayed.
    """
    before = arm.runner.stats.replays if arm.runner is not None else 0
    result = harness.SAME
    with arm.context():
        for call, want in zip(calls, wants, strict=True):
            result = result & harness.compare(call(arm.run), want)
        if arm.runner is not None and arm.runner.stats.replays - before != len(calls):
            return result, "not replayed: " + " ".join(arm.runner.explain(*calls[0].args, **calls[0].kwargs).split())
    return result, "ok" if result.exact else "differs from eager"


def measure(built: Built, budget_s: float) -> list[dict[str, Any]]:
    """Capture all arms, compare them with eager, and time them in turns."""
    shape = built.shapes[0]
    call = built.call(shape)
    fresh = [built.call(shape, seed) for seed in FRESH_SEEDS]
    cuts = Cuts(built.module)
    try:
        wants = [each(built.module) for each in fresh]
        arms = make_arms(built, call, cuts)
        turns = {arm.name: Turn(functools.partial(call, arm.run), arm.context) for arm in arms}
        rows: list[dict[str, Any]] = []
        for arm in arms:
            comparison, status = verify(arm, fresh, wants)
            rows.append(
                {
                    "model": built.model.name,
                    "shape": shape.name,
                    "arm": arm.name,
                    "status": status,
                    "verified": comparison.exact,
                    "max_rel_diff": comparison.max_rel_diff,
                    **arm.facts(),
                }
            )
        timings = harness.interleave(turns, harness.clock_for(built.device), budget_s=budget_s)
        for row in rows:
            row |= timings[row["arm"]].as_json()
    finally:
        cuts.close()
    _add_prices(rows)
    return rows


def _add_prices(rows: list[dict[str, Any]]) -> None:
    """Add each row's ratio to the graph without a break, and what one boundary between segments costs."""
    whole = next(row for row in rows if row["arm"] == "no break")
    for row in rows:
        difference_ms = row["step_ms"]["median"] - whole["step_ms"]["median"]
        row["over_no_break"] = row["step_ms"]["median"] / whole["step_ms"]["median"]
        extra = row.get("segments", 0) - whole.get("segments", 0)
        if extra > 0:
            row["boundary_us"] = 1e3 * difference_ms / extra


COLUMNS: Final = (
    Column("arm", get("arm"), text=True),
    Column("segments", get("segments")),
    Column("breaks", get("breaks")),
    Column("step ms", get("step_ms", "median"), "{:.2f}"),
    Column("IQR", get("step_ms", "iqr"), "{:.2f}"),
    Column("lone ms", get("lone_ms", "median"), "{:.2f}"),
    Column("host ms", get("host_ms", "median"), "{:.2f}"),
    Column("arm / no break", get("over_no_break"), "{:.3f}"),
    Column("µs a boundary", get("boundary_us"), "{:.1f}"),
    Column("verified", verified, text=True),
    Column("status", get("status"), text=True),
)


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark from its command line, and return what was measured."""
    arguments = sys.argv[1:] if arguments is None else arguments
    asked = harness.parser("Time one FLUX step against the number of breaks in its graph.").parse_args(arguments)
    harness.quiet_diffusers()
    device = torch.device(asked.device)
    report = Report("Breaks", harness.machine(device), harness.command_line("breaks", arguments))
    try:
        with torch.no_grad():
            report.rows = measure(build("flux", device, tiny=asked.tiny), asked.budget)
    finally:
        report.write(asked.json)
        report.show(COLUMNS)
    return report


if __name__ == "__main__":
    main()
