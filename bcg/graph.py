"""Breakable graphs: an ordered list of graph segments and eager steps, and the capture that makes one.

Usable without a runner:

    graph = bcg.BreakableCUDAGraph()
    with bcg.BreakableCUDAGraphCapture(graph, device="cuda"):
        static_output = model(static_input)      # functions decorated with @bcg.eager_on_graph become eager breaks
    static_input.copy_(fresh_input)
    graph.replay()                               # static_output holds the result for fresh_input
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast, overload

import torch

from bcg import _torch, trees
from bcg.backends import Backend, Pool, Recording, Segment, backend_for
from bcg.errors import CaptureError, NestedCaptureError, ReplayError, SegmentLimitError
from bcg.source import Where, where
from bcg.steps import EagerStep, GuardStep, Step, frozen, tensors_in

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("bcg")
_tokens = itertools.count(1)


class _ThreadState(threading.local):
    capture: BreakableCUDAGraphCapture | None = None
    token: int | None = None


_thread = _ThreadState()


def current_capture() -> BreakableCUDAGraphCapture | None:
    """Return the capture that is open on this thread, or None."""
    return _thread.capture


def replay_token() -> int | None:
    """Return a number that is new in every replay, and None outside a replay.

    An eager break can tell by it whether it runs for the first time in a replay.

    Returns:
        The number of the replay that runs on this thread, or None.

    Example:
        >>> replay_token() is None
        True
    """
    return _thread.token


class BreakableCUDAGraph:
    """Hold a captured sequence of graph segments and eager steps.

    Empty until a `BreakableCUDAGraphCapture` fills it. Replays read and write the memory that the capture used: copy
    fresh inputs into the captured ones before, and clone results after.

    Attributes:
        segments: Number of graph segments.
        breaks: Number of eager breaks.
        guards: Number of host reads that a replay makes again.
        failed_step: The step that raised in the last replay, if any.

    Example:
        >>> graph = BreakableCUDAGraph()
        >>> x = torch.ones(2)
        >>> with BreakableCUDAGraphCapture(graph):
        ...     y = x * 2
        >>> _ = x.fill_(3.0)
        >>> graph.replay()
        >>> y.tolist()
        [6.0, 6.0]
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.failed_step: Step | None = None
        self._valid = False

    @property
    def segments(self) -> int:
        """Number of graph segments."""
        return sum(not isinstance(step, (EagerStep, GuardStep)) for step in self.steps)

    @property
    def breaks(self) -> int:
        """Number of eager breaks."""
        return sum(isinstance(step, EagerStep) for step in self.steps)

    @property
    def guards(self) -> int:
        """Number of host reads that a replay makes again."""
        return sum(isinstance(step, GuardStep) for step in self.steps)

    @property
    def is_stale(self) -> bool:
        """Whether a replay would raise, since a segment draws random numbers from what is another one now."""
        return any(step.is_stale for step in self.steps)

    @property
    def break_bytes(self) -> int:
        """Bytes of the static tensors that hold results of eager breaks."""
        return sum(step.static_bytes() for step in self.steps if isinstance(step, EagerStep))

    def replay(self) -> None:
        """Run all steps in order, on the current stream.

        Raises:
            ReplayError: Nothing was captured, the capture failed, or the graph was reset.
            GuardMiss: A host value or shape that the capture relied on is another one now; results are not valid.
        """
        if not self._valid:
            raise ReplayError("this graph holds no finished capture: capture into it first, and not after reset().")
        outer, _thread.token = _thread.token, next(_tokens)
        self.failed_step = None
        try:
            for step in self.steps:
                step.replay()
        except BaseException:
            self.failed_step = step
            raise
        finally:
            _thread.token = outer

    def finish(self) -> None:
        """Declare the capture complete; called by `BreakableCUDAGraphCapture`."""
        self._valid = True

    def reset(self) -> None:
        """Give back all segments and static tensors; the graph can be captured into again."""
        self._valid = False
        for step in self.steps:
            step.reset()
        self.steps = []

    def __repr__(self) -> str:
        return f"BreakableCUDAGraph(segments={self.segments}, breaks={self.breaks}, guards={self.guards})"


class BreakableCUDAGraphCapture:
    """Capture a block into a `BreakableCUDAGraph`, with eager breaks where the block asks for them.

    Operations of the block are recorded into segments; functions decorated with `eager_on_graph`, and calls of
    `break_graph`, end a segment. On CUDA the block does not run while it is recorded, so each segment is replayed once
    before the eager step behind it; warm the block up before the capture.

    Args:
        graph: An empty graph to fill; made where it is left out, and returned by ``with``.
        pool: Scratch memory to use; give the same pool to graphs that never replay at the same time.
        device: Device to capture on, where no pool is given: ``cpu`` records on the tape.
        stream: CUDA stream to capture on; the pool's own where it is left out.
        capture_error_mode: CUDA's stream capture mode. ``thread_local`` leaves other threads alone.
        barrier: Called before every eager step while capturing; ranks wait for each other there.
        capture_context: Makes a context manager that is entered around the whole capture, for communication libraries
            that must register buffers.
        max_segments: Number of segments after which the capture fails.
        draws_random: Whether the block may draw from the default CUDA generator. Where not, the generator is left
            usable for other threads.

    Raises:
        NestedCaptureError: Another capture is open on this thread.
        SegmentLimitError: More than ``max_segments`` segments.
        CaptureError: CUDA refused the capture. What the block itself raises passes unchanged.
    """

    def __init__(
        self,
        graph: BreakableCUDAGraph | None = None,
        *,
        pool: Pool | None = None,
        device: torch.device | str = "cpu",
        stream: Any = None,
        capture_error_mode: str = "thread_local",
        barrier: Callable[[], None] | None = None,
        capture_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
        max_segments: int | None = None,
        draws_random: bool = True,
    ) -> None:
        self.graph = graph if graph is not None else BreakableCUDAGraph()
        self.pool = pool if pool is not None else _pool_for(torch.device(device))
        self.in_segment = False
        self._barrier = barrier
        self._context = contextlib.ExitStack()
        self._make_context = capture_context or contextlib.nullcontext
        self._max_segments = max_segments
        self._segments = 0
        self._recording: Recording = self.pool.record(
            stream=stream, capture_error_mode=capture_error_mode, draws_random=draws_random
        )

    @property
    def backend(self) -> Backend:
        """The backend that records."""
        return self.pool.backend

    def __enter__(self) -> BreakableCUDAGraph:
        if _thread.capture is not None:
            raise NestedCaptureError(
                "a capture is already open on this thread: end it first; a module that is wrapped inside another "
                "wrapped module is captured with the outer one."
            )
        if self.graph.steps:
            raise CaptureError("this graph already holds a capture: reset() it first, or capture into a new one.")
        self._context.enter_context(self.pool.lock)
        try:
            self._context.enter_context(self._make_context())
            self._recording.open()
            self._context.callback(self._recording.close)
            _thread.capture = self
            self._begin_segment()
        except BaseException:
            self._fail()
            raise
        return self.graph

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if kind is not None:
            self._fail()
            return
        try:
            if not self.in_segment:
                raise CaptureError("an eager step of the capture raised, and the captured block swallowed the error.")
            self._end_segment()
        except BaseException:
            self._fail()
            raise
        _thread.capture = None
        try:
            self._context.close()
        except BaseException:
            self.graph.reset()  # the host's capture context refused, so nobody will own the graph
            raise
        self.graph.finish()

    def _fail(self) -> None:
        """Leave the capture after an error, in an order that cannot mask it."""
        _thread.capture = None
        self.in_segment = False
        try:
            with contextlib.suppress(Exception):
                self._recording.abort()
            self.graph.reset()
        finally:  # whatever interrupts it: the pool must not stay locked, nor the capture stream current
            self._leave()

    def _leave(self) -> None:
        try:
            self._context.close()
        except Exception:
            _log.warning("leaving a failed capture raised as well", exc_info=True)

    def _begin_segment(self) -> None:
        self._recording.begin_segment()
        self.in_segment = True

    def _end_segment(self) -> Segment | None:
        segment = self._recording.end_segment()
        self.in_segment = False
        if segment is None:
            return None
        self.graph.steps.append(segment)
        self._segments += 1
        if self._max_segments is not None and self._segments > self._max_segments:
            raise SegmentLimitError(
                f"the capture needs more than max_segments={self._max_segments} graph segments: raise max_segments, or "
                "name the submodule that breaks most in eager_modules so that it breaks once."
            )
        return segment

    @contextlib.contextmanager
    def between_segments(self) -> Iterator[None]:
        """Run a block eagerly between two segments, on memory that the segments so far have computed."""
        segment = self._end_segment()
        if segment is not None and not self.backend.executes_while_capturing:
            segment.replay()
        if self._barrier is not None:
            self._barrier()
        with _torch.without_dispatch_modes():
            yield
        # Not reached after an error: should the captured block swallow it, `__exit__` finds no segment open.
        self._begin_segment()

    def run_eagerly(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str,
        place: Where | None = None,
        stub: Callable[..., Any] | None = None,
    ) -> Any:
        """Make a call an eager step: run it now, and again in every replay.

        Args:
            function: What to run; sees real data.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            name: What a user would call the step.
            place: Where the module makes the call; found from the stack where it is left out.
            stub: What to run now, in place of the function.

        Returns:
            The result, its tensors replaced by static ones that every replay fills.
        """
        place = place or where()
        with self.between_segments():
            result = (stub or function)(*args, **kwargs)
            step = EagerStep(function, self.borrowed(args), self.borrowed(kwargs), name=name, where=place)
            # Aliasing is told by the original arguments: a borrowed tensor has a storage of its own.
            storages = {_torch.storage_key(tensor) for tensor in tensors_in((args, kwargs))}
            static = step.adopt(result, storages, self._recording.borrow)
            self.graph.steps.append(step)
        return static

    def guard(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, place: Where
    ) -> Any:
        """Make a host read a guard: read now, and read again and compare in every replay.

        Args:
            function: What reads.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            name: What a user would call the read.
            place: Where the module makes the read.

        Returns:
            The value.
        """
        with self.between_segments():
            value = function(*args, **kwargs)
            read = functools.partial(function, *self.borrowed(args), **self.borrowed(kwargs))
            self.graph.steps.append(GuardStep(read, frozen(value), name=name, where=place))
        return value

    def borrowed(self, value: R) -> R:
        """Return a value whose tensors do not keep scratch memory alive; what holds no tensor stays the same object."""
        if isinstance(value, tuple):
            return type(value)(self._borrow_one(item) for item in value)
        if isinstance(value, dict):
            return type(value)((key, self._borrow_one(item)) for key, item in value.items())
        return cast(R, self._borrow_one(value))

    def _borrow_one(self, value: Any) -> Any:
        return trees.map_tensors(value, self._recording.borrow) if tensors_in(value) else value


def _pool_for(device: torch.device) -> Pool:
    return backend_for("auto", device).create_pool(device)


def break_graph() -> None:
    """End the current graph segment and begin the next; do nothing outside a capture.

    Example:
        >>> break_graph()
    """
    capture = _thread.capture
    if capture is not None and capture.in_segment:
        with capture.between_segments():
            pass


@overload
def eager_on_graph(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def eager_on_graph(
    *, enable: bool | Callable[[], bool] = True, capture_stub: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def eager_on_graph(
    function: Callable[P, R] | None = None,
    /,
    *,
    enable: bool | Callable[[], bool] = True,
    capture_stub: Callable[..., Any] | None = None,
) -> Any:
    """Make a function an eager break of every capture that calls it.

    Inside a capture the segment ends, the function runs eagerly on real data, and the next segment begins; every replay
    runs the function again and copies its results into the tensors that the next segment reads. Outside a capture, and
    inside another eager break, the function is called as it is.

    Args:
        function: The function, where the decorator is used without arguments. May return tensors in any container,
            dataclass or plain object; shapes, dtypes and Python values in the result must not change between replays.
        enable: Whether to break; a callable is asked at each call.
        capture_stub: Called in place of the function while capturing (for functions that must not run then, such as a
            collective on a rank that captures alone). Must return what the function returns, in form.

    Returns:
        The decorated function, or a decorator.

    Raises:
        GuardMiss: In a replay, where the result has another form than at capture.

    Example:
        >>> @eager_on_graph
        ... def halve(x):
        ...     return x / 2
        >>> halve(torch.tensor(4.0)).item()
        2.0
    """
    if function is None:
        return functools.partial(_decorate, enable=enable, capture_stub=capture_stub)
    return _decorate(function, enable=enable, capture_stub=capture_stub)


def _decorate(
    function: Callable[P, R], *, enable: bool | Callable[[], bool], capture_stub: Callable[..., Any] | None
) -> Callable[P, R]:
    name = getattr(function, "__qualname__", repr(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        capture = _thread.capture
        if capture is None or not capture.in_segment or not (enable() if callable(enable) else enable):
            return function(*args, **kwargs)
        result: R = capture.run_eagerly(function, args, kwargs, name=name, stub=capture_stub)
        return result

    return call
