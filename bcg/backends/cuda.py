"""Segments as `torch.cuda.CUDAGraph`s in one shared memory pool."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bcg import _torch
from bcg.backends.base import Backend, Pool, Recording, Segment
from bcg.errors import ReplayError
from bcg.layout import extent

_left_states: Counter[int | None] = Counter()  # state objects that a device's default generator has left behind
_abandoned: list[torch.cuda.CUDAGraph] = []  # whom torch's allocator of pinned memory asks as long as it lives
_standing_in = threading.Lock()  # of two that overlap, one would take the other's stand-in for the generator's state
_POOL_STREAMS_PER_PRIORITY = 32  # torch hands out its streams round robin: c10/cuda/CUDAStream.cpp, kStreamsPerPool


class CudaSegment:
    """One captured `torch.cuda.CUDAGraph`.

    Args:
        graph: The graph.
        pool: The pool of its memory.
        left_states: How many state objects the default generator had left behind when the graph was captured; None
            where the graph draws no random numbers.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: CudaPool, left_states: int | None = None) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool
        self._left_states = left_states
        pool.segments.add(self)

    @property
    def is_stale(self) -> bool:
        """Whether the default generator left the state that the graph draws from."""
        return self._left_states not in (None, _left_states[self._pool.device.index])

    def replay(self) -> None:
        """Launch the graph on the current stream.

        Raises:
            ReplayError: It would draw other random numbers than eager.
        """
        assert self._graph is not None
        if self.is_stale:
            # torch raises only where the old state is left marked as capturing.
            raise ReplayError(
                "the graph draws random numbers from a state that the default generator left when a later capture "
                "failed: capture it again."
            )
        self._graph.replay()

    def reset(self) -> None:
        """Destroy the graph; its memory goes back to the pool."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None
            self._pool.segments.discard(self)


class CudaPool:
    """A graph memory pool with the stream that all of its captures run on.

    Blocks of a pool belong to a stream, so captures on one stream reuse each other's blocks.
    """

    def __init__(self, backend: CudaBackend, device: torch.device) -> None:
        self.backend: Backend = backend
        self.device = device
        self.lock = threading.RLock()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.segments: weakref.WeakSet[CudaSegment] = weakref.WeakSet()  # those that nobody refers to are freed, too
        self._handle: Any = None
        self._spent_handles: list[Any] = []
        self._stream: torch.cuda.Stream | None = None
        self._last_replay: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    @property
    def live_segments(self) -> int:
        """Number of graphs in the pool."""
        return len(self.segments)

    def record(
        self, *, stream: torch.cuda.Stream | None = None, capture_error_mode: str = "thread_local",
        draws_random: bool = True,
    ) -> Recording:  # fmt: skip
        """Begin a recording whose scratch memory is in this pool."""
        return CudaRecording(self, stream or self.stream(), capture_error_mode, draws_random)

    def stream(self) -> torch.cuda.Stream:
        """Return the stream that captures run on."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Run a block on the capture stream, ordered with the current one before and after."""
        outer, stream = torch.cuda.current_stream(self.device), self.stream()
        stream.wait_stream(outer)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            outer.wait_stream(stream)

    def handle(self) -> Any:
        """Return the pool's handle; a fresh one where no graph uses the old, since torch frees a pool with its last."""
        if self.live_segments == 0:
            self._handle, self._spent_handles = None, []
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def spend_handle(self) -> None:
        """Let later captures use memory of their own: a failed one has left the handle unusable."""
        if self._handle is not None:
            self._spent_handles.append(self._handle)
        self._handle = None

    def address_ranges(self) -> list[tuple[int, int]]:
        """Return the first and past-the-end addresses of the pool's memory; none where no graph lives in it."""
        if self.live_segments == 0:
            return []
        return _torch.pool_segments([*self._spent_handles, *([] if self._handle is None else [self._handle])])

    def bytes(self) -> int:
        """Return the device bytes that the pool holds; 0 where no graph lives in it."""
        # What the last pool left is cached memory like any other, and the next capture begins a new one.
        return sum(end - begin for begin, end in self.address_ranges())

    def before_replay(self) -> None:
        """Make the current stream wait for the last replay where that ran on another one."""
        if self._last_replay is not None:
            stream, event = self._last_replay
            current = torch.cuda.current_stream(self.device)
            if stream != current:
                current.wait_event(event)

    def after_replay(self) -> None:
        """Note the current stream's position as the end of the last replay."""
        current = torch.cuda.current_stream(self.device)
        if self._last_replay is None or self._last_replay[0] != current:
            self._last_replay = (current, torch.cuda.Event())
        self._last_replay[1].record(current)

    def wait(self) -> None:
        """Wait until the last replay has finished."""
        if self._last_replay is not None:
            self._last_replay[1].synchronize()


class CudaRecording:
    """A capture of one segment after another on the pool's stream."""

    def __init__(self, pool: CudaPool, stream: torch.cuda.Stream, capture_error_mode: str, draws_random: bool) -> None:
        self._pool = pool
        self._stream = stream
        self._mode = capture_error_mode
        self._draws_random = draws_random
        self._outer: torch.cuda.Stream | None = None
        self._switched = contextlib.ExitStack()
        self._forked: list[torch.cuda.Stream] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._begun = False  # the graph holds a count of the pool
        self._ranges: list[tuple[int, int]] | None = None
        self._handle: Any = None
        self._left_states: int | None = None
        self._empty: list[torch.cuda.CUDAGraph] = []

    def open(self) -> None:
        """Switch to the capture stream, behind the work that is queued on the current one."""
        # A CUDA object that the cyclic collector destroys in the middle of a capture would invalidate it.
        gc.collect()
        self._outer = torch.cuda.current_stream(self._pool.device)
        self._stream.wait_stream(self._outer)
        self._handle = self._pool.handle()
        # Unlike `set_stream` this also goes back to the current device, which need not be the pool's.
        self._switched.enter_context(torch.cuda.stream(self._stream))

    def begin_segment(self) -> None:
        """Begin a graph; streams that an earlier segment forked are forked again."""
        self._graph = torch.cuda.CUDAGraph()
        self._left_states = _left_states[self._pool.device.index] if self._draws_random else None
        with contextlib.nullcontext() if self._draws_random else _stand_in_generator(self._pool.device):
            self._begun = False
            self._graph.capture_begin(pool=self._handle, capture_error_mode=self._mode)
            self._begun = True
        for stream in self._forked:
            stream.wait_stream(self._stream)

    def end_segment(self) -> Segment | None:
        """Join forked streams and end the graph; None where it has no nodes."""
        assert self._graph is not None
        self._join_forked_streams()
        with _EmptyGraphWarning() as empty:
            self._graph.capture_end()
        graph, self._graph, self._ranges = self._graph, None, None
        if empty.seen:
            self._empty.append(graph)
            return None
        return CudaSegment(graph, self._pool, self._left_states)

    def abort(self) -> None:
        """End a failed capture and repair what CUDA leaves behind when it invalidates one."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        try:
            self._join_forked_streams()
            with _EmptyGraphWarning():
                graph.capture_end()
        except Exception:
            self._repair(graph)
        graph.reset()

    def _repair(self, graph: torch.cuda.CUDAGraph) -> None:
        # pytorch#190308: an invalidated capture ends before its allocations do, and before the generators are told.
        device = self._pool.device
        left_recording = _torch.end_allocate_to_pool(device, self._handle)
        if left_recording:
            self._pool.spend_handle()
            _abandoned.append(graph)
        if left_recording or self._begun:
            _torch.release_pool(device, self._handle)
        # A capture without random operations marked a stand-in. The state must stay then: graphs that draw refer to it,
        # and would go on from the old one while everybody else draws from the new one.
        if self._draws_random:
            _replace_generator_state(device)

    def close(self) -> None:
        """Go back to the stream that was current before, behind the capture stream's work."""
        assert self._outer is not None
        self._outer.wait_stream(self._stream)
        self._switched.close()
        # Only now: later segments may work on memory that was allocated in an empty one, and torch frees a pool with
        # its last graph.
        for graph in self._empty:
            graph.reset()
        self._empty.clear()

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return an alias by address for a tensor in the pool, and any other tensor itself."""
        if tensor.numel() == 0 or not tensor.is_cuda or not self._is_scratch(tensor.data_ptr()):
            return tensor
        if tensor.is_conj() or tensor.is_neg():
            return tensor  # its memory does not hold its values
        return alias_at_address(tensor)

    def _is_scratch(self, address: int) -> bool:
        if self._ranges is None:
            self._ranges = self._pool.address_ranges()
        return any(begin <= address < end for begin, end in self._ranges)

    def _join_forked_streams(self) -> None:
        """Make the capture stream wait for every other stream that takes part in the capture.

        CUDA refuses to end a capture with unjoined streams. Which ones were forked is not recorded anywhere, so every
        stream of torch's pools is asked.
        """
        self._forked = [stream for stream in _pool_streams(self._pool.device) if _is_capturing(stream)]
        self._forked = [stream for stream in self._forked if stream != self._stream]
        for stream in self._forked:
            self._stream.wait_stream(stream)


class CudaBackend:
    """Captures with CUDA graphs."""

    name = "cuda"
    device_type = "cuda"
    executes_while_capturing = False
    reads_host_memory = False
    # transformers' masking_utils asks, and leaves out then that it looks whether a mask is all ones. Also bcg's own way
    # to ask: what is found here is the function itself, whatever stands in its place elsewhere.
    capture_tells: tuple[Callable[[], bool], ...] = (torch.cuda.is_current_stream_capturing,)

    def create_pool(self, device: torch.device) -> Pool:
        """Make an empty pool on a device."""
        return CudaPool(self, _indexed(device))

    def generator_states(self, device: torch.device) -> list[tuple[torch.Generator, Tensor]]:
        """Return the CPU's and the device's default generators with their states."""
        generators = (torch.default_generator, torch.cuda.default_generators[_indexed(device).index])
        return [(generator, generator.get_state()) for generator in generators]

    def is_capturing(self) -> bool:
        """Tell whether the current stream is being captured."""
        return _is_current_stream_capturing()

    def elapsed_ms(self, device: torch.device, function: Callable[[], Any]) -> float:
        """Run a function from an idle device and return the milliseconds until the device has finished it."""
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        function()
        torch.cuda.synchronize(device)
        return (time.perf_counter() - started) * 1e3

    def synchronize(self, device: torch.device) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(device)

    def refusal(self) -> str | None:
        """Refuse the allocator that tells nothing of its blocks: bcg must know which memory is a pool's."""
        if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
            return None
        return (
            "torch allocates with backend:cudaMallocAsync, which does not tell which memory belongs to a graph pool: "
            "take it out of PYTORCH_ALLOC_CONF (expandable_segments:True helps against fragmentation and works)"
        )

    def free_bytes(self, device: torch.device) -> int:
        """Return the device's free memory, as everybody on it sees it."""
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return free_bytes

    def reserved_bytes(self, device: torch.device) -> int:
        """Return the device memory that torch's allocator holds, used or not."""
        return torch.cuda.memory_reserved(device)

    def trim(self, device: torch.device) -> None:
        """Give cached memory back to the device, pools without a graph included."""
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def alias_at_address(tensor: Tensor) -> Tensor:
    """Return a tensor with the same address, shape, stride and dtype that keeps no memory alive.

    Args:
        tensor: A CUDA tensor with at least one element.

    Returns:
        The alias. Reading it is valid while the memory at its address is mapped and holds what the caller expects.
    """
    size_bytes = extent(tensor.shape, tensor.stride()) * tensor.element_size()
    raw = torch.as_tensor(_AddressRange(tensor.data_ptr(), size_bytes), device=tensor.device)
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class _AddressRange:
    """Device memory by address, in the form of the CUDA array interface, version 3."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class _EmptyGraphWarning:
    """Tells whether torch warned that a graph is empty: it counts the nodes and exposes the count nowhere else.

    One thread at a time: `warnings.catch_warnings` changes the whole process, and two that overlap never end.
    """

    _lock = threading.Lock()

    def __init__(self) -> None:
        self.seen = False
        self._context = warnings.catch_warnings(record=True)

    def __enter__(self) -> _EmptyGraphWarning:
        self._lock.acquire()
        self._caught = self._context.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.__exit__(None, None, None)
        self._lock.release()
        for caught in self._caught or []:
            if "CUDA Graph is empty" in str(caught.message):
                self.seen = True
            else:
                warnings.warn_explicit(caught.message, caught.category, caught.filename, caught.lineno)


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


@cache
def _pool_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    streams: dict[int, torch.cuda.Stream] = {}
    for priority in (0, -1):
        for _ in range(_POOL_STREAMS_PER_PRIORITY):
            stream = torch.cuda.Stream(device, priority=priority)
            streams[stream.cuda_stream] = stream
    return tuple(streams.values())


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return _is_current_stream_capturing()


def _is_current_stream_capturing() -> bool:
    (ask,) = CudaBackend.capture_tells
    return ask()


@contextlib.contextmanager
def _stand_in_generator(device: torch.device) -> Iterator[None]:
    """Begin a capture with a stand-in for the default generator's state.

    ``capture_begin`` marks the default generator as capturing, for every thread: a thread that serves and draws random
    numbers would then fail. A capture without random operations needs no generator, so the mark goes to a copy.
    """
    generator = torch.cuda.default_generators[device.index]
    with _standing_in:
        original = generator.graphsafe_get_state()
        stand_in = torch.Generator(device)
        stand_in.set_state(generator.get_state())
        generator.graphsafe_set_state(stand_in.graphsafe_get_state())
        try:
            yield
        finally:
            generator.graphsafe_set_state(original)


def _replace_generator_state(device: torch.device) -> None:
    """Give the default generator a state object that no failed capture has marked, at the same seed and offset.

    Graphs that draw refer to the state object of their capture. Those from before can draw no more what eager draws.
    """
    _left_states[device.index] += 1
    generator = torch.cuda.default_generators[device.index]
    fresh = torch.Generator(device)
    fresh.set_state(generator.get_state())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())
