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
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

import torch
from torch import Tensor

from bcg import _torch, trees
from bcg.backends import Backend, Pool, Recording, Segment, backend_for
from bcg.errors import CaptureError, GuardMiss, NestedCaptureError, ReplayError, SegmentLimitError
from bcg.source import Where, where

P = ParamSpec("P")
R = TypeVar("R")

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


class Step(Protocol):
    """A part of a breakable graph; a graph replays its steps without knowing their kind."""

    def replay(self) -> None:
        """Run the step again."""

    def reset(self) -> None:
        """Give back what the step holds."""


class EagerStep:
    """A function that runs between two segments, with static tensors that its results are copied into.

    Args:
        function: What runs.
        args: Its positional arguments; tensors are static or borrowed from the segments before.
        kwargs: Its keyword arguments, likewise.
        name: What a user would call the step.
        where: Where the module calls it.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, where: Where
    ) -> None:
        self.name = name
        self.where = where
        self._function: Callable[..., Any] | None = function
        self._args = args
        self._kwargs = kwargs
        self._results: list[Any] = []
        self._copied: list[bool] = []
        self._structure: Any = None

    def adopt(self, result: Any, input_storages: set[int], borrow: Callable[[Tensor], Tensor]) -> Any:
        """Take the result of the first run.

        Args:
            result: What the function returned.
            input_storages: Keys of the storages of the arguments. A result in one of them stays what it is: replays
                find it at the same address.
            borrow: Makes a reference that keeps no scratch memory alive.

        Returns:
            The result with its fresh tensors replaced by static ones.
        """
        tree = trees.flatten(result)
        self._structure = tree.structure
        for reason in tree.refused.values():
            raise CaptureError(f"the result of eager break {self.name} at {self.where} {reason}: return plain tensors.")
        given = [self._adopt_leaf(leaf, input_storages, borrow) for leaf in tree.leaves]
        return tree.structure.unflatten(given)

    def _adopt_leaf(self, leaf: Any, input_storages: set[int], borrow: Callable[[Tensor], Tensor]) -> Any:
        fresh = isinstance(leaf, Tensor) and _torch.storage_key(leaf) not in input_storages
        given = static_copy(leaf) if fresh else leaf
        self._copied.append(fresh)
        self._results.append(borrow(given) if isinstance(given, Tensor) else given)
        return given

    def static_bytes(self) -> int:
        """Return the bytes of the static tensors that the results are copied into."""
        return sum(result.nbytes for result, copied in zip(self._results, self._copied, strict=True) if copied)

    def replay(self) -> None:
        """Run the function and copy its results into the static tensors.

        Raises:
            GuardMiss: A result has another structure, shape, dtype or Python value than when it was captured.
        """
        assert self._function is not None
        tree = trees.flatten(self._function(*self._args, **self._kwargs))
        if tree.structure != self._structure:
            raise self._miss("result", "another structure", str(tree.structure), str(self._structure))
        for expected, got, copied in zip(self._results, tree.leaves, self._copied, strict=True):
            self._receive(expected, got, copied)

    def _receive(self, expected: Any, got: Any, copied: bool) -> None:
        if not isinstance(expected, Tensor):
            if not same_value(expected, got):
                raise self._miss("result", "another value", repr(got), repr(expected))
            return
        if not isinstance(got, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
            raise self._miss("result", "another shape", _form(got), _form(expected))
        if copied:
            expected.copy_(got)
        elif got.data_ptr() != expected.data_ptr() or got.stride() != expected.stride():
            # The next segment reads the argument's memory, where this result is not.
            raise self._miss("result", "another place", "other memory", "memory of an argument")

    def _miss(self, what: str, how: str, got: str, expected: str) -> GuardMiss:
        return GuardMiss(
            f"eager break {self.name} at {self.where}: {what} has {how}: expected {expected}, got {got}", self
        )

    def reset(self) -> None:
        """Drop the function, its arguments and the static tensors."""
        self._function = None
        self._args, self._kwargs, self._results, self._copied = (), {}, [], []


class GuardStep:
    """A host read: made again in every replay, and compared with the value that the capture relied on.

    Args:
        read: Makes the read.
        expected: The value at capture.
        name: What a user would call the read.
        where: Where the module makes it.
    """

    def __init__(self, read: Callable[[], Any], expected: Any, *, name: str, where: Where) -> None:
        self.name = name
        self.where = where
        self.expected = expected
        self._read: Callable[[], Any] | None = read

    def replay(self) -> None:
        """Make the read.

        Raises:
            GuardMiss: The value is another one than at capture.
        """
        assert self._read is not None
        value = self._read()
        if not same_value(self.expected, value):
            raise GuardMiss(
                f"guard {self.name} at {self.where}: expected {_short(self.expected)}, got {_short(value)}", self
            )

    def reset(self) -> None:
        """Drop the read and what it holds."""
        self._read = None


def static_copy(tensor: Tensor) -> Tensor:
    """Return an ordinary tensor with memory of its own, outside every graph pool, with the same content and layout."""
    with torch.inference_mode(False), torch.no_grad():
        static = torch.empty_like(tensor, memory_format=torch.preserve_format, requires_grad=False)
        return static.copy_(tensor)


def frozen(value: Any) -> Any:
    """Return a host value that nobody can change: tensors are cloned."""
    return trees.map_tensors(value, lambda tensor: tensor.detach().clone())


def tensors_in(value: Any) -> list[Tensor]:
    """Return every distinct tensor of a nested value."""
    return [leaf for leaf in trees.flatten(value).leaves if isinstance(leaf, Tensor)]


def same_value(expected: Any, got: Any) -> bool:
    """Compare two host values or tensors bit by bit as far as a reader can tell: types count, and NaN equals NaN."""
    if isinstance(expected, Tensor):
        return isinstance(got, Tensor) and _same_tensor(expected, got)
    if type(expected) is not type(got):
        return False
    if isinstance(expected, (list, tuple)):
        return len(expected) == len(got) and all(map(same_value, expected, got))
    if isinstance(expected, (float, complex)):
        return repr(expected) == repr(got)
    return bool(expected == got)


def _same_tensor(expected: Tensor, got: Tensor) -> bool:
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    if torch.equal(expected, got):
        return True
    return (
        expected.is_floating_point()
        and torch.equal(expected.nan_to_num(0.0, torch.inf, -torch.inf), got.nan_to_num(0.0, torch.inf, -torch.inf))
        and torch.equal(expected.isnan(), got.isnan())
    )


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return _short(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _short(value: Any) -> str:
    text = repr(value.tolist()) if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


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
        self.graph.finish()
        self._context.close()

    def _fail(self) -> None:
        """Leave the capture after an error, in an order that cannot mask it."""
        _thread.capture = None
        self.in_segment = False
        with contextlib.suppress(Exception):
            self._recording.abort()
        self.graph.reset()
        self._context.close()

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
