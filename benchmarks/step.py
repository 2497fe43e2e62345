"""Time one transformer step in every way there is to run it.

    python -m benchmarks.step --models flux,sd35 --arms eager,graph,bcg --json results.json
    python -m benchmarks.step --tiny                      a test of the benchmark, on a machine without a GPU

For each model: build it with random weights, let every arm make its first call for both shapes (cold start, memory),
compare what it gives on fresh inputs with eager, then time all arms in turns. The JSON is written after every model,
and in any case.

Columns: ``step ms`` is one step among others, back to back as in a denoising loop; ``lone ms`` one step from an idle
device to its end; ``host ms`` the time until that one returns. ``graph`` is a hand-written ``torch.cuda.graph`` of the
whole forward with copies in and a cloned output, ``graph_replay`` the same graph without them. ``reserved`` and
``outside`` are what the first calls left in use, in torch's allocator and outside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import harness
from benchmarks.arms import ARMS, DEFAULT_ARMS, Arm, Arms, start_compiler
from benchmarks.harness import Column, Comparison, Deadline, Memory, Report, Timings, Turn, get, mib, verified
from benchmarks.models import MODELS, Built, Call, Shape, build
from benchmarks.together import Gate, run_together

FRESH_SEEDS: Final = (101, 102)
"""Seeds of the inputs that results are compared on; the first call and the timing use seed 0."""
LEAK_MIB: Final = 64


@dataclass
class Row:
    """Hold what was measured of one arm at one shape."""

    model: str
    parameters: int
    shape: str
    load: str
    arm: str
    status: str = "ok"
    comparison: Comparison | None = None
    cold_start_s: float | None = None
    memory: Memory | None = None
    timings: Timings | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        measured: dict[str, Any] = {}
        if self.comparison is not None:
            measured |= {"verified": self.comparison.exact, "max_rel_diff": self.comparison.max_rel_diff}
        if self.memory is not None:
            measured |= {"reserved_bytes": self.memory.reserved, "outside_bytes": self.memory.outside}
        return {
            "model": self.model,
            "parameters": self.parameters,
            "shape": self.shape,
            "load": self.load,
            "arm": self.arm,
            "status": self.status,
            "cold_start_s": self.cold_start_s,
            **measured,
            **(self.timings.as_json() if self.timings is not None else {}),
            **self.facts,
        }


@dataclass(frozen=True)
class Options:
    """Hold what the command line asked for."""

    device: torch.device
    tiny: bool
    arms: tuple[str, ...]
    loads: tuple[str, ...]
    budget_s: float
    dynamic: bool | None
    keep_caches: bool
    deadline: Deadline
    only: tuple[str, ...] = ()
    gate: Gate | None = None

    def wants(self, model: str, shape: Shape) -> bool:
        """Tell whether a shape of a model is to be measured."""
        named = [name for name in self.only if name.startswith(f"{model}:")]
        return shape.load in self.loads and (not named or f"{model}:{shape.name}" in named)

    @property
    def is_cold(self) -> bool:
        """Whether first calls tell how long a cold start takes."""
        return not self.keep_caches and self.gate is None


class ModelRun:
    """Measure all arms of one model.

    Args:
        built: The model.
        options: What to measure.
    """

    def __init__(self, built: Built, options: Options) -> None:
        self._built = built
        self._options = options
        self._clock = harness.clock_for(built.device)
        self._shapes = [shape for shape in built.shapes if options.wants(built.model.name, shape)]
        self._arms = Arms(built.module, options.dynamic, keep_caches=options.keep_caches)
        self._started: list[Arm] = []
        self._rows: dict[tuple[str, str], Row] = {}
        self._want: dict[str, list[Any]] = {}
        self._tflop: dict[str, float] = {}

    def run(self) -> list[dict[str, Any]]:
        """Measure, and return the rows; what fails is a row that says so."""
        try:
            for shape in self._shapes:
                self._want[shape.name] = [call(self._built.module) for call in self._fresh(shape)]
                self._tflop[shape.name] = self._count(shape)
            for name in self._options.arms:
                self._start(name)
            if self._options.gate is not None:
                self._options.gate.wait()
            for shape in self._shapes:
                self._time(shape)
        finally:
            self._arms.close()
        return self._finish()

    def _fresh(self, shape: Shape) -> list[Call]:
        return [self._built.call(shape, seed) for seed in FRESH_SEEDS]

    def _count(self, shape: Shape) -> float:
        """Count the operations of matrix products, convolutions and attention of a step, in units of 1e12."""
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            self._built.call(shape)(self._built.module)
        return float(counter.get_total_flops()) / 1e12

    def _row(self, arm: str, shape: Shape) -> Row:
        key = (arm, shape.name)
        if key not in self._rows:
            built = self._built
            self._rows[key] = Row(built.model.name, built.parameters, shape.name, shape.load, arm)
        return self._rows[key]

    def _start(self, name: str) -> None:
        """Make an arm and its first calls."""
        if ARMS[name].needs_cuda and self._built.device.type != "cuda":
            return
        if self._options.deadline.passed:
            self._fail(name, "skipped: time box")
            return
        try:
            arm = self._arms.open(name)
            with self._arms.cold(arm), arm.active():
                for shape in self._shapes:
                    self._first_call(arm, shape)
            self._started.append(arm)
        except Exception as error:  # an arm that cannot run this model is a result, not the end of the benchmark
            self._fail(name, f"error: {harness.one_line(error)}")
            self._clock.synchronize()  # raises where the device itself is out of order

    def _fail(self, name: str, status: str) -> None:
        for shape in self._shapes:
            row = self._row(name, shape)
            row.status = status if row.status == "ok" else row.status

    def _first_call(self, arm: Arm, shape: Shape) -> None:
        row = self._row(arm.name, shape)
        call = self._built.call(shape)
        before = Memory.now(self._built.device)
        begin = time.perf_counter()
        arm.start(shape.name, call)
        self._clock.synchronize()
        if self._options.is_cold:
            row.cold_start_s = time.perf_counter() - begin
        for _ in range(arm.settling):
            arm.run(shape.name, call)
        row.memory = Memory.now(self._built.device) - before
        row.facts |= arm.facts() | {"tflop": self._tflop[shape.name]}
        self._verify(arm, shape, row)

    def _verify(self, arm: Arm, shape: Shape, row: Row) -> None:
        """Compare with eager on fresh inputs, and look whether the calls were replayed."""
        replayed = arm.replays()
        row.comparison = harness.SAME
        for call, want in zip(self._fresh(shape), self._want[shape.name], strict=True):
            row.comparison = row.comparison & harness.compare(arm.run(shape.name, call), want)
        now = arm.replays()
        if replayed is not None and now is not None and now - replayed != len(FRESH_SEEDS):
            row.status = f"not replayed: {arm.why(self._fresh(shape)[0])}"
        elif row.comparison.max_rel_diff is None or (arm.exact and not row.comparison.exact):
            row.status = "differs from eager"

    def _time(self, shape: Shape) -> None:
        """Time the arms that work at a shape, in turns."""
        call = self._built.call(shape)
        turns = {
            name: Turn(variant, arm.active)
            for arm in self._started
            for name, variant in arm.variants(shape.name, call).items()
        }
        if not turns:
            return
        timings = harness.interleave(turns, self._clock, budget_s=self._options.budget_s)
        for name, timing in timings.items():
            row = self._row(name, shape)
            row.timings = timing
            row.facts.setdefault("tflop", self._tflop[shape.name])

    def _finish(self) -> list[dict[str, Any]]:
        shapes = [shape.name for shape in self._shapes]

        def place(row: Row) -> tuple[int, int, str]:
            return shapes.index(row.shape), self._options.arms.index(row.arm.removesuffix("_replay")), row.arm

        rows = [row.as_json() for row in sorted(self._rows.values(), key=place)]
        add_ratios(rows)
        return rows


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Add to every timed row its ratios to eager and to the hand-written graph of the same shape, and its rate."""
    step_ms = {(row["model"], row["shape"], row["arm"]): get("step_ms", "median")(row) for row in rows}
    for row in rows:
        own = get("step_ms", "median")(row)
        if own is None:
            continue
        row["tflops"] = row["tflop"] / (own / 1e3)
        for peer in ("eager", "graph", "graph_replay"):
            other = step_ms.get((row["model"], row["shape"], peer))
            if other is not None:
                row[f"over_{peer}"] = own / other
        if row.get("over_eager"):
            row["speedup"] = 1 / row["over_eager"]


COLUMNS: Final = (
    Column("model", get("model"), text=True),
    Column("shape", get("shape"), text=True),
    Column("arm", get("arm"), text=True),
    Column("step ms", get("step_ms", "median"), "{:.2f}"),
    Column("IQR", get("step_ms", "iqr"), "{:.2f}"),
    Column("lone ms", get("lone_ms", "median"), "{:.2f}"),
    Column("host ms", get("host_ms", "median"), "{:.2f}"),
    Column("cold s", get("cold_start_s"), "{:.2f}"),
    Column("reserved MiB", mib("reserved_bytes"), "{:.0f}"),
    Column("outside MiB", mib("outside_bytes"), "{:.0f}"),
    Column("eager / arm", get("speedup"), "{:.2f}"),
    Column("arm / graph", get("over_graph"), "{:.3f}"),
    Column("arm / replay", get("over_graph_replay"), "{:.3f}"),
    Column("TFLOP/s", get("tflops"), "{:.0f}"),
    Column("verified", verified, text=True),
    Column("status", get("status"), text=True),
)


def measure(name: str, options: Options) -> tuple[list[dict[str, Any]], str]:
    """Build one model, measure it, and free it.

    Returns:
        The rows, and a note on the time to build and the memory left behind.
    """
    before = Memory.now(options.device)
    begin = time.perf_counter()
    built = build(name, options.device, tiny=options.tiny)
    harness.clock_for(options.device).synchronize()
    build_s = time.perf_counter() - begin
    rows = ModelRun(built, options).run()
    note = f"{built.model.title}: {built.parameters / 1e9:.3f}e9 parameters, built in {build_s:.1f} s"
    del built
    left = (Memory.now(options.device) - before).reserved / harness.MIB
    if left > LEAK_MIB:
        note += f"; {left:.0f} MiB were not given back after it"
    return rows, f"{note}; {time.perf_counter() - begin:.0f} s in all."


def _parser() -> Any:
    parser = harness.parser("Time one transformer step in every way there is to run it.")
    parser.add_argument("--models", type=harness.choice_list(*MODELS), default=list(MODELS), help="which models")
    parser.add_argument(
        "--shapes", choices=("launch", "compute", "all"), default="all", help="launch-bound, compute-bound or both"
    )
    parser.add_argument("--arms", type=harness.choice_list(*ARMS), default=list(DEFAULT_ARMS), help="which arms")
    parser.add_argument(
        "--dynamic", choices=("auto", "no"), default="auto", help="torch.compile's shapes: its default, or all static"
    )
    parser.add_argument(
        "--only",
        type=harness.names_in,
        default=[],
        metavar="MODEL:SHAPE,...",
        help="of these models only these shapes: flux:256x256,flux:1024x1024",
    )
    parser.add_argument(
        "--together",
        type=float,
        metavar="SECONDS",
        help="compile all models at once, a process each, for so long at most, then time them in turns; no cold starts",
    )
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--keep-caches",
        action="store_true",
        help="compile with the caches that TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR name; no cold starts then",
    )
    return parser


def measure_together(asked: argparse.Namespace, arguments: Sequence[str], report: Report) -> None:
    """Measure every model in a process of its own: compile all at once, time one after another."""
    own = harness.without(arguments, "--together", "--models", "--json")
    commands = {name: ["benchmarks.step", *own, "--models", name] for name in asked.models}
    for name, result in run_together(commands, prepare_s=asked.together).items():
        if isinstance(result, str):
            report.notes.append(f"{MODELS[name].title}: {result}.")
            continue
        report.rows += result["rows"]
        report.notes += [note for note in result["notes"] if note not in report.notes]
    report.notes.append("All models were built and compiled at once, and timed in turns while the others waited.")


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark from its command line.

    Args:
        arguments: The command line; that of the process by default.

    Returns:
        What was measured, which was printed and written too.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    asked = _parser().parse_args(arguments)
    harness.quiet_diffusers()
    options = Options(
        device=torch.device(asked.device),
        tiny=asked.tiny,
        arms=tuple(asked.arms),
        loads=("launch", "compute") if asked.shapes == "all" else (asked.shapes,),
        budget_s=asked.budget,
        dynamic=None if asked.dynamic == "auto" else False,
        keep_caches=asked.keep_caches,
        deadline=Deadline(asked.time_box),
        only=tuple(asked.only),
        gate=Gate(asked.gate.parent, asked.gate.name) if asked.gate is not None else None,
    )
    report = Report("One transformer step", harness.machine(options.device), harness.command_line("step", arguments))
    if asked.together is not None:
        measure_together(asked, arguments, report)
        report.write(asked.json)
        report.show(COLUMNS)
        return report
    with torch.no_grad():
        if any(not ARMS[arm].exact for arm in options.arms):
            start_compiler(options.device)
            if options.is_cold:
                report.notes.append(
                    "Cold starts leave out the compiler's start; every arm compiles for itself, without disk caches."
                )
        try:
            for name in asked.models:
                if options.deadline.passed:
                    report.notes.append(f"{MODELS[name].title}: skipped, the time box is used up.")
                    continue
                rows, note = measure(name, options)
                report.rows += rows
                report.notes.append(note)
                report.write(asked.json)
                print(note, file=sys.stderr, flush=True)
        finally:
            report.write(asked.json)
            report.show(COLUMNS)
    return report


if __name__ == "__main__":
    main()
