"""Count the device memory that captured entries hold: what is theirs alone, and what they share.

Entries of one runner share static inputs (the arena), and entries of one pool share scratch memory, so the sum over
entries of what each one reads is far more than what is held. Here shared memory is counted once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from bcg import _torch
from bcg.backends import Backend, Pool
from bcg.static_inputs import StaticArena

if TYPE_CHECKING:
    from bcg.entry import Entry

_KIB: Final = 1024
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, kw_only=True)
class EntryMemory:
    """Say what one entry holds, in bytes.

    Attributes:
        signature: The signature's tensors on one line.
        static_bytes: Static inputs of its own: integers and masks.
        shared_static_bytes: Static inputs in memory that other entries of the runner use too.
        hoist_bytes: Device tensors made from host data.
        break_bytes: Results of eager breaks, which the next segment reads.
        outside_bytes: Memory outside torch's allocator by which its capture made the device fuller; an estimate, since
            other processes and threads on the device are in it.
        pool_bytes: Bytes by which its capture made the pool grow; 0 where earlier captures had made room enough.
    """

    signature: str
    static_bytes: int
    shared_static_bytes: int
    hoist_bytes: int
    break_bytes: int
    outside_bytes: int
    pool_bytes: int

    @property
    def own_bytes(self) -> int:
        """Bytes that are free again as soon as the entry is evicted."""
        return self.static_bytes + self.hoist_bytes + self.break_bytes + self.outside_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Say what a runner's entries hold, each and together, in bytes.

    Attributes:
        entries: What each entry holds, the least recently used first.
        shared_static_bytes: Memory of the static inputs that entries share, counted once.
        pool_bytes: Scratch memory of the pool, counted once; replays of every runner that uses the pool work in it.
        pool_runners: Number of runners that use the pool.
        abandoned_bytes: An upper bound of what `BreakableCudaGraphRunner.compact` gives back: the share of the pool and
            of the static inputs that no present entry asked for.

    Example:
        >>> import bcg
        >>> runner = bcg.wrap(torch.nn.Linear(4, 2).requires_grad_(False))
        >>> for rows in (8, 2):
        ...     assert runner.capture(torch.ones(rows, 4))
        >>> print(runner.memory())  # the inputs of both lie in the memory of the larger one
        static own  shared  hoists  breaks  outside  pool grew by  signature
               0 B   128 B     0 B     0 B      0 B           0 B  input float32[8,4]
               0 B    32 B     0 B     0 B      0 B           0 B  input float32[2,4]
        2 entries hold 128 B: 0 B of their own, 128 B of shared static inputs, 0 B of pool (1 runner)
        >>> runner.memory().total_bytes
        128
    """

    entries: tuple[EntryMemory, ...]
    shared_static_bytes: int
    pool_bytes: int
    pool_runners: int
    abandoned_bytes: int

    @property
    def static_bytes(self) -> int:
        """Bytes of all static inputs, shared ones counted once."""
        return self.shared_static_bytes + sum(entry.static_bytes for entry in self.entries)

    @property
    def hoist_bytes(self) -> int:
        """Bytes of all device tensors made from host data."""
        return sum(entry.hoist_bytes for entry in self.entries)

    @property
    def break_bytes(self) -> int:
        """Bytes of all results of eager breaks."""
        return sum(entry.break_bytes for entry in self.entries)

    @property
    def outside_bytes(self) -> int:
        """Bytes outside torch's allocator, which ``torch.cuda.memory_reserved`` does not show."""
        return sum(entry.outside_bytes for entry in self.entries)

    @property
    def total_bytes(self) -> int:
        """Bytes of everything together."""
        own = sum(entry.own_bytes for entry in self.entries)
        return own + self.shared_static_bytes + self.pool_bytes

    def __str__(self) -> str:
        return "\n".join([*_table(self.entries), self._summary()])

    def _summary(self) -> str:
        own = sum(entry.own_bytes for entry in self.entries)
        text = (
            f"{_counted(len(self.entries), 'entry', 'entries')} hold {bytes_text(self.total_bytes)}: "
            f"{bytes_text(own)} of their own, {bytes_text(self.shared_static_bytes)} of shared static inputs, "
            f"{bytes_text(self.pool_bytes)} of pool ({_counted(self.pool_runners, 'runner', 'runners')})"
        )
        return text if not self.abandoned_bytes else f"{text}; compact() may free {bytes_text(self.abandoned_bytes)}"


class Charge:
    """What one capture added to shared memory.

    Attributes:
        pool_bytes: Bytes by which the pool grew.
        arena_bytes: Bytes allocated for shared static inputs.
    """

    def __init__(self) -> None:
        self.pool_bytes = 0
        self.arena_bytes = 0


class Ledger:
    """Keep account of the shared memory that one runner's captures asked for.

    Args:
        pool: Scratch memory, perhaps of other runners too.
        arena: Memory of the runner's shared static inputs.
    """

    def __init__(self, pool: Pool, arena: StaticArena) -> None:
        self._pool = pool
        self._arena = arena
        self._grown_bytes = 0

    @contextlib.contextmanager
    def charging(self) -> Iterator[Charge]:
        """Charge what a block adds, whether it succeeds or not: a failed capture leaves its blocks in the pool."""
        charge = Charge()
        pool_before, arena_before = self._pool.bytes(), self._arena.allocated_bytes
        if pool_before == 0:
            self._grown_bytes = 0  # the last graph of the pool is gone, and the pool with it
        try:
            yield charge
        finally:
            charge.pool_bytes = max(0, self._pool.bytes() - pool_before)
            charge.arena_bytes = self._arena.allocated_bytes - arena_before
            self._grown_bytes += charge.pool_bytes

    def shared_bytes(self, entries: Iterable[Entry]) -> int:
        """Return the bytes of shared memory that are held on account of this runner, each counted once.

        Of a pool that several runners use this is the part that this runner's captures asked for.
        """
        return self._pool_share() + self.arena_bytes(entries)

    def arena_bytes(self, entries: Iterable[Entry]) -> int:
        """Return the bytes of shared static inputs, those of entries from before the arena grew included."""
        storages = {_torch.storage_key(memory): memory.nbytes for memory in self._arena.memories()}
        for entry in entries:
            for tensor in entry.inputs.shared():
                storages[_torch.storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return sum(storages.values())

    def abandoned_bytes(self, entries: Sequence[Entry]) -> int:
        """Return how much of the shared memory no present entry asked for: what a fresh pool and arena may save."""
        pool = self._pool_share() - sum(entry.pool_bytes for entry in entries)
        return max(0, pool) + max(0, self.arena_bytes(entries) - _needed_arena_bytes(entries))

    def _pool_share(self) -> int:
        return min(self._pool.bytes(), self._grown_bytes)

    def report(self, entries: Sequence[Entry]) -> MemoryReport:
        """Return what entries of the runner hold."""
        return MemoryReport(
            entries=tuple(map(_entry_memory, entries)),
            shared_static_bytes=self.arena_bytes(entries),
            pool_bytes=self._pool.bytes(),
            pool_runners=len(self._pool.users),
            abandoned_bytes=self.abandoned_bytes(entries),
        )


class OutsideMeter:
    """Measure by how much device memory outside torch's allocator grows, from when the meter is made.

    A CUDA graph takes about 10 KB of it for each kernel node, and ``torch.cuda.memory_*`` does not see them.

    Args:
        backend: The backend that captures.
        device: The device.
    """

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self._backend = backend
        self._device = device
        self._before = self._outside()

    def _outside(self) -> int:
        # All that is not free, less what torch holds: the total cancels out in a difference.
        return -self._backend.free_bytes(self._device) - self._backend.reserved_bytes(self._device)

    def grown_bytes(self) -> int:
        """Return the growth; 0 where others on the device gave back more than was taken."""
        return max(0, self._outside() - self._before)


def bytes_text(size_bytes: int) -> str:
    """Return a size for a person.

    Args:
        size_bytes: The size.

    Returns:
        Such as ``12.3 MiB``.

    Example:
        >>> bytes_text(1536), bytes_text(7)
        ('1.5 KiB', '7 B')
    """
    size = float(size_bytes)
    for unit in _UNITS:
        if size < _KIB or unit == _UNITS[-1]:
            break
        size /= _KIB
    return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def _entry_memory(entry: Entry) -> EntryMemory:
    return EntryMemory(
        signature=entry.signature.summary(),
        static_bytes=entry.inputs.owned_bytes(),
        shared_static_bytes=sum(tensor.nbytes for tensor in entry.inputs.shared()),
        hoist_bytes=entry.hoist_bytes,
        break_bytes=entry.break_bytes,
        outside_bytes=entry.outside_bytes,
        pool_bytes=entry.pool_bytes,
    )


def _needed_arena_bytes(entries: Iterable[Entry]) -> int:
    """Return the arena's bytes where the largest input of each slot is made first."""
    needed: dict[int, int] = {}
    for entry in entries:
        for slot, size_bytes in entry.inputs.shared_extents().items():
            needed[slot] = max(needed.get(slot, 0), size_bytes)
    return sum(needed.values())


def _table(entries: Sequence[EntryMemory]) -> list[str]:
    columns = ("static own", "shared", "hoists", "breaks", "outside", "pool grew by")
    rows = [tuple(map(bytes_text, _cells(entry))) for entry in entries]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    names = ["signature", *(entry.signature for entry in entries)]
    return [_line(cells, widths, name) for cells, name in zip([columns, *rows], names, strict=True)]


def _cells(entry: EntryMemory) -> tuple[int, ...]:
    return (
        entry.static_bytes, entry.shared_static_bytes, entry.hoist_bytes, entry.break_bytes, entry.outside_bytes,
        entry.pool_bytes,
    )  # fmt: skip


def _line(cells: Sequence[str], widths: Sequence[int], name: str) -> str:
    return "  ".join([*(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)), name])


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
