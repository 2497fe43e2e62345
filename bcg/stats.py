"""Counters of a runner."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class RunnerStats:
    """Count what a runner did since it was made.

    Every call is exactly one of a replay, an eager call or a capture call, so
    ``calls == replays + eager_calls + capture_calls`` where no call raised.

    Attributes:
        calls: Calls of the runner.
        replays: Calls that a captured graph served.
        eager_calls: Calls that the module ran eagerly.
        capture_calls: Calls in a warmup window that captured, and were then served.
        captures: Entries captured.
        rejections: Captures that did not lead to an entry.
        evictions: Entries that made room for others.
        guard_misses: Calls outside a window whose signature is captured, but with other values in its guards.
        misses: Calls whose signature is not captured.
        refusals: Calls that no graph may serve (an argument that cannot be keyed, offload hooks, gradients).
        replay_failures: Replays that raised and were served eagerly.
    """

    calls: int = 0
    replays: int = 0
    eager_calls: int = 0
    capture_calls: int = 0
    captures: int = 0
    rejections: int = 0
    evictions: int = 0
    guard_misses: int = 0
    misses: int = 0
    refusals: int = 0
    replay_failures: int = 0


class Counters:
    """Mutable counters behind `RunnerStats`, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = {field.name: 0 for field in fields(RunnerStats)}

    def add(self, name: str) -> None:
        """Count one."""
        with self._lock:
            self._stats[name] += 1

    def snapshot(self) -> RunnerStats:
        """Return the counters as they are now."""
        return replace(RunnerStats(), **self._stats)
