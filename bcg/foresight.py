"""Foresee what a capture meets where the device is not the host, on a machine that has no such device.

On the host a copy from host to device is nothing, and a forward there does not show it. So the forward runs once more
with tensors that say they are on the `meta` device and keep their content on the host: every operation computes what it
would, host reads give the true values, shapes that depend on data are the true ones, and what crosses from one side to
the other is seen.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from bcg import _torch
from bcg.backends.tape import TapeBackend
from bcg.config import RunnerConfig
from bcg.functions import redirected
from bcg.interception import Finding, Policy, Watch
from bcg.layout import operands
from bcg.operations import Kind, base_name
from bcg.patching import is_torch_function, patched, resolve_function
from bcg.signature import Call
from bcg.source import Where, naming, where

FAR: Final = "meta"
_NEAR: Final = "cpu"
_FORWARDS: Final = 2  # the first one fills caches, which no later one does


def foresee(module: nn.Module, call: Call, config: RunnerConfig, eager_modules: Collection[str]) -> list[Finding]:
    """Run a call's forward on the host as if the module and its arguments were on a device.

    A copy of the module runs, which shares the parameters' memory: the module itself is left alone, and other threads
    may call it meanwhile. Random numbers go on as if nothing had run.

    Args:
        module: A module on the host.
        call: A call of it that can be captured there: it writes to nothing that outlives it.
        config: What else is an eager break.
        eager_modules: Names of the submodules that run as eager breaks.

    Returns:
        Hoists, guards and breaks of a forward in its steady state, in their order.

    Raises:
        Exception: What copying the module raises, or the forward where it cannot run on tensors of another device.
    """
    functions = {name: resolve_function(name) for name in config.eager_functions}
    torch_functions = frozenset(filter(is_torch_function, functions.values()))
    others = [pair for pair in functions.items() if pair[1] not in torch_functions]
    policy = Policy(functions=torch_functions, break_collectives=config.collectives == "break")
    autocast = functools.partial(_autocast, torch.autocast)
    session = _Session()
    state = _far_state(module, session)
    try:
        far = copy.deepcopy(module, dict(state))
        with torch.random.fork_rng(devices=[]), naming(far):
            for _ in range(_FORWARDS):
                run = _FarRun(session, policy)
                args, kwargs = call.rebuild([FarTensor.of(tensor.detach().clone(), session) for tensor in call.tensors])
                patches = patched(run, far, eager_modules, others, {})
                with redirected((torch.autocast, autocast)), patches, run.watching():
                    far(*args, **kwargs)
        return run.findings
    finally:
        session.is_open = False
        for tensor in state.values():
            tensor.content = torch.empty(0)  # a cache that keeps the copy must not keep the weights


def _far_state(module: nn.Module, session: _Session) -> dict[int, FarTensor]:
    """Return far tensors for a module's parameters and buffers, by the ids of these."""
    contents = {id(parameter): parameter.detach() for parameter in module.parameters()}
    # An eager submodule may write to its buffers.
    contents |= {id(buffer): buffer.detach().clone() for buffer in module.buffers()}
    return {key: FarTensor.of(content, session) for key, content in contents.items()}


def _autocast(
    original: Callable[..., Any], device_type: str, *args: Any, **kwargs: Any
) -> contextlib.AbstractContextManager[Any]:
    """Stand for `torch.autocast`, which refuses the `meta` device; no finding depends on what it casts to."""
    return contextlib.nullcontext() if device_type == FAR else original(device_type, *args, **kwargs)


@dataclass
class _Session:
    """Whether far tensors are told apart now."""

    is_open: bool = True


class FarTensor(Tensor):
    """A tensor that says it is on the `meta` device, with its content on the host.

    One that a cache keeps beyond its session is as good as its content: operations give host tensors then.

    Attributes:
        content: The host tensor.
    """

    content: Tensor
    session: _Session
    __torch_function__ = _torch.without_torch_function  # type: ignore[assignment]  # torch types it as a method

    @classmethod
    def of(cls, content: Tensor, session: _Session) -> FarTensor:
        """Let a host tensor be far away; memory is shared."""
        far: FarTensor = _torch.wrapper_of(cls, content, FAR)
        far.content, far.session = content, session
        return far

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it without the function
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        (session, *_) = [tensor.session for tensor in _far_tensors((args, kwargs))]
        return _run(session, func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's keyword is of no use here
        return f"FarTensor({self.content!r})"


def _host_tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [tensor for tensor in operands(args) if tensor.device.type == _NEAR]


def _far_tensors(value: Any) -> Iterator[FarTensor]:
    if isinstance(value, FarTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _far_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _far_tensors(item)


def _map(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Map the tensors of an operation's arguments or results."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, function) for item in value)
    return {key: _map(item, function) for key, item in value.items()} if isinstance(value, dict) else value


def _run(session: _Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the host; what would be on the device is far."""
    device = kwargs.get("device")
    inputs = list(_far_tensors((args, kwargs)))
    is_far = bool(inputs) if device is None else torch.device(device).type == FAR
    if is_far and device is not None:
        kwargs = {**kwargs, "device": _NEAR}
    given = {id(tensor.content): tensor for tensor in inputs}

    def content(tensor: Tensor) -> Tensor:
        return tensor.content if isinstance(tensor, FarTensor) else tensor

    def wrap(tensor: Tensor) -> Tensor:
        argument = given.get(id(tensor))
        if argument is None:
            return FarTensor.of(tensor, session) if is_far and session.is_open else tensor
        if (argument.shape, argument.stride()) != (tensor.shape, tensor.stride()):
            raise NotImplementedError(f"{base_name(operator)} changes the shape of a tensor in place")
        return argument

    result = operator(*_map(args, content), **_map(kwargs, content))
    return _map(result, wrap)


class _FarBackend(TapeBackend):
    name = FAR
    device_type = FAR
    reads_host_memory = False


class _FarRun(Watch):
    """Sees the operations of a forward on far tensors, and notes what a capture would meet."""

    def __init__(self, session: _Session, policy: Policy) -> None:
        super().__init__(_FarBackend(), {}, policy)
        self.findings: list[Finding] = []
        self._session = session
        self._is_muted = False

    def find(self, kind: str, name: str, place: Where | None = None) -> None:
        """Note something that a capture cannot simply record."""
        if not self._is_muted:
            self.findings.append(Finding(kind, name, place or where()))

    def is_composite(self, operator: Any) -> bool:
        """Tell whether an operation is to be taken apart: as on the host, where it runs."""
        return _torch.can_decompose(operator, _NEAR)

    def operation(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note what an operation is, and run it."""
        kind = self._kind(operator, args, kwargs, list(_far_tensors((args, kwargs))), True)
        if kind not in (Kind.PLAIN, Kind.FORBIDDEN):
            copies = kind is Kind.HOIST and base_name(operator) != "aten::_to_copy"
            for _ in _host_tensors(args) if copies else (None,):
                self.find(kind.value, base_name(operator))
        return _run(self._session, operator, args, kwargs)

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note what a function is that the dispatcher does not see, and run it."""
        if function is Tensor.tolist and isinstance(args[0], FarTensor):  # torch refuses it for a subclass
            return self._read_memory(args[0], "tolist").tolist()
        return super().function(function, args, kwargs)

    def _hoist(self, source: Tensor, make: Callable[[], Tensor], name: str) -> Tensor:
        self.find("hoist", name)
        return FarTensor.of(source, self._session)

    def _read_memory(self, tensor: Tensor, name: str) -> Tensor:
        self.find("guard", name)
        return self._content(tensor)

    def _read_text(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.find("guard", function.__name__)
        return function(self._content(args[0]), *args[1:], **kwargs)

    def _content(self, tensor: Tensor) -> Tensor:
        return tensor.content.detach().clone() if isinstance(tensor, FarTensor) else tensor

    def opaque(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, place: Where,
        kind: str,
    ) -> Any:  # fmt: skip
        """Run a call that is an eager break: what it meets is no part of the capture."""
        self.find(kind, name, place)
        outer, self._is_muted = self._is_muted, True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_muted = outer
