"""Time the cold start of each shape in fresh processes, for every way to run a transformer.

    python -m benchmarks.cold --models sd35,flux --json cold.json
    python -m benchmarks.cold --tiny                      a test of the benchmark, on a machine without a GPU

Every model and arm gets a process of its own, one after the other, with new and empty ``TORCHINDUCTOR_CACHE_DIR`` and
``TRITON_CACHE_DIR``. The process builds the model, compiles a trifle where its arm compiles at all (the start of the
compiler itself does not count), and then calls the model for one shape after the other. Importing and building are
left out. The first shape includes loading the libraries and kernels of any first call: the arm ``eager`` shows how
much that is.

Columns: ``first s`` is the first call of a shape, until its result is there; ``ready s`` the time from the same
start until the slow calls are over, those that take more than `SLOW` times as long as the last few do. They differ
where work is left to later calls: reduce-overhead records its graph in the second. ``compiled`` counts the graphs that
torch.compile made for a shape. Ratios compare ``ready s`` with that of the same position.

``bcg_blocks_fill`` is bcg with compiled blocks that also saves its compile cache, and ``bcg_blocks_cached`` a later
process that finds this cache and nothing else. ``reduce_overhead_static`` compiles every shape for itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from bcg._torch import compiled_graphs
from benchmarks import harness
from benchmarks.arms import ARMS, Arm, Arms, BcgArm, start_compiler
from benchmarks.harness import Column, Comparison, Deadline, Report, get, verified
from benchmarks.models import MODELS, Built, Shape, build

FRESH_SEEDS: Final = (101, 102)
"""Seeds of the inputs that results are compared on; the timed calls use seed 0."""
CALLS: Final = 8
"""Calls of a shape."""
LAST: Final = 3
"""How many of the last calls say what a call takes in the steady state."""
SLOW: Final = 1.5
CLOSE: Final = 0.1
"""Largest relative difference from eager of bcg's compiled blocks, which give about 0.02 with random weights. Peers
are not held to it: torch.compile of all of FLUX leaves out the rounding of its times to bfloat16, which gives more."""
PEERS: Final = ("reduce_overhead", "reduce_overhead_static")


# ------------------------------------------------------------------------------------------------ what is compared


@dataclass(frozen=True)
class Way:
    """Describe one row: an arm of `benchmarks.arms`, how its shapes are compiled, and what it does with a cache.

    Attributes:
        arm: A key of `ARMS`.
        dynamic: As ``torch.compile`` takes it; for bcg's blocks the command line says it.
        cache: ``fill`` or ``read`` the compile cache; None has none.
    """

    arm: str
    dynamic: bool | None = None
    cache: str | None = None


WAYS: Final[dict[str, Way]] = {
    "eager": Way("eager"),
    "bcg": Way("bcg"),
    "bcg_blocks": Way("bcg_blocks"),
    "bcg_blocks_fill": Way("bcg_blocks", cache="fill"),
    "bcg_blocks_cached": Way("bcg_blocks", cache="read"),
    "compile": Way("compile"),
    "reduce_overhead": Way("reduce_overhead"),
    "reduce_overhead_static": Way("reduce_overhead", dynamic=False),
}
CHOICES: Final = tuple(name for name, way in WAYS.items() if way.cache != "fill")
"""The filling process runs where the cached one is asked for."""
DYNAMIC: Final[dict[str, bool | None]] = {"auto": None, "yes": True, "no": False}

_IMAGES: Final = ((512, 512), (1024, 1024), (768, 768), (640, 896))
_SHAPES: Final[dict[str, tuple[tuple[int, ...], ...]]] = {
    "wan": ((480, 832, 5), (480, 832, 17), (480, 832, 9), (320, 512, 17)),
    "ltx": ((512, 768, 25), (512, 768, 97), (512, 768, 49), (384, 640, 33)),
}
_TINY_IMAGES: Final = ((64, 64), (96, 96), (80, 80), (64, 96))
_TINY_SHAPES: Final[dict[str, tuple[tuple[int, ...], ...]]] = {
    "sana": ((128, 128), (192, 192), (160, 160), (128, 192)),
    "wan": ((64, 64, 5), (64, 96, 9), (64, 64, 9), (96, 64, 5)),
    "ltx": ((64, 64, 9), (64, 96, 17), (64, 64, 17), (96, 64, 9)),
}
POSITIONS: Final = len(_IMAGES)


def shapes(model: str, tiny: bool) -> list[Shape]:
    """Return the shapes of a model in the order in which they are asked for."""
    sizes = _TINY_SHAPES.get(model, _TINY_IMAGES) if tiny else _SHAPES.get(model, _IMAGES)
    return [Shape("cold", *size) for size in sizes]


# --------------------------------------------------------------------------------------------------- in the child


@dataclass
class Start:
    """Hold the calls of one shape, in seconds; the first counts as slow whatever it takes."""

    calls_s: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the times, and what follows from them."""
        steady = statistics.median(self.calls_s[-LAST:])
        fast = (index for index, seconds in enumerate(self.calls_s) if index and seconds <= SLOW * steady)
        slow = next(fast)  # one of the last few is not above their median
        return {
            "first_call_s": self.calls_s[0],
            "ready_s": sum(self.calls_s[:slow]),
            "slow_calls": slow,
            "steady_ms": 1e3 * steady,
            "calls_s": self.calls_s,
        }


class ColdRun:
    """Make the first calls of one arm for one shape after the other, then compare with eager.

    Eager runs after everything was timed: it would load what the arm's first calls have to load.

    Args:
        built: The model.
        arm: The arm.
        report: Gets a row a shape, and is written after each, since this process may be ended at any time.
        path: Where to write.
    """

    def __init__(self, built: Built, arm: Arm, report: Report, path: Path | None) -> None:
        self._built = built
        self._arm = arm
        self._report = report
        self._path = path
        self._clock = harness.clock_for(built.device)

    def run(self, wanted: Sequence[Shape], deadline: Deadline) -> None:
        """Time and compare as many shapes as the time box has room for."""
        started: list[tuple[Shape, dict[str, Any]]] = []
        for position, shape in enumerate(wanted, 1):
            if deadline.passed:
                break
            row: dict[str, Any] = {"position": position, "shape": shape.name, "status": "not compared with eager"}
            self._report.rows.append(row)
            if not self._attempt(row, shape, self._start):
                break  # what comes after a failure in one process is no cold start of anything
            started.append((shape, row))
        for shape, row in started:
            if self._attempt(row, shape, self._compare) and row["status"] == "not compared with eager":
                row["status"] = "ok"
            self._report.write(self._path)

    def _attempt(self, row: dict[str, Any], shape: Shape, what: Any) -> bool:
        try:
            with self._arm.active():
                what(row, shape)
        except Exception as error:  # an arm that cannot run this model is a result
            row["status"] = f"error: {harness.one_line(error)}"
            return False
        finally:
            self._report.write(self._path)
        return True

    def _start(self, row: dict[str, Any], shape: Shape) -> None:
        call, start, compiled = self._built.call(shape), Start(), compiled_graphs()
        for index in range(CALLS):
            self._clock.synchronize()
            begin = time.perf_counter()
            (self._arm.run if index else self._arm.start)(shape.name, call)
            self._clock.synchronize()
            start.calls_s.append(time.perf_counter() - begin)
        row |= start.as_json() | self._arm.facts() | {"compiled_graphs": compiled_graphs() - compiled}

    def _compare(self, row: dict[str, Any], shape: Shape) -> None:
        replayed = self._arm.replays()
        calls = [self._built.call(shape, seed) for seed in FRESH_SEEDS]
        same = harness.SAME
        for call in calls:
            want = harness.keep(call(self._built.module))
            same = same & harness.compare(self._arm.run(shape.name, call), want)
        row |= {"verified": same.exact, "max_rel_diff": same.max_rel_diff}
        now = self._arm.replays()
        if replayed is not None and now is not None and now - replayed != len(calls):
            row["status"] = f"not replayed: {self._arm.why(calls[0])}"
        elif not self._agrees(same):
            row["status"] = "differs from eager"
        elif not self._arm.exact and not any(other.get("compiled_graphs") for other in self._report.rows):
            row["status"] = "nothing was compiled"

    def _agrees(self, same: Comparison) -> bool:
        if self._arm.exact:
            return same.exact
        bound = CLOSE if isinstance(self._arm, BcgArm) else math.inf
        return same.max_rel_diff is not None and same.max_rel_diff <= bound


def child(asked: Any) -> Report:
    """Measure one arm of one model in this process, and write the rows."""
    deadline = Deadline(asked.time_box)
    device, way = torch.device(asked.device), WAYS[asked.child]
    dynamic = DYNAMIC[asked.blocks_dynamic] if way.arm == "bcg_blocks" else way.dynamic
    report = Report("Cold start in this process", {}, "")
    harness.quiet_diffusers()
    begin = time.perf_counter()
    with torch.no_grad():
        (name,) = asked.models
        built = build(name, device, tiny=asked.tiny)
        if not ARMS[way.arm].exact:
            start_compiler(device)
        harness.clock_for(device).synchronize()
        report.summary = {"parameters": built.parameters, "build_s": time.perf_counter() - begin}
        arm = Arms(built.module, dynamic).open(way.arm)
        ColdRun(built, arm, report, asked.json).run(shapes(name, asked.tiny)[: asked.shapes], deadline)
    report.write(asked.json)
    return report


# -------------------------------------------------------------------------------------------------- in the parent


@dataclass(frozen=True)
class Options:
    """Hold what the command line asked for."""

    device: torch.device
    tiny: bool
    shapes: int
    blocks_dynamic: str
    timeout_s: float
    deadline: Deadline
    time_box_s: float | None
    begin: float

    def left_s(self) -> float | None:
        """Return what is left of the time box."""
        return None if self.time_box_s is None else self.begin + self.time_box_s - time.monotonic()

    def runs(self, name: str) -> bool:
        """Return whether an arm can run on this device."""
        return self.device.type == "cuda" or not ARMS[WAYS[name].arm].needs_cuda


@dataclass(frozen=True)
class Child:
    """Run one arm of one model in a process of its own.

    Attributes:
        model: A key of `MODELS`.
        name: A key of `WAYS`.
        options: What to measure.
        compile_cache: bcg's compile cache, where the arm has one.
    """

    model: str
    name: str
    options: Options
    compile_cache: Path | None = None

    def run(self) -> list[dict[str, Any]]:
        """Run it, and return one row a shape, whatever became of the process."""
        if self.options.deadline.passed:
            return self.rows({}, "skipped: time box")
        with tempfile.TemporaryDirectory(prefix="bcg-cold-", ignore_cleanup_errors=True) as folder:
            status = self._process(Path(folder))
            result = Path(folder) / "result.json"
            return self.rows(json.loads(result.read_text()) if result.exists() else {}, status)

    def _process(self, folder: Path) -> str | None:
        """Run the process, and return what went wrong with it as a whole."""
        with (folder / "log").open("w+") as log:
            process = subprocess.Popen(
                self._command(folder / "result.json"),
                cwd=harness.ROOT,
                env=self._environment(folder),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the compiler has processes of its own, which must go with it
            )
            try:
                code = process.wait(self.options.timeout_s)
            except subprocess.TimeoutExpired:
                return f"timed out after {self.options.timeout_s:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if code == 0:
                return None
            log.seek(0)
            text = log.read()
        print(text[-2000:], file=sys.stderr, flush=True)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        last = lines[-1].replace(str(folder), "").replace(str(harness.ROOT) + os.sep, "") if lines else ""
        return f"process ended with {code}: {last}"[:300]

    def _command(self, result: Path) -> list[str]:
        options = self.options
        command = [sys.executable, "-m", "benchmarks.cold", "--child", self.name, "--models", self.model]
        command += ["--device", str(options.device), "--shapes", str(options.shapes), "--json", str(result)]
        command += ["--blocks-dynamic", options.blocks_dynamic, *(["--tiny"] if options.tiny else [])]
        left = options.left_s()
        return command if left is None else [*command, "--time-box", str(left)]

    def _environment(self, folder: Path) -> Mapping[str, str]:
        environment = dict(os.environ)
        environment.pop("BCG_COMPILE_CACHE", None)
        for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            (folder / variable).mkdir()
            environment[variable] = str(folder / variable)
        if self.compile_cache is not None:
            environment["BCG_COMPILE_CACHE"] = str(self.compile_cache)
        return environment

    def rows(self, result: Mapping[str, Any], status: str | None) -> list[dict[str, Any]]:
        """Return a row for every shape: what the process wrote, or why it did not."""
        written = {row["position"]: row for row in result.get("rows", ())}
        failed = any(row["status"].startswith("error") for row in written.values())
        missing = status or ("skipped: an earlier shape failed" if failed else "skipped: time box")
        facts = result.get("summary", {})
        rows = []
        for position, shape in enumerate(shapes(self.model, self.options.tiny)[: self.options.shapes], 1):
            row = {"model": self.model, "arm": self.name, "position": position, "shape": shape.name, **facts}
            if WAYS[self.name].arm == "bcg_blocks":
                row["compile_dynamic"] = self.options.blocks_dynamic
            row |= written.get(position, {"status": missing})
            if status is not None and row["status"] == "not compared with eager":
                row["status"] = f"not compared with eager: {status}"
            rows.append(row)
        return rows


def measure(model: str, name: str, options: Options) -> Iterator[list[dict[str, Any]]]:
    """Measure one arm of a model, and the process that has to run before it."""
    child = Child(model, name, options)
    if WAYS[name].cache is None:
        yield child.run()
        return
    with tempfile.TemporaryDirectory(prefix="bcg-cold-cache-", ignore_cleanup_errors=True) as cache:
        filling = replace(child, name="bcg_blocks_fill", compile_cache=Path(cache)).run()
        yield filling
        cached = replace(child, compile_cache=Path(cache))
        if is_good(filling):
            yield cached.run()
        else:
            yield cached.rows({}, "skipped: the cache was not filled")


def is_good(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether every shape of an arm was measured and compared."""
    return bool(rows) and all(row["status"] == "ok" for row in rows)


class Results:
    """Keep the rows of every model and arm, those of an earlier run among them.

    Args:
        report: Whose rows to keep up to date.
        path: Where to write after every change.
    """

    def __init__(self, report: Report, path: Path | None) -> None:
        self._report = report
        self._path = path
        self._rows: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def has(self, model: str, name: str, options: Options) -> bool:
        """Return whether an earlier run has what this one would measure."""
        rows = self._rows.get((model, name), [])
        wanted = [shape.name for shape in shapes(model, options.tiny)[: options.shapes]]
        dynamic = {row.get("compile_dynamic", options.blocks_dynamic) for row in rows}
        return is_good(rows) and [row["shape"] for row in rows] == wanted and dynamic == {options.blocks_dynamic}

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take the rows of one arm in place of those it had, and write everything."""
        self._rows[rows[0]["model"], rows[0]["arm"]] = list(rows)
        places = sorted(self._rows, key=lambda key: (list(MODELS).index(key[0]), list(WAYS).index(key[1])))
        self._report.rows = [row for place in places for row in self._rows[place]]
        add_ratios(self._report.rows)
        self._report.write(self._path)

    def add_earlier(self, path: Path) -> None:
        """Take over what ran well in an earlier run on the same kind of machine.

        Raises:
            ValueError: The machine or its versions differ.
        """
        earlier = json.loads(path.read_text())
        for fact in ("device", "torch", "cuda", "diffusers", "commit"):
            ours, theirs = self._report.machine.get(fact), earlier["machine"].get(fact)
            if ours != theirs:
                raise ValueError(f"the earlier run has {fact} {theirs}, this one {ours}: they do not compare")
        by_arm: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in earlier["rows"]:
            by_arm.setdefault((row["model"], row["arm"]), []).append(row)
        for rows in by_arm.values():
            if is_good(rows):
                self.add(rows)
        names = ", ".join(f"{model} {arm}" for model, arm in self._rows)
        self._report.notes.append(f"Of an earlier run, {earlier['command']}: {names or 'nothing'}.")


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Add to every row its ratios to the two reduce-overhead arms at the same position."""
    ready = {(row["model"], row["position"], row["arm"]): row.get("ready_s") for row in rows}
    for row in rows:
        for peer in PEERS:
            other, own = ready.get((row["model"], row["position"], peer)), row.get("ready_s")
            if own is not None and other is not None:
                row[f"over_{peer}"] = own / other


COLUMNS: Final = (
    Column("model", get("model"), text=True),
    Column("arm", get("arm"), text=True),
    Column("position", get("position")),
    Column("shape", get("shape"), text=True),
    Column("first s", get("first_call_s"), "{:.2f}"),
    Column("ready s", get("ready_s"), "{:.2f}"),
    Column("slow calls", get("slow_calls")),
    Column("compiled", get("compiled_graphs")),
    Column("steady ms", get("steady_ms"), "{:.2f}"),
    Column("/ reduce_overhead", get("over_reduce_overhead"), "{:.3f}"),
    Column("/ static", get("over_reduce_overhead_static"), "{:.3f}"),
    Column("verified", verified, text=True),
    Column("status", get("status"), text=True),
)


def _parser() -> Any:
    parser = harness.parser("Time the cold start of each shape in fresh processes.")
    parser.add_argument("--models", type=harness.choice_list(*MODELS), default=["sd35", "flux"], help="which models")
    parser.add_argument("--arms", type=harness.choice_list(*CHOICES), default=list(CHOICES), help="which arms")
    parser.add_argument(
        "--shapes", type=int, choices=range(1, POSITIONS + 1), default=POSITIONS, help="how many shapes of each model"
    )
    parser.add_argument(
        "--blocks-dynamic", choices=tuple(DYNAMIC), default="auto", help="compile_dynamic of bcg's blocks"
    )
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="end a process after this")
    parser.add_argument(
        "--earlier", type=Path, metavar="FILE", help="take over what ran well in this result, measure the rest"
    )
    parser.add_argument("--child", choices=tuple(WAYS), help="measure this arm in this process, for the parent")
    return parser


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark from its command line, and return what was measured."""
    arguments = sys.argv[1:] if arguments is None else arguments
    asked = _parser().parse_args(arguments)
    if asked.child is not None:
        return child(asked)
    options = Options(
        device=torch.device(asked.device),
        tiny=asked.tiny,
        shapes=asked.shapes,
        blocks_dynamic=asked.blocks_dynamic,
        timeout_s=asked.timeout,
        deadline=Deadline(asked.time_box),
        time_box_s=asked.time_box,
        begin=time.monotonic(),
    )
    report = Report("Cold start", harness.machine(options.device), harness.command_line("cold", arguments))
    harness.collect(options.device)  # the children need the memory
    results = Results(report, asked.json)
    try:
        if asked.earlier is not None:
            results.add_earlier(asked.earlier)
        for model in asked.models:
            for name in asked.arms:
                if results.has(model, name, options) or not options.runs(name):
                    continue
                begin = time.monotonic()
                for rows in measure(model, name, options):
                    results.add(rows)
                print(f"{model} {name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    finally:
        report.write(asked.json)
        report.show(COLUMNS)
    return report


if __name__ == "__main__":
    main()
