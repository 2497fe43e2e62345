"""What the layers above need of a device: segments, a scratch pool, and a recording that fills them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Segment(Protocol):
    """A captured run of operations between two eager breaks."""

    @property
    def is_stale(self) -> bool:
        """Whether a replay would raise, since what the segment draws random numbers from is another one now."""

    def replay(self) -> None:
        """Run the captured operations again on the same memory."""

    def reset(self) -> None:
        """Give back what the segment holds; it cannot be replayed afterwards."""


class Recording(Protocol):
    """One capture in progress, made of one segment after another.

    The order of calls is `open`, then `begin_segment` and `end_segment` in turn, then `close`. `abort` may come at any
    moment after `open` and takes the place of `end_segment`.
    """

    def open(self) -> None:
        """Prepare the process for a capture (streams, modes)."""

    def begin_segment(self) -> None:
        """Begin to record."""

    def end_segment(self) -> Segment | None:
        """Stop recording; return what was recorded, or None where that is nothing."""

    def abort(self) -> None:
        """Leave a segment whose capture failed, with the allocator, the streams and the generators working."""

    def close(self) -> None:
        """Undo `open`."""

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return a tensor at the same address that does not keep scratch memory of the pool alive."""


class Pool(Protocol):
    """The scratch memory of replays; graphs that are never replayed at the same time share one.

    Attributes:
        backend: The backend that it belongs to.
        device: Where it is.
        lock: Held by whoever captures into the pool or replays in it. A module's lock is taken before it.
        users: Identities of the runners that use the pool.
    """

    backend: Backend
    device: torch.device
    lock: threading.RLock
    users: weakref.WeakSet[Any]

    def record(self, *, stream: Any, capture_error_mode: str, draws_random: bool) -> Recording:
        """Begin a recording whose scratch memory is in this pool."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Run a block on the stream that captures run on, ordered with the current one before and after."""

    def bytes(self) -> int:
        """Return the device bytes that the pool holds; 0 where no graph lives in it."""

    def before_replay(self) -> None:
        """Order a replay or a capture on the current stream behind the last one on any stream."""

    def after_replay(self) -> None:
        """Note that a replay with the copies of its results, or a capture, is queued on the current stream."""

    def wait(self) -> None:
        """Wait until every queued replay has finished."""


class Backend(Protocol):
    """A way to capture and replay on one kind of device.

    Attributes:
        name: ``cuda`` or ``tape``.
        device_type: The torch device type whose tensors a segment works on.
        executes_while_capturing: Whether operations already ran when a segment ends. CUDA only records them, so a
            segment is replayed once before the eager step that follows it.
        reads_host_memory: Whether device memory is host memory, so that a host read reaches no dispatcher.
        capture_tells: Functions by which a forward can tell that it is being captured, to compute otherwise then.
    """

    name: str
    device_type: str
    executes_while_capturing: bool
    reads_host_memory: bool
    capture_tells: tuple[Callable[[], bool], ...]

    def create_pool(self, device: torch.device) -> Pool:
        """Make an empty pool on a device."""

    def generator_states(self, device: torch.device) -> list[tuple[torch.Generator, Tensor]]:
        """Return the default generators that operations on the device may draw from, with their states."""

    def is_capturing(self) -> bool:
        """Tell whether this thread's work is being captured now, by whomever."""

    def elapsed_ms(self, device: torch.device, function: Callable[[], Any]) -> float:
        """Run a function and return the milliseconds until the device has finished it."""

    def synchronize(self, device: torch.device) -> None:
        """Wait for the device; raises where its context is dead."""

    def refusal(self) -> str | None:
        """Say why nothing can be captured in this process; None where nothing stands in the way."""

    def free_bytes(self, device: torch.device) -> int:
        """Return the device's free memory, as everybody on it sees it."""

    def reserved_bytes(self, device: torch.device) -> int:
        """Return the device memory that torch's allocator holds, used or not."""

    def trim(self, device: torch.device) -> None:
        """Let torch's allocator give what it holds and nobody uses back to the device."""
