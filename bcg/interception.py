"""See every operation of a forward, first in a dry run and then in the capture, and treat each by its kind.

The dry run executes everything as eager would. It finds out what the capture will meet, and makes what must exist
before: device copies of host data (hoists). The capture treats plain operations as they are, and turns the rest into
guards, breaks and hoists.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bcg import _torch
from bcg.backends import Backend
from bcg.errors import HostileOperationError, StateWriteError
from bcg.graph import BreakableCUDAGraphCapture
from bcg.layout import operands
from bcg.operations import Arguments, Kind, base_name, classify, draws_random, generator_of
from bcg.source import Where, where
from bcg.steps import same_value, tensors_in

# Functions that make a device tensor from host data without the dispatcher seeing the copy.
_HOST_MAKERS: Final = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor})
# Functions that read host memory without the dispatcher seeing it.
_HOST_READERS: Final = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
# Functions that read the memory of their second argument, where it is a host tensor, without the dispatcher seeing it.
_HOST_ARGUMENT_READERS: Final = frozenset({torch.tensor_split, Tensor.tensor_split})
# Functions that switch all modes off to read a tensor: what they return is guarded.
_TEXT_READERS: Final = frozenset({Tensor.__repr__, Tensor.__format__})
_HOST_GUARD_MAX_BYTES: Final = 1 << 20  # larger host tensors are guarded by their version, where they have one


class OperationFailedError(HostileOperationError):
    """An operation failed inside a capture; the capture can be tried again with that operation as a break.

    Args:
        name: Base name of the operation, such as ``aten::nonzero``.
        place: Where the module calls it.
        error: What it raised.
    """

    def __init__(self, name: str, place: Where, error: BaseException) -> None:
        super().__init__(f"operation {name} at {place} failed in the capture: {type(error).__name__}: {error}")
        self.operation = name
        self.place = place


@dataclass(frozen=True)
class Finding:
    """Something in a forward that a capture cannot simply record.

    Attributes:
        kind: ``hoist``, ``guard``, ``break``, ``module break``, ``collective``, or ``compiled``.
        name: The operation, function or submodule.
        where: The submodule and source line.
    """

    kind: str
    name: str
    where: Where

    def __str__(self) -> str:
        return f"{self.kind} {self.name} at {self.where}"


@dataclass
class Hoist:
    """A device tensor made from host data, made once and owned by the entry.

    Attributes:
        source: The host data as a host tensor.
        value: The device tensor.
        written: The forward writes to it, so each replay works on a copy.
    """

    source: Tensor
    value: Tensor
    written: bool = False


@dataclass(frozen=True)
class HostGuard:
    """A host tensor that outlives the call and whose content a capture baked.

    Attributes:
        tensor: The tensor itself.
        content: Its content at capture; None where it is too large to compare in every call and has a version.
        version: Its version counter at capture; None where it has none.
        where: Where the module uses it.
    """

    tensor: Tensor
    content: Tensor | None
    version: int | None
    where: Where

    @classmethod
    def of(cls, tensor: Tensor, place: Where) -> HostGuard:
        """Guard a host tensor's present content."""
        version = _version(tensor)
        compares = version is None or tensor.nbytes <= _HOST_GUARD_MAX_BYTES
        return cls(tensor, tensor.detach().clone() if compares else None, version, place)

    def holds(self) -> bool:
        """Tell whether the content is still what it was."""
        if self.content is not None:
            return same_value(self.content, self.tensor)
        return self.version == _version(self.tensor)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


@dataclass
class Policy:
    """What is a break beyond the table of operations.

    Attributes:
        operations: Base names of operations that failed in an earlier capture.
        functions: Torch functions that the user named.
        break_collectives: Run collectives between segments.
    """

    operations: set[str] = field(default_factory=set)
    functions: frozenset[Any] = frozenset()
    break_collectives: bool = False


class Watch:
    """What the dry run and the capture have in common: who owns which memory.

    Args:
        backend: The backend that captures.
        protected: Storages that the forward must not write to, with what a user would call them.
        policy: What is a break beyond the table.
    """

    def __init__(self, backend: Backend, protected: Mapping[int, str], policy: Policy) -> None:
        self.backend = backend
        self.policy = policy
        self.error: Exception | None = None
        self.random = False
        self.reads_constants = False  # which the tape must be told apart from reads of data
        self.runs_unseen = False  # eager steps whose operations are not looked at may draw random numbers
        self.externals: dict[int, Tensor] = {}
        self.host_guards: dict[tuple[int, int, torch.Size], HostGuard] = {}
        self._protected = protected
        # Storages made in this call: whether their content follows from device data. Others outlive the call.
        self._born: dict[int, bool] = {}
        self._unwatched = 0
        self.functions = _FunctionMode(self)
        self.dispatch = _DispatchMode(self)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See the operations of a block on this thread, also those of functions that the user compiled."""
        with self.functions, self.dispatch, _torch.uncompiled(self.active):
            yield
        if self.error is not None:
            raise self.error

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Take the modes off for a block; compiled code must not see them, or it recompiles."""
        self._unwatched += 1
        try:
            with _torch.without_dispatch_modes(), _torch.without_function_mode(self.functions):
                yield
        finally:
            self._unwatched -= 1

    def active(self) -> bool:
        """Tell whether operations are to be treated now."""
        return not self._unwatched

    # -- operations ------------------------------------------------------------------------------------------------

    def is_composite(self, operator: Any) -> bool:
        """Tell whether an operation that arrives whole is to be taken apart, as eager takes it apart on the device."""
        return _torch.can_decompose(operator, self.backend.device_type)

    def operation(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Treat one dispatched operation."""
        inputs = list(operands((args, kwargs)))
        keys = {_torch.storage_key(tensor) for tensor in inputs}
        if base_name(operator) == "aten::lift_fresh":  # a tensor that was just made from host data, unseen
            self._born.update(dict.fromkeys(keys, False))
        depends = any(self._born.get(key, True) for key in keys)
        self._check_writes(operator, args, kwargs)
        self._note_inputs(inputs)
        self._note_random(operator, args, kwargs)
        result = self._treat(self._kind(operator, args, kwargs, inputs, depends), operator, args, kwargs)
        changes = depends or draws_random(operator, args, kwargs)
        if changes:
            self._note_written(operator, args, kwargs)
        # A tensor of constants that is asked for on the arguments' device would be on the GPU, too.
        self.note_born(result, changes or kwargs.get("device") is not None, keys)
        return result

    def _kind(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], depends: bool
    ) -> Kind:
        if base_name(operator) in self.policy.operations:
            return Kind.BREAK
        device = self.backend.device_type
        kind = classify(operator, args, kwargs, device)
        moves = kind is Kind.HOIST and base_name(operator) == "aten::_to_copy"
        if not moves and not any(tensor.device.type == device for tensor in inputs):
            return Kind.PLAIN  # host work on host data: not a part of the graph
        if self.backend.reads_host_memory and not depends and kind is Kind.READ:
            return Kind.HOST  # on a GPU this would be host data, made from constants
        if kind is Kind.COLLECTIVE:
            return Kind.BREAK if self.policy.break_collectives else Kind.PLAIN
        return kind

    def _treat(self, kind: Kind, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kind is Kind.FORBIDDEN:
            self._refuse(
                HostileOperationError(
                    f"{base_name(operator)} at {where()} gives a tensor other memory, which a graph cannot follow: "
                    "replace it by an operation that writes to fixed memory, or name the submodule in eager_modules."
                )
            )
        if kind is Kind.HOST:
            self.reads_constants = True
            with _torch.without_dispatch_modes():
                return operator(*args, **kwargs)
        if kind is Kind.HOIST:
            return self._treat_hoist(operator, args, kwargs)
        if kind is Kind.READ:
            return self._read(operator, args, kwargs)
        return self._break(operator, args, kwargs) if kind is Kind.BREAK else self._plain(operator, args, kwargs)

    def _treat_hoist(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if base_name(operator) == "aten::_to_copy":
            return self._hoist(args[0], lambda: operator(*args, **kwargs), base_name(operator))
        # A write or an index with host data: copy the host data to the device once, then do the rest there.
        device = next(tensor.device for tensor in operands(args) if tensor.device.type == self.backend.device_type)

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor) and value.device.type == "cpu":
                return self._hoist(value, lambda: value.to(device), base_name(operator))
            return type(value)(moved(item) for item in value) if isinstance(value, (list, tuple)) else value

        return self._plain(operator, moved(args), kwargs)

    def _plain(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return operator(*args, **kwargs)

    def _read(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _break(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _hoist(self, source: Tensor, make: Callable[[], Tensor], name: str) -> Tensor:
        raise NotImplementedError

    # -- functions -------------------------------------------------------------------------------------------------

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Treat one call of a torch function."""
        if function in self.policy.functions:
            return self.opaque(function, args, kwargs, name=_name(function), place=where(), kind="break")
        if function in _TEXT_READERS and self._is_content(args[0]):
            return self._read_text(function, args, kwargs)
        if function in _HOST_READERS and self.backend.reads_host_memory and self._is_content(args[0]):
            return function(self._read_memory(args[0], _name(function)), *args[1:], **kwargs)
        if function in _HOST_ARGUMENT_READERS and self.backend.reads_host_memory:
            args, kwargs = args[:1] + self._read_all(args[1:], function), self._read_all(kwargs, function)
        if function in _HOST_MAKERS or function is Tensor.new:
            # The tensors inside of a list are read without the dispatcher seeing it.
            args, kwargs = self._read_listed(args, function), self._read_listed(kwargs, function)
        if function in _HOST_MAKERS and not self.backend.reads_host_memory:
            return self._make(function, args, kwargs)
        result = function(*args, **kwargs)
        if function in _HOST_MAKERS and kwargs.get("device") is not None:
            self.note_born(result, True)
        return result

    def _is_content(self, value: Any) -> bool:
        """Tell whether a value is a tensor whose content a replay may find changed."""
        if not isinstance(value, Tensor) or value.device.type != self.backend.device_type:
            return False
        return not self.backend.reads_host_memory or self._born.get(_torch.storage_key(value), True)

    def _read_all(self, value: Any, function: Any) -> Any:
        """Replace the tensors of a nested argument by their content on the host, guarded."""
        if self._is_content(value):
            return self._read_memory(value, _name(function))
        if isinstance(value, dict):
            return {key: self._read_all(item, function) for key, item in value.items()}
        return type(value)(self._read_all(item, function) for item in value) if type(value) in (list, tuple) else value

    def _read_listed(self, arguments: Any, function: Any) -> Any:
        """Do so for the lists and tuples among arguments, and leave arguments that are tensors."""
        if isinstance(arguments, dict):
            return {key: self._read_listed((item,), function)[0] for key, item in arguments.items()}
        return tuple(item if isinstance(item, Tensor) else self._read_all(item, function) for item in arguments)

    def _make(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor from host data; where it is to be on the device, make it on the host and hoist the copy."""
        device = _target_device(function, args, kwargs)
        if device.type != self.backend.device_type or isinstance(_data(function, args, kwargs), Tensor):
            return function(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        source = function(*args, **{**kwargs, "device": "cpu"})
        value = self._hoist(source, lambda: source.to(device), _name(function))
        return value.requires_grad_() if requires_grad else value

    def _read_memory(self, tensor: Tensor, name: str) -> Tensor:
        """Return a tensor's content on the host."""
        raise NotImplementedError

    def _read_text(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def opaque(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, place: Where,
        kind: str,
    ) -> Any:  # fmt: skip
        """Run a call whose operations are not looked at: a compiled submodule, or one that is to be an eager break."""
        raise NotImplementedError

    # -- memory ----------------------------------------------------------------------------------------------------

    def note_born(self, result: Any, depends: bool, inputs: Collection[int] = ()) -> None:
        """Note the storages that a result brought into being."""
        for tensor in operands(result):
            key = _torch.storage_key(tensor)
            if key not in inputs:
                self._born[key] = depends

    def _note_unseen(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note what a call that is not looked at brought into being; it may have written to any argument, too."""
        self.runs_unseen = True
        inputs = {_torch.storage_key(tensor) for tensor in tensors_in((args, kwargs))}
        self._born.update(dict.fromkeys(inputs & self._born.keys(), True))
        self.note_born(tensors_in(result), True, inputs)

    def _note_written(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in _written(operator, args, kwargs):
            key = _torch.storage_key(tensor)
            if key in self._born:  # not so for an argument of which an empty part was "written"
                self._born[key] = True

    def _check_writes(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in _written(operator, args, kwargs):
            key = _torch.storage_key(tensor)
            if key not in self._born and tensor.numel():
                cure = "Copy the tensor before writing to it, or name the submodule in eager_modules."
                self._refuse_write(tensor, f"{base_name(operator)} at {where()}", cure)

    def _refuse_write(self, tensor: Tensor, who: str, cure: str) -> None:
        what = self._protected.get(_torch.storage_key(tensor), "a tensor that outlives the call")
        self._refuse(StateWriteError(f"{who} writes to {what}: a replay would repeat or miss the write. {cure}"))

    def _note_inputs(self, inputs: list[Tensor]) -> None:
        for tensor in inputs:
            key = _torch.storage_key(tensor)
            if key in self._born or key in self._protected:
                continue
            self.externals.setdefault(key, tensor)
            if tensor.device.type == "cpu" and not self.backend.reads_host_memory:
                mark = (key, int(tensor.storage_offset()), tensor.shape)
                if mark not in self.host_guards:
                    self.host_guards[mark] = HostGuard.of(tensor, where())

    def _note_random(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not draws_random(operator, args, kwargs):
            return
        self.random = True
        if generator_of(operator, args, kwargs) is not None:
            self._refuse(
                HostileOperationError(
                    f"{base_name(operator)} at {where()} draws from a generator of its own, whose state a graph does "
                    "not advance: draw from the default generator, or pass the numbers in."
                )
            )
        if not self.backend.reads_host_memory and all(
            tensor.device.type == "cpu" for tensor in operands((args, kwargs))
        ):
            device = Arguments(operator, args, kwargs, "").get("device")
            if device is None or torch.device(device).type == "cpu":
                self._refuse(
                    HostileOperationError(
                        f"{base_name(operator)} at {where()} draws random numbers on the host, which a replay would "
                        "not draw again: draw them on the device, or pass them in."
                    )
                )

    def _refuse(self, error: Exception) -> None:
        self.error = self.error or error  # kept, since the module may swallow what is raised here
        raise error


class DryRun(Watch):
    """Executes a forward as eager would, notes what a capture will meet, and makes the hoists."""

    def __init__(self, backend: Backend, protected: Mapping[int, str], policy: Policy) -> None:
        super().__init__(backend, protected, policy)
        self.findings: list[Finding] = []
        self.hoists: list[Hoist] = []
        self.written: tuple[Tensor, ...] = ()  # buffers that eager modules write to
        self.failures: set[tuple[str, Where]] = set()  # operations that raise in eager, too, and where
        self._hoist_of: dict[int, Hoist] = {}
        self._results: list[weakref.ref[Tensor]] = []

    def survivors(self, results: list[Tensor]) -> list[Tensor]:
        """Return tensors that the forward made and that still live, besides its results and what those are views of."""
        known = {_torch.storage_key(tensor) for tensor in results}
        alive = [tensor for reference in self._results if (tensor := reference()) is not None]
        return [tensor for tensor in alive if _torch.storage_key(tensor) not in known]

    def note_born(self, result: Any, depends: bool, inputs: Collection[int] = ()) -> None:
        """Note the storages that a result brought into being, and the tensor objects, weakly."""
        super().note_born(result, depends, inputs)
        self._results.extend(weakref.ref(tensor) for tensor in operands(result))

    def _plain(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return operator(*args, **kwargs)
        except RuntimeError:
            self.failures.add((base_name(operator), where()))
            raise

    def find(self, kind: str, name: str, place: Where | None = None) -> None:
        """Note something that a capture cannot simply record."""
        self.findings.append(Finding(kind, name, place or where()))

    def _read(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.find("guard", base_name(operator))
        return operator(*args, **kwargs)

    def _read_memory(self, tensor: Tensor, name: str) -> Tensor:
        self.find("guard", name)
        with self.unwatched():
            return _content(tensor)

    def _read_text(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.find("guard", _name(function))
        return function(*args, **kwargs)

    def _break(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.find("break", base_name(operator))
        return operator(*args, **kwargs)

    def _hoist(self, source: Tensor, make: Callable[[], Tensor], name: str) -> Tensor:
        self.find("hoist", name)
        with torch.inference_mode(False), torch.no_grad(), self.unwatched():
            hoist = Hoist(source.detach().clone(), make())
            given = hoist.value.clone()
        self.hoists.append(hoist)
        self._hoist_of[_torch.storage_key(given)] = hoist
        self.note_born(given, False)
        return given

    def _check_writes(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._check_writes(operator, args, kwargs)
        for tensor in _written(operator, args, kwargs):
            hoist = self._hoist_of.get(_torch.storage_key(tensor))
            if hoist is not None:
                hoist.written = True

    def opaque(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, place: Where,
        kind: str,
    ) -> Any:  # fmt: skip
        """Run the call unseen."""
        self.find(kind, name, place)
        given = [tensor for tensor in tensors_in((args, kwargs)) if _torch.storage_key(tensor) not in self._born]
        versions = [_version(tensor) for tensor in given]
        with self.unwatched():
            result = function(*args, **kwargs)
        for tensor, version in zip(given, versions, strict=True):
            if _version(tensor) != version:
                self._refuse_write(tensor, f"{kind} {name} at {place}", "Give it a copy.")
        self._note_unseen(args, kwargs, result)
        return result


class CaptureRun(Watch):
    """Treats the operations of a forward inside a capture.

    Args:
        capture: The open capture.
        protected: Storages that the forward must not write to.
        policy: What is a break beyond the table.
        hoists: What the dry run made, in order.
        failures: Operations that the forward tries and that raise in eager, too, and where.
    """

    def __init__(
        self, capture: BreakableCUDAGraphCapture, protected: Mapping[int, str], policy: Policy, hoists: list[Hoist],
        failures: Collection[tuple[str, Where]] = (),
    ) -> None:  # fmt: skip
        super().__init__(capture.backend, protected, policy)
        self._capture = capture
        self._failures = failures
        self._hoists = iter(hoists)

    def active(self) -> bool:
        """Treat operations while a segment is open; an eager break runs as it is."""
        return super().active() and self._capture.in_segment

    def _plain(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return operator(*args, **kwargs)
        except RuntimeError as error:
            # Out of memory is no property of the operation. Where the dry run passed, the capture is to blame.
            name, place = base_name(operator), where()
            if isinstance(error, torch.OutOfMemoryError) or (name, place) in self._failures:
                raise
            self._refuse(OperationFailedError(name, place, error))
            raise AssertionError from error

    def _read(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, place = base_name(operator), where()
        if name == "aten::copy_":
            target, source = args[0], args[1]
            return target.copy_(self._capture.guard(_to_host, (source,), {}, name=name, place=place))
        if "non_blocking" in kwargs:
            kwargs = {**kwargs, "non_blocking": False}  # the value is compared at once
        return self._capture.guard(operator, args, kwargs, name=name, place=place)

    def _read_memory(self, tensor: Tensor, name: str) -> Tensor:
        value: Tensor = self._capture.guard(_content, (tensor,), {}, name=name, place=where())
        return value

    def _read_text(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._capture.guard(function, args, kwargs, name=_name(function), place=where())

    def _break(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._capture.run_eagerly(operator, args, kwargs, name=base_name(operator))

    def _hoist(self, source: Tensor, make: Callable[[], Tensor], name: str) -> Tensor:
        hoist = next(self._hoists, None)
        if hoist is None or not same_value(hoist.source, source):
            self._refuse(
                HostileOperationError(
                    f"{name} at {where()} copies host data that differs from one forward to the next: pass it in as an "
                    "argument, or draw it on the device."
                )
            )
            raise AssertionError
        if hoist.written:
            return hoist.value.clone()
        self.note_born(hoist.value, False)
        return hoist.value

    def opaque(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, place: Where,
        kind: str,
    ) -> Any:  # fmt: skip
        """Make the call an eager break, or capture compiled code unseen where the backend can."""
        with self.unwatched():
            if kind == "compiled" and not self.backend.executes_while_capturing:
                result = function(*args, **kwargs)
            else:
                result = self._capture.run_eagerly(function, args, kwargs, name=name, place=place)
        self._note_unseen(args, kwargs, result)
        return result


class _DispatchMode(_torch.DispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._watch.active():
            return func(*args, **kwargs)
        if isinstance(func, _torch.HigherOrderOperator):
            # It takes functions, and may choose between them by a value.
            return self._watch.opaque(func, args, kwargs, name=func.name(), place=where(), kind="break")
        if self._watch.is_composite(func):
            # Under inference mode composite operations arrive whole, and could hide a host read or a copy.
            with self:
                return func.decompose(*args, **kwargs)
        return self._watch.operation(func, args, kwargs)


class _FunctionMode(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._watch.active():
            return func(*args, **kwargs)
        return self._watch.function(func, args, kwargs)


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for position, name in _torch.written_arguments(operator):
        yield from operands(args[position] if position < len(args) else kwargs.get(name))


def _content(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _name(function: Any) -> str:
    return getattr(function, "__name__", repr(function))


def _target_device(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    owner = args[0] if function is Tensor.new_tensor else _data(function, args, kwargs)
    return torch.device(owner.device) if isinstance(owner, Tensor) else torch.get_default_device()


def _data(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function makes a tensor from."""
    position = 1 if function is Tensor.new_tensor else 0
    return args[position] if position < len(args) else kwargs.get("data", kwargs.get("obj"))
