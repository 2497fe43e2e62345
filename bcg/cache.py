"""Captured entries and rejected signatures, both bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from bcg.entry import Entry, EntryKey
from bcg.module_state import describe_difference, moving_parts
from bcg.signature import Signature


class VariantKey(NamedTuple):
    """Names one entry.

    Attributes:
        key: Signature and module state.
        variant: Number of the variant, which differs from others in guard values.
    """

    key: EntryKey
    variant: int


class Rejection(NamedTuple):
    """Why a signature is not captured.

    Attributes:
        reason: Text for a person.
        moving: What of the module's state is another with every forward.
    """

    reason: str
    moving: frozenset[str]


class EntryCache:
    """Keep entries, the least recently used signature going first.

    Args:
        max_entries: Signatures kept.
        max_bytes: Device bytes of all entries together; None for no limit.
        max_rejections: Rejected signatures remembered.
        on_evict: Called with each entry that makes room, before its memory is given back.
        shared_bytes: Returns the device bytes that entries share, which an eviction may not give back.
    """

    def __init__(
        self,
        max_entries: int,
        max_bytes: int | None,
        max_rejections: int,
        on_evict: Callable[[Entry], None],
        shared_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_rejections = max_rejections
        self._on_evict = on_evict
        self._shared_bytes = shared_bytes
        self._lock = threading.Lock()  # for readers that do not wait until a capture is over
        self._variants: OrderedDict[EntryKey, list[Entry]] = OrderedDict()
        # A plain dict: its values are listed in one go, while another thread rejects.
        self._rejections: dict[EntryKey, Rejection] = {}

    def find(self, key: EntryKey) -> list[Entry]:
        """Return the variants of a signature, the last used first, and refresh it."""
        with self._lock:
            variants = self._variants.get(key)
            if variants is None:
                return []
            self._variants.move_to_end(key)
            return variants

    def peek(self, key: EntryKey) -> list[Entry]:
        """Return the variants of a signature without refreshing it."""
        return self._variants.get(key, [])

    def prefer(self, entry: Entry) -> None:
        """Try an entry first among its variants from now on."""
        variants = self._variants[entry.key]
        if variants[0] is not entry:
            variants.remove(entry)
            variants.insert(0, entry)

    def add(self, entry: Entry) -> None:
        """Keep an entry; evict the least recently used ones beyond the bounds."""
        self._rejections.pop(entry.key, None)
        with self._lock:
            self._variants.setdefault(entry.key, []).insert(0, entry)
            self._variants.move_to_end(entry.key)
        while len(self._variants) > 1 and (len(self._variants) > self._max_entries or self.is_over_bytes()):
            oldest = next(iter(self._variants))
            for gone in self._variants[oldest]:
                self._on_evict(gone)
            self.drop(oldest)

    def is_over_bytes(self) -> bool:
        """Tell whether more bytes are held than the limit allows."""
        return self._max_bytes is not None and self.bytes() > self._max_bytes

    def drop(self, key: EntryKey) -> None:
        """Give back all variants of a signature."""
        with self._lock:
            variants = self._variants.pop(key, [])
        for entry in variants:
            entry.reset()

    def drop_stale(self, key: EntryKey) -> None:
        """Give back the variants of a signature where one of them cannot be replayed any more."""
        if any(entry.graph.is_stale for entry in self.peek(key)):
            self.drop(key)

    def drop_entries(self) -> None:
        """Give everything back."""
        for key in list(self._variants):
            self.drop(key)

    def drop_all(self) -> None:
        """Give everything back, and forget the rejections."""
        self.drop_entries()
        self._rejections.clear()

    def reject(self, key: EntryKey, reason: str, moving: frozenset[str] = frozenset()) -> None:
        """Remember why a signature is not captured.

        Args:
            key: Signature and module state.
            reason: Why not.
            moving: What of the state is another with every forward: a state that differs in this alone is rejected too.
        """
        self._rejections.pop(key, None)
        self._rejections[key] = Rejection(reason, moving)
        while len(self._rejections) > self._max_rejections:
            del self._rejections[next(iter(self._rejections))]

    def rejection(self, key: EntryKey) -> str | None:
        """Return why a signature was rejected, or None."""
        exact = self._rejections.get(key)
        if exact is not None:
            return exact.reason
        for known, rejection in list(self._rejections.items()):
            if rejection.moving and known.signature == key.signature:
                parts = moving_parts(describe_difference(known.state, key.state))
                if parts <= rejection.moving:
                    return rejection.reason
        return None

    def rejections(self) -> dict[Signature, str]:
        """Return all remembered reasons by signature."""
        return {key.signature: rejection.reason for key, rejection in list(self._rejections.items())}

    def bytes(self) -> int:
        """Return the device bytes that are held for all entries together, shared ones counted once."""
        return sum(entry.own_bytes for entry in self.entries()) + self._shared_bytes()

    def __len__(self) -> int:
        return len(self._variants)

    def entries(self) -> Iterator[Entry]:
        """Yield all entries as they are now, the least recently used signature first."""
        with self._lock:
            present = [entry for variants in self._variants.values() for entry in variants]
        yield from present


class EntriesView(Mapping[VariantKey, Entry]):
    """The entries of a runner, read only, the least recently used first."""

    def __init__(self, entries: list[Entry]) -> None:
        numbers: dict[EntryKey, int] = {}
        self._entries: dict[VariantKey, Entry] = {}
        for entry in entries:
            number = numbers[entry.key] = numbers.get(entry.key, -1) + 1
            self._entries[VariantKey(entry.key, number)] = entry

    def __getitem__(self, key: VariantKey) -> Entry:
        return self._entries[key]

    def __iter__(self) -> Iterator[VariantKey]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"EntriesView({list(self._entries.values())!r})"
