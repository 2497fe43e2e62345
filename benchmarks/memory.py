"""Read the memory that twelve FLUX.1-dev resolutions take in one runner, and replay them all.

    python -m benchmarks.memory --json memory.json
    python -m benchmarks.memory --tiny                    a test of the benchmark, on a machine without a GPU

The largest resolution is captured first. Before every reading cached blocks are given back to the device, so that what
is counted is what the entries hold: ``reserved`` in torch's allocator, ``outside`` on the device but not in the
allocator (CUDA keeps the graphs themselves there). Afterwards every entry is replayed on fresh inputs in order and in
reverse order, and compared with eager bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

import bcg
from benchmarks import harness
from benchmarks.harness import MIB, Column, Deadline, Memory, Report, get, mib
from benchmarks.models import Built, Shape, build

RESOLUTIONS: Final = (
    (1024, 1024), (896, 1152), (768, 1344), (832, 1216), (960, 960), (896, 896),
    (768, 1024), (768, 768), (512, 768), (512, 512), (384, 384), (256, 256),
)  # fmt: skip
"""Height and width, largest first."""
TINY_DIVISOR: Final = 8
FORWARD_SEED: Final = 101
REVERSE_SEED: Final = 102


def shapes(tiny: bool) -> list[Shape]:
    """Return the resolutions; eight times smaller for the tiny model, in whole latent pixels."""
    if not tiny:
        return [Shape("memory", height, width) for height, width in RESOLUTIONS]
    small = {(height // TINY_DIVISOR // 16 * 16, width // TINY_DIVISOR // 16 * 16) for height, width in RESOLUTIONS}
    return [Shape("memory", *size) for size in sorted(small, key=lambda size: size[0] * size[1], reverse=True)]


@dataclass(frozen=True)
class Resolution:
    """Hold one shape and what eager gives on the two fresh inputs."""

    shape: Shape
    wants: dict[int, Any]


class MemoryRun:
    """Capture shape after shape in one runner, and read the memory after each.

    Args:
        built: The model.
    """

    def __init__(self, built: Built) -> None:
        self._built = built
        self._resolutions = [self._resolution(shape) for shape in shapes(built.tiny)]
        self._runner: Any = bcg.wrap(built.module, max_entries=len(self._resolutions))
        self.rows: list[dict[str, Any]] = []

    def _resolution(self, shape: Shape) -> Resolution:
        seeds = (FORWARD_SEED, REVERSE_SEED)
        return Resolution(shape, {seed: self._built.call(shape, seed)(self._built.module) for seed in seeds})

    def capture(self, deadline: Deadline) -> None:
        """Capture every shape, largest first; each adds a row."""
        base = Memory.now(self._built.device)
        for resolution in self._resolutions:
            if deadline.passed:
                break
            with bcg.warmup():
                self._built.call(resolution.shape)(self._runner)
            grown = Memory.now(self._built.device) - base
            row = {
                "shape": resolution.shape.name,
                "reserved_bytes": grown.reserved,
                "outside_bytes": grown.outside,
                **self._entry(),
            }
            self.rows.append(row)

    def _entry(self) -> dict[str, Any]:
        """Return what the entry captured last says of itself."""
        if not self._runner.entries:
            return {}
        entry = list(self._runner.entries.values())[-1]
        return {"segments": entry.segments, "entry_bytes": entry.bytes, "capture_s": entry.capture_s}

    def replay(self) -> None:
        """Replay everything captured in order and in reverse, and compare with eager."""
        captured = list(zip(self._resolutions, self.rows, strict=False))
        for resolution, row in captured:
            row["forward"] = self._replay_one(resolution, FORWARD_SEED)
        for resolution, row in reversed(captured):
            row["reverse"] = self._replay_one(resolution, REVERSE_SEED)
        for row in self.rows:
            row["verified"] = row["forward"] == row["reverse"] == "exact"

    def _replay_one(self, resolution: Resolution, seed: int) -> str:
        call = self._built.call(resolution.shape, seed)
        before = self._runner.stats.replays
        same = harness.compare(call(self._runner), resolution.wants[seed])
        if self._runner.stats.replays != before + 1:
            return "not replayed: " + " ".join(self._runner.explain(*call.args, **call.kwargs).split())
        return "exact" if same.exact else "differs from eager"

    def summary(self) -> dict[str, Any]:
        """Return what the first entry and all entries hold, and the growth outside the allocator per entry."""
        if not self.rows:
            return {}
        first, last, count = self.rows[0], self.rows[-1], len(self.rows)
        summary = {
            "entries": count,
            "first_reserved_mib": first["reserved_bytes"] / MIB,
            "all_reserved_mib": last["reserved_bytes"] / MIB,
            "outside_mib_per_entry": last["outside_bytes"] / MIB / count,
        }
        if first["reserved_bytes"]:
            summary["all_over_first"] = last["reserved_bytes"] / first["reserved_bytes"]
        return summary


COLUMNS: Final = (
    Column("shape", get("shape"), text=True),
    Column("segments", get("segments")),
    Column("reserved MiB", mib("reserved_bytes"), "{:.0f}"),
    Column("outside MiB", mib("outside_bytes"), "{:.0f}"),
    Column("entry MiB", mib("entry_bytes"), "{:.1f}"),
    Column("capture s", get("capture_s"), "{:.2f}"),
    Column("in order", get("forward"), text=True),
    Column("in reverse", get("reverse"), text=True),
)


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark from its command line, and return what was measured."""
    arguments = sys.argv[1:] if arguments is None else arguments
    asked = harness.parser("Read the memory of twelve FLUX resolutions in one runner.").parse_args(arguments)
    harness.quiet_diffusers()
    device = torch.device(asked.device)
    report = Report("Memory of one runner", harness.machine(device), harness.command_line("memory", arguments))
    try:
        with torch.no_grad():
            run = MemoryRun(build("flux", device, tiny=asked.tiny))
            report.rows = run.rows
            run.capture(Deadline(asked.time_box))
            run.replay()
            report.summary = run.summary()
    finally:
        report.write(asked.json)
        report.notes += [f"{name}: {value:.4g}" for name, value in report.summary.items()]
        report.show(COLUMNS)
    return report


if __name__ == "__main__":
    main()
