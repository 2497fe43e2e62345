"""Read the state around a call that changes what its kernels do, without being an argument or part of the module.

A graph holds the kernels that were chosen while it was captured. The same call under another autocast, precision or
SDPA backend chooses others, so this state is part of every signature. It is read in every call: plain tuples, one C
call for each flag.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import torch

from bcg import _torch

__all__ = ["AmbientState", "ambient_refusal", "ambient_state", "call_scope", "describe"]

AmbientState: TypeAlias = tuple[Any, ...]

_FP32_OPERATIONS: Final = tuple(
    (backend, operation) for backend in ("cuda", "mkldnn") for operation in ("matmul", "conv", "rnn")
)
_FLAGS: Final[dict[str, Callable[[], Any]]] = {
    "gradients": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "default dtype": torch.get_default_dtype,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "deterministic algorithms only warn": torch.is_deterministic_algorithms_warn_only_enabled,
    # What a forward's own `autocast(device_type)` without a dtype takes; an outer, even disabled, autocast sets it.
    "autocast dtype of cpu": functools.partial(torch.get_autocast_dtype, "cpu"),
    "autocast dtype of cuda": functools.partial(torch.get_autocast_dtype, "cuda"),
    "SDPA priority order": _torch.sdpa_priority_order,
    **_torch.flag_getters(),
}
_GETTERS: Final = tuple(_FLAGS.values())
_NAMES: Final = (
    *_FLAGS,
    *(f"float32 precision of {backend} {operation}" for backend, operation in _FP32_OPERATIONS),
    "autocast",
    "default device",
    "current CUDA device",
)
_AUTOCAST_OFF: Final = "off"


def ambient_state() -> AmbientState:
    """Return everything around a call that chooses kernels, by value.

    Returns:
        A hashable tuple; its order is private, `describe` reads it.

    Example:
        >>> with torch.no_grad():
        ...     inside = ambient_state()
        >>> inside == ambient_state()
        False
    """
    return (
        *[getter() for getter in _GETTERS],
        *[_torch.fp32_precision(backend, operation) for backend, operation in _FP32_OPERATIONS],
        _autocast_state(),
        _default_device(),
        torch.cuda.current_device() if torch.cuda.is_initialized() else None,
    )


def _autocast_state() -> object:
    if not _torch.any_autocast():
        return _AUTOCAST_OFF
    enabled = [
        (device_type, torch.get_autocast_dtype(device_type))
        for device_type in _torch.autocast_device_types()
        if torch.is_autocast_enabled(device_type)
    ]
    return (*enabled, "with cache" if torch.is_autocast_cache_enabled() else "without cache")


def _default_device() -> torch.device | None:
    # `torch.get_default_device` allocates a tensor to learn the index; the current device is in the state anyway.
    contexts = [mode for mode in _torch.function_modes() if isinstance(mode, _torch.DeviceContext)]
    return contexts[-1].device if contexts else None


def ambient_refusal() -> str | None:
    """Say why no graph may be used now, whatever the call is.

    A replay runs no Python and dispatches nothing, so whoever watches or rewrites operations would see none.

    Returns:
        The reason, as the rest of a sentence that begins "the call runs"; None where nothing stands in the way.

    Example:
        >>> ambient_refusal() is None
        True
    """
    for mode in _torch.function_modes():
        if not isinstance(mode, _torch.DeviceContext):
            return f"under the function mode {type(mode).__name__}, which a replay would bypass"
    for mode in _torch.dispatch_modes():
        return f"under the dispatch mode {type(mode).__name__}, which a replay would bypass"
    return next((reason for active, reason in _TRANSFORMS if active()), None)


_TRANSFORMS: Final[tuple[tuple[Callable[[], bool], str], ...]] = (
    (torch.compiler.is_compiling, "inside of torch.compile or torch.export, which would trace into the runner"),
    (_torch.is_jit_tracing, "inside of torch.jit.trace, which would record the replay"),
    (_torch.in_functorch_transform, "inside of a torch.func transform, which a replay would bypass"),
    (lambda: _torch.forward_ad_level() >= 0, "inside of forward-mode differentiation, which a replay would bypass"),
    (_torch.saved_tensor_hooks_active, "under saved-tensor hooks, which a replay would bypass"),
)


@contextlib.contextmanager
def call_scope(state: AmbientState) -> Iterator[None]:
    """Run a block under the modes that surrounded a call, as far as they belong to the caller.

    These are gradient and inference mode, autocast, and a default device. Flags of the whole process, such as TF32 or
    the SDPA backends, stay as they are now: the next calls will find them so.

    Args:
        state: What `ambient_state` returned in the call.

    Example:
        >>> with torch.inference_mode():
        ...     inside = ambient_state()
        >>> with call_scope(inside):
        ...     ambient_state() == inside
        True
    """
    flags = dict(zip(_NAMES, state, strict=True))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(flags["inference mode"]))
        stack.enter_context(torch.set_grad_enabled(flags["gradients"]))
        if flags["default device"] not in (None, _default_device()):
            stack.enter_context(flags["default device"])
        stack.enter_context(_autocast_as(flags))
        yield


@contextlib.contextmanager
def _autocast_as(flags: dict[str, Any]) -> Iterator[None]:
    """Set autocast flag by flag: the public context manager would also end the caller's cache of casted weights."""
    before, cache = dict(zip(_NAMES, ambient_state(), strict=True)), torch.is_autocast_cache_enabled()
    _set_autocast(flags)
    try:
        yield
    finally:
        _set_autocast(before)
        torch.set_autocast_cache_enabled(cache)


def _set_autocast(flags: dict[str, Any]) -> None:
    state = flags["autocast"]
    *enabled, cache = state if isinstance(state, tuple) else ("with cache",)
    dtypes = {"cpu": flags["autocast dtype of cpu"], "cuda": flags["autocast dtype of cuda"], **dict(enabled)}
    for device_type, dtype in dtypes.items():
        torch.set_autocast_dtype(device_type, dtype)
    for device_type in _torch.autocast_device_types():
        if torch.is_autocast_enabled(device_type) != (device_type in dict(enabled)):
            torch.set_autocast_enabled(device_type, device_type in dict(enabled))
    if enabled:
        torch.set_autocast_cache_enabled(cache == "with cache")


def describe(expected: AmbientState, got: AmbientState) -> list[str]:
    """Name every flag that differs between two states.

    Args:
        expected: The state at capture.
        got: The state of a call.

    Returns:
        One line for each, such as ``gradients: expected True, got False``.
    """
    return [
        f"{name}: expected {_text(one)}, got {_text(other)}"
        for name, one, other in zip(_NAMES, expected, got, strict=True)
        if one != other
    ]


def _text(value: object) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        *enabled, cache = value
        return ", ".join([*(f"{device_type} {dtype}" for device_type, dtype in enabled), str(cache)])
    return str(value)
