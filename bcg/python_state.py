"""Put a module's Python state back as it was before a forward that was not the user's.

Warm-up forwards and captures run the module's Python. Where that counts, caches or appends, the next real call would
find a state that eager alone would not have led to.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Iterator
from types import BuiltinFunctionType, CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from bcg._state_walk import _CLOSED_PACKAGES

_MAX_OBJECTS = 200_000  # far above the largest transformer; a bound against state without end
_NOT_STATE = (Tensor, nn.Module, type, BuiltinFunctionType, MethodType, ModuleType, str, bytes)
_EMPTY = object()


class PythonState:
    """Remember what every submodule's attributes refer to, and what the containers among them hold.

    Args:
        module: The module; tensors are not copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self._saved: list[tuple[Any, Any]] = []
        self._slots: list[tuple[Any, list[tuple[Any, Any]]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._seen: set[int] = set()
        for child in module.modules():
            self._save(child.__dict__)

    def _save(self, root: Any) -> None:
        pending = [root]
        while pending and len(self._seen) < _MAX_OBJECTS:
            value = pending.pop()
            if id(value) in self._seen or isinstance(value, _NOT_STATE):
                continue
            self._seen.add(id(value))
            if _is_foreign(value):
                continue
            if isinstance(value, dict):
                self._saved.append((value, dict(value)))
                pending.extend(value.values())
            elif isinstance(value, (list, deque, set)):
                self._saved.append((value, list(value)))
                pending.extend(value)
            elif isinstance(value, tuple):
                pending.extend(value)
            elif isinstance(value, FunctionType):
                self._save_closure(value)
                continue
            pending.extend(self._save_object(value))

    def _save_closure(self, function: FunctionType) -> None:
        """Remember what a function's variables refer to, and plain containers among them.

        Objects are left alone there: from one closure to the next, they lead through the whole process.
        """
        for cell in function.__closure__ or ():
            content = _content(cell)
            self._cells.append((cell, content))
            if isinstance(content, dict):
                self._saved.append((content, dict(content)))
            elif isinstance(content, (list, deque, set)):
                self._saved.append((content, list(content)))

    def _save_object(self, value: Any) -> Iterator[Any]:
        """Remember an object's slots; yield what they and its ``__dict__`` hold."""
        slots = [(slot, slot.__get__(value)) for slot in _slots_of(type(value)) if _is_set(slot, value)]
        if slots:
            self._slots.append((value, slots))
            yield from (content for _, content in slots)
        if isinstance(getattr(value, "__dict__", None), dict):
            yield value.__dict__

    def restore(self) -> None:
        """Put back every attribute and container that is not as it was."""
        for target, content in self._saved:
            if isinstance(target, dict):
                if not _same_items(target, content):
                    _refill(target, content)
            elif not _same_elements(list(target), content):
                target.clear()
                (target.update if isinstance(target, set) else target.extend)(content)
        for owner, slots in self._slots:
            _restore_slots(owner, slots)
        for cell, content in self._cells:
            if content is not _EMPTY and content is not _content(cell):
                cell.cell_contents = content


def _is_foreign(value: Any) -> bool:
    """Tell whether a value is no state of a forward: other threads change loggers, locks, and the globals of a file.

    Closures of torch's own functions lead to its compiler, and from there to everything.
    """
    if isinstance(value, dict):
        return "__spec__" in value
    if isinstance(value, (list, deque, set, tuple, CellType, MethodType)):
        return False
    owner = value if isinstance(value, FunctionType) else type(value)
    return (owner.__module__ or "").partition(".")[0] in _CLOSED_PACKAGES


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _slots_of(kind: type) -> list[Any]:
    return [entry for base in kind.__mro__ for entry in vars(base).values() if isinstance(entry, MemberDescriptorType)]


def _is_set(slot: Any, owner: Any) -> bool:
    try:
        slot.__get__(owner)
    except AttributeError:
        return False
    return True


def _restore_slots(owner: Any, slots: list[tuple[Any, Any]]) -> None:
    before = dict(slots)
    for slot in _slots_of(type(owner)):
        with contextlib.suppress(AttributeError, TypeError):  # read-only members of types written in C
            if slot not in before and _is_set(slot, owner):
                slot.__delete__(owner)
            elif slot in before and not (_is_set(slot, owner) and slot.__get__(owner) is before[slot]):
                slot.__set__(owner, before[slot])


def _refill(target: dict[Any, Any], content: dict[Any, Any]) -> None:
    # The base's methods, past subclasses that refuse writes (diffusers' FrozenDict).
    base = OrderedDict if isinstance(target, OrderedDict) else dict
    base.clear(target)
    for key, value in content.items():
        base.__setitem__(target, key, value)


def _same_items(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return len(now) == len(before) and list(now) == list(before) and all(now[key] is before[key] for key in before)


def _same_elements(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(left is right for left, right in zip(now, before, strict=True))
