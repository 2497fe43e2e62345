"""Let several models be built and compiled at the same time, and timed one after another.

Compiling is work of the host, and takes most of the time of a benchmark of compiled code. Every model gets a process of
its own, which makes all first calls and then waits for its turn; a process that waits uses neither host nor device, but
memory. First calls made beside others tell nothing about cold starts, so these are not kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

POLL_S: Final = 0.1


@dataclass(frozen=True)
class Gate:
    """Let a process wait until it is its turn.

    Args:
        folder: Where the processes leave notes for each other.
        name: Name of this one.
    """

    folder: Path
    name: str

    @property
    def _ready(self) -> Path:
        return self.folder / f"{self.name}.ready"

    @property
    def _open(self) -> Path:
        return self.folder / f"{self.name}.open"

    @property
    def is_ready(self) -> bool:
        """Whether the process waits."""
        return self._ready.exists()

    def wait(self) -> None:
        """Say that all is prepared, and return when it is this process's turn."""
        self._ready.touch()
        while not self._open.exists():
            time.sleep(POLL_S)

    def open(self) -> None:
        """Let the process go on."""
        self._open.touch()


@dataclass
class _Child:
    name: str
    gate: Gate
    results: Path
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def is_preparing(self) -> bool:
        return self.process.poll() is None and not self.gate.is_ready

    def finish(self, patience_s: float) -> dict[str, Any] | str:
        """Let it take its turn, and return its report, or what it said last."""
        self.gate.open()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.stop()
            return f"stopped after {patience_s:.0f} s of timing"
        if not self.results.exists():
            return self._last_words()
        report: dict[str, Any] = json.loads(self.results.read_text())
        if self.process.returncode:  # what it wrote before is only a part
            report["notes"].append(f"{self.name}: {self._last_words()}")
        return report

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        ended = f"ended with {self.process.returncode}"
        return f"{ended}: {lines[-1][:300]}" if lines else ended

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def run_together(
    commands: Mapping[str, Sequence[str]], *, prepare_s: float, turn_s: float = 120.0
) -> dict[str, dict[str, Any] | str]:
    """Run a benchmark's processes side by side until they are prepared, then let each take its turn.

    Args:
        commands: For each process its command line; ``--gate FOLDER/NAME`` and ``--json FILE`` are added.
        prepare_s: Seconds after which a process that is not prepared is stopped.
        turn_s: Seconds that a turn may take.

    Returns:
        By name the report of each process, as it wrote it, or why there is none.
    """
    with tempfile.TemporaryDirectory(prefix="bcg-benchmark-", ignore_cleanup_errors=True) as place:
        children = [_start(name, command, Path(place)) for name, command in commands.items()]
        try:
            deadline = time.monotonic() + prepare_s
            while any(child.is_preparing for child in children) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            late = [child for child in children if child.is_preparing]
            for child in late:
                child.stop()
            taken = {child.name: child.finish(turn_s) for child in children if child not in late}
        finally:
            for child in children:
                child.stop()
        return {
            child.name: taken.get(child.name, f"not prepared after {prepare_s:.0f} s of compiling")
            for child in children
        }


def _start(name: str, command: Sequence[str], place: Path) -> _Child:
    gate, results, log = Gate(place, name), place / f"{name}.json", place / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "--gate", str(place / name), "--json", str(results)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return _Child(name, gate, results, log, process)
