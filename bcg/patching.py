"""Put calls of submodules and functions in a capture's hands, without other threads noticing.

A patch is an instance attribute or a module attribute that stands for the time of one forward. It acts on the thread
that captures alone: every other thread that comes by is sent on to the original.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from bcg import _torch
from bcg.errors import CaptureError, ConfigError
from bcg.functions import original_function, redirected
from bcg.interception import Watch
from bcg.source import where

_MISSING = object()
_compiled_code = threading.local()  # whether this thread is in compiled code of a captured forward


@contextlib.contextmanager
def patched(
    watch: Watch,
    module: nn.Module,
    broken: Collection[str],
    functions: Collection[tuple[str, Any]],
    compiled: Mapping[str, Callable[..., Any]],
) -> Iterator[None]:
    """Send calls of some submodules and functions to a watch while a block runs.

    Args:
        watch: Takes the calls, through `Watch.opaque`.
        module: The module that is captured.
        broken: Names of submodules that are to be eager breaks.
        functions: Names and Python functions that are to be eager breaks.
        compiled: By the names of submodules (the module itself is the empty name), what runs in place of their
            forwards.

    Yields:
        Nothing; the patches are undone when the block ends.
    """
    with contextlib.ExitStack() as stack:
        for name, child in module.named_modules():
            if name and name in broken:
                stack.enter_context(
                    _replaced(child.__dict__, "forward", _sent(watch, child.forward, name, "module break"))
                )
            elif name in compiled:
                send = _sent(watch, child.forward, name or type(child).__name__, "compiled", compiled[name])
                stack.enter_context(_replaced(child.__dict__, "forward", send))
            else:
                _patch_compiled(stack, watch, child, name)
        if functions:
            named = [(name, original_function(function)) for name, function in functions]
            pairs = ((function, _sent(watch, function, name, "break")) for name, function in named)
            stack.enter_context(redirected(*pairs))
        yield


def broken_modules(module: nn.Module, patterns: Collection[str], classes: Collection[type]) -> frozenset[str]:
    """Return the names of submodules that match a pattern or are of a class, without those inside of another."""
    names: list[str] = []
    for name, child in module.named_modules():
        if any(name.startswith(outer + ".") for outer in names):
            continue
        if name and (type(child) in classes or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)):
            names.append(name)
    return frozenset(names)


def resolve_function(name: str) -> Any:
    """Return the function that ``package.module:function`` names.

    Raises:
        ConfigError: There is none.
    """
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"eager_functions names {name!r}, which cannot be found ({error}): write package.module:function."
        ) from error
    return found


def is_torch_function(function: Any) -> bool:
    """Tell whether calls of a function reach a TorchFunctionMode, so that no patch is needed."""
    return function in torch.overrides.get_testing_overrides()


def compiled_submodules(module: nn.Module) -> list[str]:
    """Return the names of submodules (the module itself is the empty name) that torch.compile has compiled."""
    return [name for name, child in module.named_modules() if _torch.is_compiled(child)]


def _patch_compiled(stack: contextlib.ExitStack, watch: Watch, child: nn.Module, name: str) -> None:
    attribute = _torch.compiled_attribute(child)
    if attribute is not None:
        send = _sent(watch, getattr(child, attribute), name or type(child).__name__, "compiled")
        stack.enter_context(_replaced(child.__dict__, attribute, send))


def _sent(
    watch: Watch, original: Callable[..., Any], name: str, kind: str, substitute: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return what sends a call on: to the watch on the thread that captures, to the original on any other.

    Nothing is watched inside of compiled code, so an eager break that is called there would be captured unseen.
    """
    owner = threading.get_ident()
    target = _marked(substitute or original) if kind == "compiled" else original

    @functools.wraps(original)
    def send(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:
            return original(*args, **kwargs)
        if not watch.active():
            if kind != "compiled" and getattr(_compiled_code, "runs", False):
                raise CaptureError(f"{name}, which is to run eagerly, is called by compiled code.")
            return original(*args, **kwargs)
        return watch.opaque(target, args, kwargs, name=name, place=where(), kind=kind)

    return send


def _marked(compiled: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        _compiled_code.runs = True
        try:
            return compiled(*args, **kwargs)
        finally:
            _compiled_code.runs = False

    return run


@contextlib.contextmanager
def _replaced(namespace: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    before = namespace.get(name, _MISSING)
    namespace[name] = value
    try:
        yield
    finally:
        if before is _MISSING:
            namespace.pop(name, None)
        else:
            namespace[name] = before
