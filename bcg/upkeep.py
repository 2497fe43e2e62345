"""Look after a runner's captured entries as a whole: capture them again, give memory back, say what is held."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from bcg.backends import Pool
from bcg.cache import EntryCache
from bcg.entry import Entry, EntryKey
from bcg.events import Events
from bcg.memory import Ledger, MemoryReport, bytes_text
from bcg.recapture import KnownCall, recapture_all
from bcg.signature import Call
from bcg.static_inputs import StaticArena

_MAX_RELEASED: Final = 1024
"""Known calls without a graph that are remembered."""


@dataclass(frozen=True)
class Host:
    """What the upkeep needs of its runner.

    Attributes:
        cache: The entries.
        arena: Memory of their shared static inputs.
        events: Logs.
        locked: Makes a context manager that lets one thread at a time use the module's graphs.
        key: Keys a call by its signature and the module's present state.
        refusal: Says why no graph may serve a call.
        capture: Captures a call and keeps the entry.
        max_variants: Entries of one key.
    """

    cache: EntryCache
    arena: StaticArena
    events: Events
    locked: Callable[[], AbstractContextManager[None]]
    key: Callable[[Call], EntryKey]
    refusal: Callable[[Call], str | None]
    capture: Callable[[EntryKey, Call], Entry | None]
    max_variants: int


class Upkeep:
    """Looks after the entries of one runner.

    Args:
        host: The runner's parts.
        identity: Stands for the runner among the users of a pool.
        pool: Scratch memory of the entries.
    """

    def __init__(self, host: Host, identity: Any, pool: Pool) -> None:
        self._host = host
        self._identity = identity
        self._released: list[KnownCall] = []
        self._pool = pool
        self.use(pool)

    def use(self, pool: Pool) -> None:
        """Work in another pool from now on, where no entry is left in the old one."""
        self._pool.users.discard(self._identity)
        pool.users.add(self._identity)
        self._pool = pool
        self.ledger = Ledger(pool, self._host.arena)

    def memory(self) -> MemoryReport:
        """Return what the entries hold now; does not wait for a capture in another thread."""
        return self.ledger.report(self._entries())

    def recapture(self) -> int:
        """Capture every known call that is not captured for the module's present state; return how many were."""
        known = [call for call in [*self._released, *map(KnownCall.of, self._entries())] if self._is_here(call)]
        captured = recapture_all(known, self._capture_if_new)
        self._released = [call for call in self._released if not (self._is_here(call) and self._is_settled(call))]
        text = f"recaptured {captured} of {len(known)} known calls"
        self._host.events.emit(logging.INFO, "recapture", text, captured=captured, known=len(known))
        return captured

    def release(self) -> int:
        """Drop all graphs and their memory, and remember the calls; return the bytes given back."""
        with self._host.locked():
            before = self.memory().total_bytes
            self.shelve()
            self._pool.backend.trim(self._pool.device)
            freed = max(0, before - self.memory().total_bytes)
        text = f"released {bytes_text(freed)}; {len(self._released)} calls are remembered for recapture()"
        self._host.events.emit(logging.INFO, "release", text, bytes=freed, known=len(self._released))
        return freed

    def shelve(self) -> None:
        """Drop all entries and remember their calls."""
        entries = self._entries()
        signatures = {entry.signature for entry in entries}
        kept = [call for call in self._released if call.signature not in signatures]
        self._released = [*kept, *map(KnownCall.of, entries)][-_MAX_RELEASED:]
        self._host.cache.drop_entries()
        self._host.arena.clear()

    def forget(self) -> None:
        """Forget calls that have no entry."""
        self._released.clear()

    def compact(self) -> int:
        """Capture the entries anew into a fresh pool where that gives memory back; return the bytes given back."""
        with self._host.locked():
            reason = self._against_compaction()
            if reason is not None:
                self._host.events.emit(logging.INFO, "compact", f"not compacted: {reason}", bytes=0)
                return 0
            before = self.memory().total_bytes
            self.release()
            self.recapture()
            freed = max(0, before - self.memory().total_bytes)
        self._host.events.emit(logging.INFO, "compact", f"compacted: {bytes_text(freed)} given back", bytes=freed)
        return freed

    def _against_compaction(self) -> str | None:
        entries = self._entries()
        if not self.ledger.abandoned_bytes(entries):
            return "present entries asked for all memory that is held"
        if len(self._pool.users) > 1:
            return "other runners work in the same pool: release() and recapture() all of them"
        lost = [entry for entry in entries if not self._is_reproducible(entry)]
        if lost:
            return f"{len(lost)} entries belong to another state of the module or of the process and would be lost"
        return None

    # -- known calls -----------------------------------------------------------------------------------------------

    def _entries(self) -> list[Entry]:
        return list(self._host.cache.entries())

    def _is_here(self, known: KnownCall) -> bool:
        return known.device == self._pool.device

    def _is_reproducible(self, entry: Entry) -> bool:
        with KnownCall.of(entry).scope() as call:
            return self._host.key(call) == entry.key and self._host.refusal(call) is None

    def _is_settled(self, known: KnownCall) -> bool:
        with known.scope() as call:
            key = self._host.key(call)
        return bool(self._host.cache.peek(key)) or self._host.cache.rejection(key) is not None

    def _capture_if_new(self, call: Call) -> bool:
        host = self._host
        with host.locked():
            reason = host.refusal(call)
            if reason is not None:
                host.events.emit(logging.WARNING, "refusal", f"not recaptured: {reason}", reason=reason)
                return False
            key = host.key(call)
            host.cache.drop_stale(key)
            variants = host.cache.peek(key)
            if host.cache.rejection(key) is not None or len(variants) >= host.max_variants:
                return False
            if any(_would_serve(entry, call) for entry in variants):
                return False
            return host.capture(key, call) is not None


def _would_serve(entry: Entry, call: Call) -> bool:
    if not (entry.guards or entry.breaks or entry.host_guards):
        return True
    try:
        return entry.miss(call.tensors) is None
    except Exception:
        return True  # the module's own code raises for such inputs, and would in a capture
