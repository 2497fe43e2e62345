"""Key the present state of a module: what decides, besides the call's arguments, which graph is right.

Before every replay `ModuleState.key` proves in a fraction of a millisecond that nothing changed (`bcg._state_watch`);
when something did, one walk over the module (`bcg._state_walk`) names its state anew, by value, and a state seen before
gives the key it had then.

Not seen: changes of class attributes other than ``forward`` and ``__call__``, of module globals and of ``lru_cache``s,
and what objects of the standard library and of torch hold inside.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from bcg import probes
from bcg._state_walk import Entries, Token, Walk
from bcg._state_watch import Watch

MAX_STATES: Final = 256
"""Distinct states of one module that are remembered."""

MAX_DIFFERENCES: Final = 50
"""Lines that `describe_difference` gives before it counts the rest."""


class _Record:
    """Hold the entries of one module; keys of states in which it is the same share it."""

    __slots__ = ("_hash", "entries")

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        self._hash = hash(entries)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _Record) and self._hash == other._hash and self.entries == other.entries


class StateKey:
    """Name one state of a module by value.

    Keys are hashable, and equal where nothing that a forward may depend on differs. They hold neither tensors nor
    modules, so a weight that was removed is not kept alive.
    """

    __slots__ = ("__weakref__", "_hash", "_records")

    def __init__(self, records: Mapping[str, _Record]) -> None:
        self._records = records
        self._hash = hash(tuple(records.items()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, StateKey) or self._hash != other._hash:
            return False
        return self._records == other._records and list(self._records) == list(other._records)

    def __repr__(self) -> str:
        return f"StateKey({self._hash & 0xFFFFFFFF:08x}, {len(self._records)} modules)"


@dataclass
class _Known:
    """Hold what is remembered of one state."""

    key: StateKey
    is_judged: bool = False
    refusal: str | None = None


class ModuleState:
    """Key the present state of a module, cheaply enough for every call.

    Args:
        module: The module whose forward is captured.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> state = ModuleState(layer)
        >>> before = state.key()
        >>> layer.scale = 0.5
        >>> state.key() == before
        False
        >>> del layer.scale
        >>> state.key() is before
        True
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._lock = threading.RLock()
        self._states: OrderedDict[StateKey, _Known] = OrderedDict()
        self._last: StateKey | None = None
        self._proven: tuple[Watch, _Known] | None = None  # one attribute, so that threads see both or neither

    def key(self) -> StateKey:
        """Return the key of the present state.

        The same object comes back while nothing changed, and when the module returns to one of the last `MAX_STATES`
        states. Never raises because of what the module holds.

        Returns:
            The key.
        """
        return self._known().key

    def refusal(self) -> str | None:
        """Tell why graphs must not be used for the module in its present state.

        Returns:
            The reason, found once for every state; None where graphs may be used.
        """
        known = self._known()
        if not known.is_judged:
            known.refusal = probes.refusal(self._module)
            known.is_judged = True
        return known.refusal

    def _known(self) -> _Known:
        proven = self._proven
        if proven is not None and proven[0].unchanged():
            return proven[1]
        with self._lock:
            return self._walk()

    def _walk(self) -> _Known:
        walk = Walk(self._module)
        found = walk.run()
        key = StateKey(self._share(found))
        known = self._states.setdefault(key, _Known(key))
        self._states.move_to_end(key)
        if len(self._states) > MAX_STATES:
            self._states.popitem(last=False)
        self._last = known.key
        watch = Watch(self._module, walk.watched, _forgetter(self))
        self._proven = (watch, known) if self._is_what_stands(found) else None
        return known

    def _is_what_stands(self, found: dict[str, Entries]) -> bool:
        """Tell whether a walk found what its watch, made afterwards, takes for the beginning.

        What another thread wrote between the two would never be noticed.
        """
        return threading.active_count() == 1 or Walk(self._module).run() == found

    def _share(self, found: dict[str, Entries]) -> dict[str, _Record]:
        """Reuse the current state's records where a module is the same."""
        previous = {} if self._last is None else self._last._records
        return {path: self._record(previous.get(path), entries) for path, entries in found.items()}

    @staticmethod
    def _record(previous: _Record | None, entries: Entries) -> _Record:
        return previous if previous is not None and previous.entries == entries else _Record(entries)


def _forgetter(state: ModuleState) -> Callable[[Any], None]:
    """Return what lets go of all that a state's watch holds when a module died: memory is free before the next call."""
    reference = weakref.ref(state)

    def forget(_dead: Any) -> None:
        owner = reference()
        if owner is not None:
            owner._proven = None

    return forget


def describe_difference(expected: StateKey, got: StateKey) -> list[str]:
    """Say in which attributes, tensors or modules two states differ.

    Args:
        expected: The state that was captured.
        got: The state of this call.

    Returns:
        One line for each difference, at most `MAX_DIFFERENCES` and then a count; empty for equal keys.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> state = ModuleState(layer)
        >>> before = state.key()
        >>> layer.scale = 0.5
        >>> describe_difference(before, state.key())
        ['scale: expected nothing, got 0.5']
    """
    lines = list(_differences(expected._records, got._records))
    hidden = len(lines) - MAX_DIFFERENCES
    return lines if hidden <= 0 else [*lines[:MAX_DIFFERENCES], f"... and {hidden} more differences"]


def moving_parts(lines: Iterable[str]) -> frozenset[str]:
    """Return what `describe_difference` names in its lines, without the values.

    Args:
        lines: The lines.

    Returns:
        The names.
    """
    return frozenset(line.partition(": expected ")[0] for line in lines)


def _differences(expected: Mapping[str, _Record], got: Mapping[str, _Record]) -> Iterator[str]:
    for path in dict.fromkeys((*expected, *got)):
        if path not in got:
            yield f"{path}: module removed"
        elif path not in expected:
            yield f"{path}: module added"
        elif expected[path] != got[path]:
            yield from _entry_differences(path, expected[path].entries, got[path].entries)


def _entry_differences(path: str, expected: Entries, got: Entries) -> Iterator[str]:
    old, new = dict(expected), dict(got)
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            yield from _token_differences(f"{path}.{name}" if path else name, old.get(name), new.get(name))


def _token_differences(label: str, expected: Token | None, got: Token | None) -> Iterator[str]:
    if expected is None or got is None or expected[:2] != got[:2]:
        yield f"{label}: expected {_show(expected)}, got {_show(got)}"
    elif expected[0] == "tensor":
        yield _tensor_difference(label, expected[2], got[2])
    elif expected[0] in ("dict", "list", "object"):
        yield from _part_differences(label, expected, got)
    else:
        yield f"{label}: expected {_show(expected)}, got {_show(got)}"


def _part_differences(label: str, expected: Token, got: Token) -> Iterator[str]:
    old, new = _labelled(expected), _labelled(got)
    differing = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    for name in differing:
        yield from _token_differences(label + name, old.get(name), new.get(name))
    if not differing:
        yield f"{label}: order expected {', '.join(old)}, got {', '.join(new)}"


def _labelled(token: Token) -> dict[str, Token]:
    tag, _, parts = token
    if tag == "dict":
        return {f"[{_show(key)}]": part for key, part in parts}
    if tag == "list":
        return {f"[{position}]": part for position, part in enumerate(parts)}
    return {f".{name}": part for name, part in parts}


def _tensor_difference(label: str, expected: tuple[Any, ...], got: tuple[Any, ...]) -> str:
    names = ("address", "shape", "stride", "dtype", "device")
    differing = [index for index, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]]
    if differing == [0]:
        return f"{label} moved in memory"
    told = [f"{names[index]} expected {expected[index]}, got {got[index]}" for index in differing if index]
    return f"{label}: {'; '.join(told)}"


def _show(token: Token | None) -> str:
    if token is None:
        return "nothing"
    tag, kind, payload = token
    if tag == "value":
        return _show_value(kind, payload)
    if tag == "tensor":
        return f"a tensor {payload[3]} of shape {list(payload[1])}"
    if tag == "same":
        return f"what is at {payload or 'the root'!r}"
    if tag == "identity":
        return repr(payload)
    return _show_container(tag, kind, payload)


def _show_value(kind: Any, payload: Any) -> str:
    if kind is float:
        return repr(float.fromhex(payload))
    if kind is type:
        return str(payload.__qualname__)
    return repr(payload) if type(payload) is kind else f"{kind.__qualname__}({payload!r})"


def _show_container(tag: str, kind: Any, payload: Any) -> str:
    if tag == "object":
        return f"<{kind.__qualname__}>"
    if tag == "dict":
        return f"{{{', '.join(f'{_show(key)}: {_show(part)}' for key, part in payload)}}}"
    shown = ", ".join(_show(part) for part in payload)
    return f"[{shown}]" if tag == "list" else f"{{{shown}}}"
