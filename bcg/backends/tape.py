"""The reference backend: records dispatched operations and runs them again into the same memory.

It keeps the rules of a CUDA graph on a machine without a GPU: a replay runs no Python of the module, addresses are
fixed, constants are baked, views stay views, in-place and random operations run again.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bcg import _torch
from bcg.backends.base import Backend, Pool, Recording, Segment
from bcg.errors import GuardMiss, HostileOperationError
from bcg.layout import operands, without_repeats
from bcg.operations import is_host_read

# In-place operations that change a tensor object and not its memory: a replay has nothing to do.
_METADATA_OPERATIONS = frozenset(
    {
        "aten::as_strided_",
        "aten::detach_",
        "aten::squeeze_",
        "aten::swapaxes_",
        "aten::swapdims_",
        "aten::t_",
        "aten::transpose_",
        "aten::unsqueeze_",
    }
)
_UNINITIALISED = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted", "aten::new_empty",
     "aten::new_empty_strided"}
)  # fmt: skip


@dataclass
class _Operation:
    """An operation that a replay runs again, with the recorded tensors that take its fresh results."""

    operator: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    results: list[Tensor | None]

    def run(self) -> None:
        fresh = operands(self.operator(*self.arguments, **self.keywords))
        for recorded, value in zip(self.results, fresh, strict=True):
            if recorded is not None:
                if recorded.shape != value.shape:
                    raise GuardMiss(
                        f"{_torch.operator_name(self.operator)} gives another shape than at capture: expected "
                        f"{list(recorded.shape)}, got {list(value.shape)}"
                    )
                without_repeats(recorded).copy_(without_repeats(value))


@dataclass
class _Constant:
    """A tensor made from host data; the module may write to it, so every replay starts from the recorded content."""

    tensor: Tensor
    content: Tensor

    def run(self) -> None:
        self.tensor.copy_(self.content)


class TapeSegment:
    """A list of operations to run again."""

    def __init__(self, operations: list[_Operation | _Constant]) -> None:
        self._operations = operations

    is_stale = False

    def replay(self) -> None:
        """Run the recorded operations again on the same memory."""
        # Inference mode lets one replay write both ordinary tensors and those recorded under inference mode.
        with torch.inference_mode():
            for operation in self._operations:
                operation.run()

    def reset(self) -> None:
        """Drop the recorded operations and the tensors they hold."""
        self._operations = []


@dataclass
class _RecordingMode(_torch.DispatchMode):
    """Runs and records every operation while `operations` is a list."""

    operations: list[_Operation | _Constant] | None = field(default=None)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.operations is None:
            return func(*args, **kwargs)
        if isinstance(func, _torch.HigherOrderOperator):
            raise HostileOperationError(
                f"{func.name()} takes functions and may choose between them, which a replay cannot: run it in a "
                "function decorated with eager_on_graph, or capture with bcg.wrap, which makes it an eager break."
            )
        if is_host_read(func):
            raise HostileOperationError(
                f"{_torch.operator_name(func)} reads a tensor on the host inside a graph segment, where CUDA "
                "refuses it and a "
                "replay would not read again: read it in a function decorated with eager_on_graph, or capture with "
                "bcg.wrap, "
                "which turns host reads into guards."
            )
        if _torch.can_decompose(func, "cpu"):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        operation = _recorded(func, args, kwargs, result)
        if operation is not None:
            self.operations.append(operation)
        return result


def _recorded(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> _Operation | _Constant | None:
    name = _torch.operator_name(operator).split(".")[0]
    if name == "aten::lift_fresh":
        return _Constant(args[0].detach(), args[0].detach().clone())
    if name in _METADATA_OPERATIONS or name in _UNINITIALISED:
        return None
    inputs = {_torch.storage_key(tensor) for tensor in operands((args, kwargs))}
    # A result that shares memory with an argument is a view or the argument itself, and needs no copy.
    fresh = [None if _torch.storage_key(value) in inputs else value.detach() for value in operands(result)]
    if not _torch.written_arguments(operator) and all(value is None for value in fresh):
        return None
    return _Operation(operator, _snapshot(args), _snapshot(kwargs), fresh)


def _snapshot(value: Any) -> Any:
    """Replace tensors by aliases, since the module may change a tensor object in place after the operation."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (list, tuple)):
        return type(value)(_snapshot(item) for item in value)
    if isinstance(value, dict):
        return {key: _snapshot(item) for key, item in value.items()}
    return value


class TapeRecording:
    """A capture on the tape."""

    def __init__(self) -> None:
        self._mode = _RecordingMode()
        self._uncompiled = contextlib.ExitStack()

    def open(self) -> None:
        """Enter the recording mode; it records nothing yet."""
        self._uncompiled.enter_context(_torch.uncompiled(lambda: self._mode.operations is not None))
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def begin_segment(self) -> None:
        """Begin to record."""
        self._mode.operations = []

    def end_segment(self) -> Segment | None:
        """Stop recording; return the segment, or None where nothing was recorded."""
        operations, self._mode.operations = self._mode.operations, None
        return TapeSegment(operations) if operations else None

    def abort(self) -> None:
        """Stop recording and drop what was recorded."""
        self._mode.operations = None

    def close(self) -> None:
        """Leave the recording mode."""
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._uncompiled.close()

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return the tensor: a tape owns all memory that it works on."""
        return tensor


class TapePool:
    """The tape's pool: operations keep their memory, so there is only the lock."""

    def __init__(self, backend: TapeBackend, device: torch.device) -> None:
        self.backend: Backend = backend
        self.device = device
        self.lock = threading.RLock()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()

    def record(
        self, *, stream: Any = None, capture_error_mode: str = "thread_local", draws_random: bool = True
    ) -> Recording:
        """Begin a recording; streams and error modes mean nothing here."""
        return TapeRecording()

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: the host has no streams."""
        return contextlib.nullcontext()

    def bytes(self) -> int:
        """Return 0: a tape has no device memory."""
        return 0

    def before_replay(self) -> None:
        """Do nothing: host execution is in order."""

    def after_replay(self) -> None:
        """Do nothing: host execution is in order."""

    def wait(self) -> None:
        """Do nothing: host execution has finished."""


class TapeBackend:
    """Captures on the CPU by recording dispatched operations."""

    name = "tape"
    device_type = "cpu"
    executes_while_capturing = True
    reads_host_memory = True
    capture_tells: tuple[Callable[[], bool], ...] = ()

    def create_pool(self, device: torch.device) -> Pool:
        """Make a pool."""
        return TapePool(self, device)

    def generator_states(self, device: torch.device) -> list[tuple[torch.Generator, Tensor]]:
        """Return the CPU's default generator with its state."""
        return [(torch.default_generator, torch.default_generator.get_state())]

    def is_capturing(self) -> bool:
        """Return False: nobody but bcg captures on the host."""
        return False

    def elapsed_ms(self, device: torch.device, function: Callable[[], Any]) -> float:
        """Run a function and return the milliseconds that it took."""
        started = time.perf_counter()
        function()
        return (time.perf_counter() - started) * 1e3

    def synchronize(self, device: torch.device) -> None:
        """Do nothing: host execution has finished."""

    def refusal(self) -> str | None:
        """Return None: the tape records under any allocator."""
        return None

    def free_bytes(self, device: torch.device) -> int:
        """Return 0: a tape takes no device memory."""
        return 0

    def reserved_bytes(self, device: torch.device) -> int:
        """Return 0: a tape takes no device memory."""
        return 0

    def trim(self, device: torch.device) -> None:
        """Do nothing: host memory is free when its last user is gone."""
