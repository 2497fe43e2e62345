"""What a forward does to a module's Python state is taken back as if it had never run."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from bcg.python_state import PythonState


class Slotted:
    __slots__ = ("count", "held", "unset")

    def __init__(self) -> None:
        self.count = 0
        self.held = [1]


class SlottedChild(Slotted):
    __slots__ = ("more",)


@dataclass
class Record:
    count: int = 0
    items: list[int] = field(default_factory=list)


class Table(dict[str, int]):
    """A dict with an attribute, as diffusers' FrozenDict is; refuses ordinary writes."""

    def __init__(self, **items: int) -> None:
        super().__init__(**items)
        self.note = "before"

    def __setitem__(self, key: str, value: int) -> None:
        raise TypeError("frozen")


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.count = 0
        self.items: list[Any] = [1, [2, 3]]
        self.table: dict[str, Any] = {"b": 1, "a": {"deep": [1]}}
        self.ordered = OrderedDict(b=1, a=2)
        self.default: defaultdict[str, list[int]] = defaultdict(list, a=[1])
        self.recent: deque[int] = deque([1, 2], maxlen=2)
        self.names = {"a", "b"}
        self.pair = ([1], {"x": 1})
        self.record = Record()
        self.slotted = SlottedChild()
        self.frozen = Table(a=1)
        self.tensor: torch.Tensor | None = torch.ones(2)
        self.register_buffer("buffer", torch.ones(2))
        self.cycle: list[Any] = []
        self.cycle.append(self.cycle)


def append_nested(holder: Holder) -> None:
    holder.items[1].append(4)


def reorder(holder: Holder) -> None:
    holder.table["b"] = holder.table.pop("b")


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "attribute": lambda h: setattr(h, "count", 5),
    "new attribute": lambda h: setattr(h, "added", 1),
    "deleted attribute": lambda h: delattr(h, "count"),
    "list appended": lambda h: h.items.append(4),
    "list cleared": lambda h: h.items.clear(),
    "list replaced": lambda h: setattr(h, "items", [9]),
    "inner list": append_nested,
    "dict item": lambda h: h.table.update(c=3),
    "dict order": reorder,
    "deep dict": lambda h: h.table["a"]["deep"].append(2),
    "ordered dict": lambda h: h.ordered.move_to_end("b"),
    "default dict": lambda h: h.default["new"].append(1),
    "deque": lambda h: h.recent.append(3),
    "set": lambda h: h.names.add("c"),
    "inside a tuple": lambda h: h.pair[0].append(2),
    "dataclass": lambda h: setattr(h.record, "count", 3),
    "list of a dataclass": lambda h: h.record.items.append(3),
    "slot": lambda h: setattr(h.slotted, "count", 3),
    "list in a slot": lambda h: h.slotted.held.append(3),
    "slot that was not set": lambda h: setattr(h.slotted, "unset", 3),
    "slot of a subclass": lambda h: setattr(h.slotted, "more", 3),
    "deleted slot": lambda h: delattr(h.slotted, "count"),
    "dict that refuses writes": lambda h: dict.__setitem__(h.frozen, "a", 9),
    "attribute of a dict": lambda h: setattr(h.frozen, "note", "after"),
    "tensor replaced": lambda h: setattr(h, "tensor", torch.zeros(2)),
    "tensor removed": lambda h: setattr(h, "tensor", None),
    "buffer replaced": lambda h: h._buffers.update(buffer=torch.zeros(2)),
    "parameter replaced": lambda h: h.child._parameters.update(weight=nn.Parameter(torch.zeros(2, 2))),
    "attribute of a submodule": lambda h: setattr(h.child, "seen", True),
    "submodule added": lambda h: h.add_module("extra", nn.ReLU()),
    "submodule replaced": lambda h: setattr(h, "child", nn.ReLU()),
    "hook": lambda h: h.child.register_forward_hook(lambda *_: None),
    "training flag": lambda h: h.eval(),
}


def picture(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """Spell out a value with the identities of all that it holds."""
    if id(value) in seen:
        return "again"
    seen = (*seen, id(value))
    if isinstance(value, torch.Tensor):
        return id(value)
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ()) if hasattr(value, name)]
    parts: list[Any] = [id(value) if isinstance(value, (list, dict, set, deque, Record, Slotted, nn.Module)) else value]
    parts += [(name, picture(getattr(value, name), seen)) for name in slots]
    if isinstance(value, dict):
        parts += [(key, picture(item, seen)) for key, item in value.items()]
    elif isinstance(value, (list, tuple, deque)):
        parts += [picture(item, seen) for item in value]
    elif isinstance(value, set):
        parts.append(sorted(value))
    if isinstance(value, (nn.Module, Record, Table)):
        parts.append(picture(value.__dict__, seen))
    return parts


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_undone(name: str) -> None:
    holder = Holder()
    before = picture(holder)
    state = PythonState(holder)
    CHANGES[name](holder)
    assert picture(holder) != before
    state.restore()
    assert picture(holder) == before


def test_all_changes_at_once_are_undone_and_restoring_twice_changes_nothing() -> None:
    holder = Holder()
    before = picture(holder)
    state = PythonState(holder)
    for name in sorted(set(CHANGES) - {"submodule replaced", "deleted attribute", "deleted slot"}):
        CHANGES[name](holder)
    state.restore()
    assert picture(holder) == before
    state.restore()
    assert picture(holder) == before


def test_contents_of_tensors_are_not_touched() -> None:
    holder = Holder()
    state = PythonState(holder)
    holder.buffer.fill_(7.0)
    state.restore()
    assert holder.buffer.tolist() == [7.0, 7.0]


def test_a_module_without_changes_is_left_as_it_is() -> None:
    holder = Holder()
    before = picture(holder)
    PythonState(holder).restore()
    assert picture(holder) == before
