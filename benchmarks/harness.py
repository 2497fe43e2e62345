"""What every benchmark shares: machine facts, interleaved timing, comparison with eager, memory, JSON, tables.

Timings are taken so that arms can be compared inside one run: the arms take turns, each turn is a burst of calls, and
every round has another order, so that clock changes and the heat and caches left by a neighbour fall on all of them
alike. (A rotation would not do: an arm would always follow the same one, and after an eager arm, in which the GPU
waits, the clocks of a power-bound card stand higher.) Reported are medians and interquartile ranges.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._pytree import tree_leaves, tree_map

ROOT: Final = Path(__file__).resolve().parent.parent
MIB: Final = 2**20
MATRIX_SIZE: Final = 8192
LEAST_ROUNDS: Final = 5
MOST_ROUNDS: Final = 30
TURN_MS: Final = 300


class Deadline:
    """Tell when a time box is used up.

    Args:
        seconds: Length of the box, from now; None for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Return whether the box is used up."""
        return self._end is not None and time.monotonic() > self._end


# ---------------------------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Sample:
    """Hold the times of one burst of calls, in milliseconds.

    Attributes:
        step_ms: One call among others, back to back, as in a denoising loop.
        lone_ms: The first call, from an idle device to its last kernel.
        host_ms: The first call, until it returns to Python.
    """

    step_ms: float
    lone_ms: float
    host_ms: float


@dataclass(frozen=True)
class Spread:
    """Hold the median and the quartiles of a number of measurements."""

    median: float
    q1: float
    q3: float
    n: int

    @property
    def iqr(self) -> float:
        """Return the interquartile range."""
        return self.q3 - self.q1

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise ``values``, of which there must be one at least."""
        numbers = torch.tensor(values, dtype=torch.float64)
        q1, median, q3 = torch.quantile(numbers, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        return cls(median, q1, q3, len(values))


class Clock(Protocol):
    """Time calls on one kind of device."""

    def synchronize(self) -> None:
        """Wait for the device."""
        ...

    def burst(self, call: Callable[[], Any], calls: int) -> Sample:
        """Time ``calls`` calls back to back from an idle device; two at least."""
        ...


class HostClock:
    """Time calls of a CPU model: every call has ended when it returns."""

    def synchronize(self) -> None:
        """Do nothing: there is no device to wait for."""

    def burst(self, call: Callable[[], Any], calls: int) -> Sample:
        """Time ``calls`` calls with the host's clock."""
        begin = time.perf_counter()
        call()
        middle = time.perf_counter()
        for _ in range(calls - 1):
            call()
        end = time.perf_counter()
        lone_ms = 1e3 * (middle - begin)
        return Sample(1e3 * (end - middle) / (calls - 1), lone_ms, lone_ms)


class CudaClock:
    """Time calls of a CUDA model with events, and the host's part with the host's clock."""

    def synchronize(self) -> None:
        """Wait for the device; an error of an earlier kernel is raised here."""
        torch.cuda.synchronize()

    def burst(self, call: Callable[[], Any], calls: int) -> Sample:
        """Time ``calls`` calls with events before, after the first and after the last."""
        begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        self.synchronize()
        begin.record()
        start = time.perf_counter()
        call()
        host_ms = 1e3 * (time.perf_counter() - start)
        middle.record()
        for _ in range(calls - 1):
            call()
        end.record()
        self.synchronize()
        step_ms = middle.elapsed_time(end) / (calls - 1)
        return Sample(step_ms, begin.elapsed_time(middle), host_ms)


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Timings:
    """Hold the samples of one arm."""

    samples: tuple[Sample, ...]

    def spread(self, what: str) -> Spread:
        """Summarise ``step_ms``, ``lone_ms`` or ``host_ms``."""
        return Spread.of([getattr(sample, what) for sample in self.samples])

    def as_json(self) -> dict[str, Any]:
        """Return the three summaries as plain data."""
        spreads = {what: self.spread(what) for what in ("step_ms", "lone_ms", "host_ms")}
        return {what: {**asdict(spread), "iqr": spread.iqr} for what, spread in spreads.items()}


@dataclass(frozen=True)
class Turn:
    """Hold what is timed in an arm's turn, and the context that it needs, whose entry and exit are not timed."""

    call: Callable[[], Any]
    context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def take(self, clock: Clock, calls: int) -> Sample:
        """Time one burst, after a call that is not timed.

        That call takes what the change of arms costs: entering the context can change module state, which bcg then
        looks through again once.
        """
        with self.context():
            self.call()
            return clock.burst(self.call, calls)


def interleave(
    arms: Mapping[str, Turn], clock: Clock, *, budget_s: float, calls: int | None = None
) -> dict[str, Timings]:
    """Time several arms in turns.

    Args:
        arms: Name to turn.
        clock: How to time.
        budget_s: About how long to go on; at least `LEAST_ROUNDS` and at most `MOST_ROUNDS` turns are taken.
        calls: Calls of one turn, two at least; by default as many as make a turn of about `TURN_MS`, four at least.

    Returns:
        Name to timings, all with the same number of samples.
    """
    names = list(arms)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    # One turn that does not count: clocks rise, allocators and caches settle.
    step_ms = min(arms[name].take(clock, 2).step_ms for name in names)
    calls = calls or max(4, min(round(TURN_MS / max(step_ms, 1e-3)), 20))
    order = random.Random(0)
    begin = time.monotonic()
    for turn in range(MOST_ROUNDS):
        if turn >= LEAST_ROUNDS and time.monotonic() - begin > budget_s:
            break
        for name in order.sample(names, len(names)):
            samples[name].append(arms[name].take(clock, calls))
    return {name: Timings(tuple(taken)) for name, taken in samples.items()}


# ------------------------------------------------------------------------------------------------------ comparison


@dataclass(frozen=True)
class Comparison:
    """Hold how a result compares with eager's.

    Attributes:
        exact: Every tensor has the same shape, dtype and bits.
        max_rel_diff: Largest difference over the largest absolute value of the tensor; None where shapes differ or a
            value is not finite.
    """

    exact: bool
    max_rel_diff: float | None

    def __and__(self, other: Comparison) -> Comparison:
        """Return the worse of two comparisons."""
        diffs = (self.max_rel_diff, other.max_rel_diff)
        worst = None if None in diffs else max(diff for diff in diffs if diff is not None)
        return Comparison(self.exact and other.exact, worst)


SAME: Final = Comparison(True, 0.0)


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a result, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def keep(tree: Any) -> Any:
    """Clone the tensors of a result that a later call may overwrite."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def compare(got: Any, want: Any) -> Comparison:
    """Compare two results tensor by tensor."""
    ours, theirs = tensors(got), tensors(want)
    if len(ours) != len(theirs):
        return Comparison(False, None)
    result = SAME
    for mine, reference in zip(ours, theirs, strict=True):
        result = result & _compare(mine, reference)
    return result


def _compare(got: torch.Tensor, want: torch.Tensor) -> Comparison:
    if got.shape != want.shape or got.dtype != want.dtype:
        return Comparison(False, None)
    exact = torch.equal(_bits(got), _bits(want))
    if not bool(want.isfinite().all()) or not bool(got.isfinite().all()):
        return Comparison(exact, None)
    difference = (got.float() - want.float()).abs().max().item()
    return Comparison(exact, difference / max(want.float().abs().max().item(), torch.finfo(torch.float32).tiny))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes: the sign of a zero counts, and a NaN equals itself."""
    return tensor.contiguous().view(-1).view(torch.uint8)


# ---------------------------------------------------------------------------------------------------------- memory


def collect(device: torch.device) -> None:
    """Free what nothing refers to, and give cached blocks back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Memory:
    """Hold the bytes in use on a device, after `collect`; zeros on CPU.

    Attributes:
        reserved: Bytes that torch's allocator holds.
        used: Bytes of the whole device that are not free, whoever holds them.
    """

    reserved: int
    used: int

    @property
    def outside(self) -> int:
        """Return the bytes outside torch's allocator: context, modules, CUDA graphs."""
        return self.used - self.reserved

    def __sub__(self, other: Memory) -> Memory:
        """Return the growth since ``other``."""
        return Memory(self.reserved - other.reserved, self.used - other.used)

    @classmethod
    def now(cls, device: torch.device) -> Memory:
        """Collect, then read."""
        collect(device)
        if device.type != "cuda":
            return cls(0, 0)
        free, total = torch.cuda.mem_get_info(device)
        return cls(torch.cuda.memory_reserved(device), total - free)


# ----------------------------------------------------------------------------------------------------------- facts


def version(package: str) -> str | None:
    """Return the installed version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _commit() -> str | None:
    """Return the commit measured, marked where the working tree differs; BENCHMARK_COMMIT names that of a copy."""
    named = os.environ.get("BENCHMARK_COMMIT")
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    if named is not None or commit is None:
        return named
    return commit + ("+changes" if _output("git", "status", "--porcelain", "--", "bcg", "benchmarks") else "")


def matrix_tflops(device: torch.device) -> float | None:
    """Measure the card's bf16 matrix rate on random data, TFLOP/s; None on CPU."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    samples = [CudaClock().burst(lambda: a @ b, 6).step_ms for _ in range(4)]
    return 2 * MATRIX_SIZE**3 / (1e9 * Spread.of(samples[1:]).median)


def machine(device: torch.device) -> dict[str, Any]:
    """Return what the numbers were measured on, as plain data."""
    facts: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "diffusers": version("diffusers"),
        "bcg": version("bcg"),
        "commit": _commit(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        facts |= {
            "device": properties.name,
            "device_memory_mib": properties.total_memory // MIB,
            "driver": driver,
            "matrix_bf16_tflops": matrix_tflops(device),
        }
    return facts


# ---------------------------------------------------------------------------------------------------------- report


@dataclass
class Report:
    """Collect rows, and write them with the conditions under which they were measured.

    Args:
        title: Name of the benchmark.
        machine: What `machine` returned.
        command: The command line, without the place of the result file.
    """

    title: str
    machine: dict[str, Any]
    command: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path | None) -> None:
        """Write everything as JSON, whole or not at all; nothing where ``path`` is None."""
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(path.suffix + ".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        partial.replace(path)

    def show(self, columns: Sequence[Column], console: Console | None = None) -> None:
        """Print conditions, table and notes."""
        console = console or Console(width=None if sys.stdout.isatty() else 200)
        facts = ", ".join(f"{key} {_plain(value)}" for key, value in self.machine.items() if value is not None)
        table = Table(title=self.title, caption=f"{facts}\n{self.command}", caption_justify="left")
        for column in columns:
            table.add_column(column.head, justify="left" if column.text else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*[column.cell(row) for column in columns])
        console.print(table)
        for note in self.notes:
            console.print(note, markup=False)


@dataclass(frozen=True)
class Column:
    """Describe one column of a table: head, how to read the value of a row, and how to print it."""

    head: str
    read: Callable[[dict[str, Any]], Any]
    form: str = "{}"
    text: bool = False

    def cell(self, row: dict[str, Any]) -> str:
        """Return the text of one cell, empty where the row has no value."""
        value = self.read(row)
        return "" if value is None else self.form.format(value).replace("[", "\\[")


def get(*path: str) -> Callable[[dict[str, Any]], Any]:
    """Return a reader of a nested value of a row, which gives None where there is none."""

    def read(row: dict[str, Any]) -> Any:
        value: Any = row
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    return read


def mib(*path: str) -> Callable[[dict[str, Any]], float | None]:
    """Return a reader of a nested number of bytes, in MiB."""
    read_bytes = get(*path)

    def read(row: dict[str, Any]) -> float | None:
        value = read_bytes(row)
        return None if value is None else value / MIB

    return read


def verified(row: dict[str, Any]) -> str | None:
    """Say how a row compares with eager: exact, or by how much it differs."""
    if "verified" not in row:
        return None
    if row["verified"]:
        return "exact"
    return "not comparable" if row["max_rel_diff"] is None else f"{row['max_rel_diff']:.1e}"


def _plain(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def command_line(module: str, arguments: Iterable[str]) -> str:
    """Return the command that was run; where its results went is no part of it."""
    kept = without(arguments, "--json")
    return shlex.join(["python", "-m", f"benchmarks.{module}", *kept])


def without(arguments: Iterable[str], *options: str) -> list[str]:
    """Return a command line without some options and their values."""
    kept: list[str] = []
    is_value = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if not is_value and name not in options:
            kept.append(argument)
        is_value = not is_value and name in options and not equals
    return kept


# ---------------------------------------------------------------------------------------------------------- script


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to measure")
    result.add_argument("--tiny", action="store_true", help="tiny models: a test of the benchmark itself")
    result.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    result.add_argument("--time-box", type=float, metavar="SECONDS", help="begin nothing new after so many seconds")
    result.add_argument("--budget", type=float, default=6.0, metavar="SECONDS", help="timing of one shape, about")
    return result


def names_in(text: str) -> list[str]:
    """Return the names in a text that separates them by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def choice_list(*choices: str) -> Callable[[str], list[str]]:
    """Return an argparse type for names separated by commas."""

    def parse(text: str) -> list[str]:
        names = names_in(text)
        unknown = [name for name in names if name not in choices]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(choices)}, separated by commas")
        return names

    return parse


def quiet_diffusers() -> None:
    """Keep diffusers' warnings (a step outside a pipeline earns some) out of the table."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return an error as one line of text, with paths of this machine taken out."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text.replace(str(ROOT) + os.sep, "")[:limit]
