"""Put a module's Python state back as it was before a forward that was not the user's.

Warm-up forwards and captures run the module's Python. Where that counts, caches or appends, the next real call would
find a state that eager alone would not have led to. What is remembered is what `bcg._state_walk` opens: attributes,
containers, slots, bound methods, the closures, defaults and attributes of functions, and the global hooks.

Containers and objects stay the ones they were, with their contents put back by reference. Of what another thread writes
to the same objects in the meantime nobody can tell that it was not the forward, and it is undone with the rest.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable
from operator import is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    TracebackType,
)
from typing import Any, Final

import torch
from torch import Tensor, nn

from bcg import _torch, patching
from bcg._state_walk import _CLOSED_PACKAGES
from bcg.proxy import ModuleProxy

_MAX_OBJECTS: Final = 200_000  # far above the largest transformer; a bound against state without end
_EMPTY: Final = object()

_VALUES: Final = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, range, type, type(Ellipsis), torch.dtype, torch.device,
        torch.layout, torch.memory_format, Tensor, nn.Parameter,
    }
)  # fmt: skip
_NOT_STATE: Final = (
    type, ModuleType, enum.Enum, str, bytes, CodeType, FrameType, TracebackType, GeneratorType, CoroutineType,
)  # fmt: skip
_PLAIN: Final = frozenset({dict, list, set, deque})
_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))

# What derives from classes of these belongs to other threads or to the process: threads, queues, handlers, metrics.
_SHARED_PACKAGES: Final = frozenset(
    {
        "_asyncio", "_io", "_queue", "_socket", "_thread", "_weakref", "asyncio", "bcg", "concurrent", "io", "logging",
        "loguru", "multiprocessing", "opentelemetry", "prometheus_client", "queue", "socket", "socketserver",
        "structlog", "subprocess", "threading", "weakref",
    }
)  # fmt: skip


class PythonState:
    """Remember all Python state that a module's forward can reach and that the state walk would open.

    Args:
        module: The module; tensors are not copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self._empties: list[Any] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._sequences: list[tuple[Any, list[Any]]] = []
        self._slots: list[tuple[Any, list[tuple[Any, Any]]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._functions: list[tuple[FunctionType, Any, Any]] = []
        self._seen: set[int] = set()
        self._kinds: dict[type, tuple[Any, ...] | None] = {}
        self._pending: list[Any] = []  # breadth first: what is far from the module comes last, if at all
        for child in module.modules():
            self._save_module(child)
        self._push(_torch.global_forward_hooks().values())
        for value in self._pending:  # grows; keeps alive what was seen, so that no address comes twice
            if len(self._seen) >= _MAX_OBJECTS:
                break
            if id(value) not in self._seen:
                self._seen.add(id(value))
                with contextlib.suppress(Exception):  # what cannot even be looked at is left alone
                    self._save(value)
        self._pending = []
        self._seen = set()

    def _push(self, values: Iterable[Any]) -> None:
        for value in values:
            kind = type(value)
            if kind in _VALUES:
                continue
            if kind in _PLAIN and not value:
                self._empties.append(value)
            else:
                self._pending.append(value)

    def _save_module(self, module: nn.Module) -> None:
        """Remember a module's attributes; ten thousand empty dicts of hooks are no more than listed."""
        namespace = _bare(module).__dict__
        if id(namespace) in self._seen:
            return
        self._seen.add(id(namespace))
        content = namespace.copy()
        self._dicts.append((namespace, content))
        for name, value in content.items():
            kind = type(value)
            if kind in _VALUES:
                continue
            if (kind in _PLAIN or (kind is OrderedDict and name in _OF_EVERY_MODULE)) and not value:
                self._empties.append(value)
            else:
                self._pending.append(value)

    def _save(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._save_module(value)
        elif isinstance(value, _NOT_STATE):
            return
        elif isinstance(value, (dict, list, set, deque, tuple, frozenset)):
            self._save_container(value)
        elif isinstance(value, FunctionType):
            self._save_function(value)
        elif isinstance(value, MethodType):
            self._push((value.__func__, value.__self__))
        elif isinstance(value, (BuiltinFunctionType, MethodWrapperType)):  # ``items.append``
            self._push((value.__self__,))
        elif isinstance(value, Tensor):  # the attributes of a subclass
            self._push((value.__dict__,))
        else:
            self._save_object(value)

    def _save_container(self, value: Any) -> None:
        if isinstance(value, dict):
            if value is sys.modules or "__spec__" in value:  # the globals of a file
                return
            content = value.copy() if type(value) is dict else dict(_dict_base(value).items(value))
            self._dicts.append((value, content))
            self._push(content)
            self._push(content.values())
        elif isinstance(value, (tuple, frozenset)):
            self._push(value)
        else:
            elements = list(_sequence_base(value).__iter__(value))
            self._sequences.append((value, elements))
            self._push(elements)
        if type(value) not in _PLAIN:
            self._save_object(value)

    def _save_function(self, function: FunctionType) -> None:
        """Remember what a function holds. Closures of torch lead to its compiler, and from there to everything."""
        if _is_closed(function.__globals__.get("__name__")):
            self._push((function.__dict__.get("__wrapped__"),))
            return
        self._functions.append((function, function.__defaults__, function.__kwdefaults__))
        contents = [(cell, _content(cell)) for cell in function.__closure__ or ()]
        self._cells += contents
        self._push((function.__defaults__, function.__kwdefaults__, function.__dict__))
        self._push(content for _, content in contents if content is not _EMPTY)

    def _save_object(self, value: Any) -> None:
        """Remember an object's slots and attributes."""
        members = self._members(type(value))
        if members is None:
            return
        if isinstance(value, functools.partial):
            self._push((value.func, value.args, value.keywords))
        if members:
            slots = [(slot, slot.__get__(value)) for slot in members if _is_set(slot, value)]
            self._slots.append((value, slots))
            self._push(content for _, content in slots)
        namespace = getattr(value, "__dict__", None)
        if isinstance(namespace, dict):
            self._push((namespace,))

    def _members(self, kind: type) -> tuple[Any, ...] | None:
        """Return the slots of a class, or None where its objects are no state of a forward."""
        if kind not in self._kinds:
            self._kinds[kind] = None if _is_foreign(kind) else _slots_of(kind)
        return self._kinds[kind]

    def restore(self) -> None:
        """Put back all that is not as it was, as far as it can be assigned."""
        for empty in self._empties:
            if empty:
                empty.clear()
        for table, content in self._dicts:
            with contextlib.suppress(Exception):
                _restore_dict(table, content)
        for sequence, elements in self._sequences:
            with contextlib.suppress(Exception):
                _restore_sequence(sequence, elements)
        for owner, slots in self._slots:
            _restore_slots(owner, slots)
        for cell, content in self._cells:
            _restore_cell(cell, content)
        for function, defaults, keyword_defaults in self._functions:
            if function.__defaults__ is not defaults:
                function.__defaults__ = defaults
            if function.__kwdefaults__ is not keyword_defaults:
                function.__kwdefaults__ = keyword_defaults


# The methods of the base are used throughout, past subclasses that refuse writes (diffusers' FrozenDict) or count them.


def _dict_base(value: Any) -> type[dict[Any, Any]]:
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _sequence_base(value: Any) -> Any:
    return next(base for base in (list, set, deque) if isinstance(value, base))


def _restore_dict(table: dict[Any, Any], content: dict[Any, Any]) -> None:
    base = _dict_base(table)
    if _holds(base, table, content):
        return
    content = _without_patches(content, dict(base.items(table)))
    # Entry by entry, since other threads may be reading the attributes that did not change.
    for key in [key for key in base.keys(table) if key not in content]:
        base.__delitem__(table, key)
    for key, value in content.items():
        if base.get(table, key, _EMPTY) is not value:
            base.__setitem__(table, key, value)
    if not _holds(base, table, content):  # another order
        base.clear(table)
        for key, value in content.items():
            base.__setitem__(table, key, value)


def _without_patches(content: dict[Any, Any], now: dict[Any, Any]) -> dict[Any, Any]:
    """Leave what another runner's capture has put in place on its thread: it comes and goes by itself."""
    patches = [key for key in {**content, **now} if _is_patch(content.get(key)) or _is_patch(now.get(key))]
    if not patches:
        return content
    kept = {key: now[key] for key in patches if key in now}
    return {key: value for key, value in content.items() if key not in patches} | kept


def _is_patch(value: Any) -> bool:
    return type(value) is FunctionType and value.__globals__.get("__name__") == patching.__name__


def _holds(base: type[dict[Any, Any]], table: dict[Any, Any], content: dict[Any, Any]) -> bool:
    return (
        base.__len__(table) == len(content)
        and all(map(is_, base.keys(table), content))
        and all(map(is_, base.values(table), content.values()))
    )


def _restore_sequence(sequence: Any, elements: list[Any]) -> None:
    base = _sequence_base(sequence)
    if base.__len__(sequence) == len(elements) and all(map(is_, base.__iter__(sequence), elements)):
        return
    base.clear(sequence)
    (base.update if base is set else base.extend)(sequence, elements)


def _restore_slots(owner: Any, slots: list[tuple[Any, Any]]) -> None:
    before = dict(slots)
    for slot in _slots_of(type(owner)):
        with contextlib.suppress(AttributeError, TypeError):  # the class of the object was changed
            if slot not in before and _is_set(slot, owner):
                slot.__delete__(owner)
            elif slot in before and not (_is_set(slot, owner) and slot.__get__(owner) is before[slot]):
                slot.__set__(owner, before[slot])


def _restore_cell(cell: CellType, content: Any) -> None:
    if _content(cell) is content:
        return
    if content is _EMPTY:
        del cell.cell_contents
    else:
        cell.cell_contents = content


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _bare(module: nn.Module) -> nn.Module:
    return module.transformer if isinstance(module, ModuleProxy) else module


def _package(module_name: Any) -> str:
    return module_name.partition(".")[0] if isinstance(module_name, str) else ""


def _is_closed(module_name: Any) -> bool:
    package = _package(module_name)
    return package in _CLOSED_PACKAGES or package == "bcg"


def _is_foreign(kind: type) -> bool:
    return _is_closed(kind.__module__) or any(_package(base.__module__) in _SHARED_PACKAGES for base in kind.__mro__)


def _slots_of(kind: type) -> tuple[Any, ...]:
    declared = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return tuple(entry for names in declared for entry in names.values() if isinstance(entry, MemberDescriptorType))


def _is_set(slot: Any, owner: Any) -> bool:
    try:
        slot.__get__(owner)
    except AttributeError:
        return False
    return True
