"""Compare plain Python values by type and value, and other objects by a key that the user registers."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

import torch

__all__ = [
    "EXACT_TYPES",
    "UnkeyableError",
    "key_function_of",
    "plain_form",
    "register_key_function",
    "unregister_key_function",
]

MAX_SET_ELEMENTS: Final = 2048


class UnkeyableError(TypeError):
    """A value has no form that can be compared by value; the message completes "argument `x` ..."."""


# Values of these types compare by value and hash, within one type.
EXACT_TYPES: Final[frozenset[type]] = frozenset(
    {
        type(None),
        bool,
        int,
        str,
        bytes,
        type(...),
        type(NotImplemented),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
        # A bare `object()` is a sentinel: its identity is its value, and a form keeps it alive.
        object,
    }
)


def plain_form(value: object) -> tuple[Any, ...]:
    """Return a hashable stand-in of a plain value: equal exactly when type and value are.

    Unlike the values themselves, the forms of ``1``, ``1.0`` and ``True`` differ, those of ``0.0`` and ``-0.0`` too,
    and two ``nan`` are equal.

    Args:
        value: A number, string, None, enum member, torch constant, slice, range, set, numpy scalar, class or
            module-level function, or a tuple of such.

    Returns:
        The form. It keeps what it compares by identity (classes, functions) alive.

    Raises:
        UnkeyableError: The value is nothing of the kind.

    Example:
        >>> plain_form(1) == plain_form(True)
        False
    """
    kind = type(value)
    if kind in EXACT_TYPES:
        return (kind, value)
    make = _FORMS.get(kind)
    if make is not None:
        return (kind, make(value))
    if isinstance(value, Enum):
        return (kind, value.name or repr(value))  # a combination of flags may have no name
    if isinstance(value, type):
        return (type, value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and not value.dtype.hasobject:
        return (kind, str(value.dtype), value.tobytes())
    raise UnkeyableError(f"is {_article(kind)}")


def _article(kind: type) -> str:
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"an object of type {name}"


def _float_form(value: float) -> object:
    if value != value:
        return "nan"
    return value or repr(value)  # 0.0 and -0.0 are equal as numbers, not as text


def _tuple_form(value: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(plain_form(item) for item in value)


def _set_form(value: set[object] | frozenset[object]) -> frozenset[object]:
    if len(value) > MAX_SET_ELEMENTS:
        raise UnkeyableError(f"is a set of more than {MAX_SET_ELEMENTS} elements")
    return frozenset(plain_form(item) for item in value)


def _function_form(value: types.FunctionType) -> object:
    # A closure or a lambda can mean another thing at each call; what a module's own name leads to cannot.
    found: object = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not value:
        raise UnkeyableError(f"is a local function ({value.__qualname__})")
    return value


def _builtin_form(value: types.BuiltinFunctionType) -> object:
    # `torch.relu` belongs to nothing, `math.sqrt` to its module, `dict.fromkeys` to a class; `x.sum` to a tensor.
    if not isinstance(value.__self__, (type(None), types.ModuleType, type)):
        raise UnkeyableError(f"is a method of an object ({value.__qualname__})")
    return value


_FORMS: Final[dict[type, Callable[[Any], object]]] = {
    float: _float_form,
    complex: lambda value: (_float_form(value.real), _float_form(value.imag)),
    tuple: _tuple_form,
    set: _set_form,
    frozenset: _set_form,
    slice: lambda value: _tuple_form((value.start, value.stop, value.step)),
    range: lambda value: (value.start, value.stop, value.step),
    types.FunctionType: _function_form,
    types.BuiltinFunctionType: _builtin_form,
}


# --- registered types -------------------------------------------------------------------------------------------------

_KEY_FUNCTIONS: Final[dict[type, Callable[[Any], Any]]] = {}


def register_key_function(kind: type, key_function: Callable[[Any], Any]) -> None:
    """Make instances of a type leaves that are compared by a key; see `bcg.register_key`.

    Args:
        kind: The type, subclasses included.
        key_function: Returns a hashable key of an instance.

    Raises:
        TypeError: Values of this type are compared by value already.
    """
    if kind in EXACT_TYPES or kind in _FORMS:
        raise TypeError(f"values of type {kind.__qualname__} are compared by value already")
    _KEY_FUNCTIONS[kind] = key_function


def unregister_key_function(kind: type) -> None:
    """Undo `register_key_function`.

    Args:
        kind: The type that was registered.
    """
    _KEY_FUNCTIONS.pop(kind, None)


def key_function_of(kind: type) -> Callable[[Any], Any] | None:
    """Return the key function registered for a type or for the nearest of its bases.

    Args:
        kind: Any type.

    Returns:
        The function, or None.
    """
    return next((_KEY_FUNCTIONS[base] for base in kind.__mro__ if base in _KEY_FUNCTIONS), None)
