"""What a forward does to a module's Python state is taken back as if it had never run."""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import bcg
from bcg._state_walk import Walk
from bcg.patching import patched
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


# --- state that hooks and overridden forwards hold ------------------------------------------------------------------


class Store:
    """What a hook may keep: a number, a list and a dict inside of a dict."""

    def __init__(self) -> None:
        self.count = 0
        self.items: list[int] = []
        self.table: dict[str, Any] = {"inner": {"items": []}}

    def write(self, number: int) -> None:
        """Write what is told apart by number: once for each call, or the same in every call."""
        if number not in self.items:
            self.count = number
            self.items.append(number)
            self.table["inner"]["items"].append(number)
            self.table[str(number)] = [number]

    def hook(self, *_: Any) -> None:
        self.write(next_number(self.count))

    def read(self) -> Any:
        return self.count, self.items, self.table


class SlottedStore:
    __slots__ = ("count", "filled", "items")

    def __init__(self) -> None:
        self.count = 0
        self.items: list[int] = []

    def hook(self, *_: Any) -> None:
        number = next_number(self.count)
        if number not in self.items:
            self.count = self.filled = number
            self.items.append(number)

    def read(self) -> Any:
        return self.count, self.items, getattr(self, "filled", None)


class CalledStore(Store):
    def __call__(self, *_: Any) -> None:
        self.hook()


class Counting:
    """Whether stores count calls, so that no graph may be made, or are filled by the first call and stay so."""

    on = True


def next_number(number: int) -> int:
    return number + 1 if Counting.on else 1


Read = Callable[[], Any]


def bound_method(module: nn.Module) -> Read:
    store = Store()
    module.register_forward_hook(store.hook)
    return store.read


def bound_method_of_slots(module: nn.Module) -> Read:
    store = SlottedStore()
    module.register_forward_pre_hook(store.hook)
    return store.read


def callable_object(module: nn.Module) -> Read:
    store = CalledStore()
    module.register_forward_hook(store)
    return store.read


def partial(module: nn.Module) -> Read:
    store = Store()
    module.register_forward_hook(functools.partial(lambda held, *_: held.hook(), store))
    return store.read


def object_in_a_closure(module: nn.Module) -> Read:
    store = Store()
    module.register_forward_hook(lambda *_: store.hook())
    return store.read


def closure_in_a_closure(module: nn.Module) -> Read:
    store = Store()

    def write() -> None:
        store.hook()

    module.register_forward_hook(lambda *_: write())
    return store.read


def containers_in_a_closure(module: nn.Module) -> Read:
    tree: dict[str, Any] = {"a": [{"counts": [0]}], "names": set()}

    def hook(*_: Any) -> None:
        number = next_number(tree["a"][0]["counts"][0])
        tree["a"][0]["counts"][0] = number
        tree["names"].add(str(number))

    module.register_forward_hook(hook)
    return lambda: tree


def variable_of_a_closure(module: nn.Module) -> Read:
    count = 0

    def hook(*_: Any) -> None:
        nonlocal count
        count = next_number(count)

    module.register_forward_hook(hook)
    return lambda: count


def variable_that_is_not_set_yet(module: nn.Module) -> Read:
    def hook(*_: Any) -> None:
        nonlocal count
        try:
            count = next_number(count)
        except NameError:
            count = 1

    def read() -> int | None:
        try:
            return count
        except NameError:
            return None

    module.register_forward_hook(hook)
    if module.training is None:  # never: the variable is there without a value
        count = 0
    return read


def overridden_forward(module: nn.Module) -> Read:
    store, original = {"deep": {"store": Store()}}, module.forward

    def forward(x: torch.Tensor) -> Any:
        store["deep"]["store"].hook()
        return original(x)

    module.forward = forward
    return store["deep"]["store"].read


def default(module: nn.Module) -> Read:
    items: list[int] = [0]

    def hook(_module: Any, _inputs: Any, _output: Any, held: list[int] = items) -> None:
        held[0] = next_number(held[0])

    module.register_forward_hook(hook)
    return lambda: items


def keyword_default(module: nn.Module) -> Read:
    store = Store()

    def hook(*_: Any, held: Store = store) -> None:
        held.hook()

    module.register_forward_hook(hook)
    return store.read


def attribute_of_a_function(module: nn.Module) -> Read:
    def hook(*_: Any) -> None:
        hook.__dict__["count"] = next_number(hook.__dict__.get("count", 0))

    module.register_forward_hook(hook)
    return lambda: hook.__dict__


def module_in_a_plain_attribute(module: nn.Module) -> Read:
    other = nn.Linear(2, 2)
    other.store = Store()
    module.held = [other]
    module.register_forward_hook(lambda owner, *_: owner.held[0].store.hook())
    return other.store.read


FORMS: dict[str, Callable[[nn.Module], Read]] = {
    form.__name__: form
    for form in (
        bound_method, bound_method_of_slots, callable_object, partial, object_in_a_closure, closure_in_a_closure,
        containers_in_a_closure, variable_of_a_closure, variable_that_is_not_set_yet, overridden_forward, default,
        keyword_default, attribute_of_a_function, module_in_a_plain_attribute,
    )
}  # fmt: skip


@contextmanager
def hooked_globally(module: nn.Module, store: Store) -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda owner, *_: store.hook() if owner is module else None)
    try:
        yield
    finally:
        handle.remove()


def serve(module: Any) -> None:
    """Call a module once in a warmup window and twice behind it."""
    with torch.no_grad():
        with bcg.warmup():
            module(torch.ones(2, 4))
        for number in range(2):
            module(torch.full((2, 4), float(number)))


@pytest.mark.parametrize("counts", [True, False], ids=["rejected", "captured"])
@pytest.mark.parametrize("name", FORMS)
def test_hooks_are_left_as_eager_calls_would_leave_them(
    name: str, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "on", counts)
    eager, wrapped = (nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
    expected, got = FORMS[name](eager[0]), FORMS[name](wrapped[0])
    runner = bcg.wrap(wrapped)
    serve(eager)
    serve(runner)
    assert got() == expected()
    assert (runner.stats.captures, runner.stats.replays) == ((0, 0) if counts else (1, 2))


@pytest.mark.parametrize("counts", [True, False], ids=["rejected", "captured"])
def test_global_hooks_are_left_as_eager_calls_would_leave_them(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "on", counts)
    eager, wrapped = (nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
    expected, got = Store(), Store()
    with hooked_globally(eager[0], expected):
        serve(eager)
    runner = bcg.wrap(wrapped)
    with hooked_globally(wrapped[0], got):
        serve(runner)
    assert got.read() == expected.read()
    assert (runner.stats.captures > 0) != counts


def test_a_hook_that_would_be_captured_is_left_alone_where_something_else_rejects() -> None:
    module, store = nn.Sequential(nn.Linear(4, 4)), Store()
    module[0].register_forward_hook(lambda *_: store.hook())
    module.register_forward_hook(lambda owner, *_: owner.__dict__.update(seen=owner.__dict__.get("seen", 0) + 1))
    serve(bcg.wrap(module))
    assert module.seen == store.count == 3


# --- what is put back, form by form -----------------------------------------------------------------------------------


def test_objects_and_containers_stay_the_ones_they_were() -> None:
    module, store = nn.Linear(2, 2), Store()
    module.register_forward_hook(store.hook)
    parts = store.items, store.table, store.table["inner"], store.table["inner"]["items"]
    state = PythonState(module)
    store.write(1)
    store.table, store.items = {}, []
    state.restore()
    now = store.items, store.table, store.table["inner"], store.table["inner"]["items"]
    assert all(one is other for one, other in zip(now, parts, strict=True))
    assert store.read() == (0, [], {"inner": {"items": []}})


def test_defaults_that_a_function_is_given_anew_are_put_back() -> None:
    def hook(_module: Any, _inputs: Any, _output: Any, one: int = 0, *, other: int = 0) -> None:
        hook.__defaults__, hook.__kwdefaults__ = (one + 1,), {"other": other + 1}

    module = nn.Linear(2, 2)
    module.register_forward_hook(hook)
    state = PythonState(module)
    module(torch.ones(2))
    state.restore()
    assert (hook.__defaults__, hook.__kwdefaults__) == ((0,), {"other": 0})


def test_a_bound_method_of_a_container_leads_to_it() -> None:
    module, items, table = nn.Linear(2, 2), [1], {"a": 1}
    module.note, module.keep = items.append, table.__setitem__
    state = PythonState(module)
    module.note(2)
    module.keep("b", 2)
    state.restore()
    assert (items, table) == ([1], {"a": 1})


def test_a_function_that_torch_wraps_is_opened() -> None:
    module, store = nn.Linear(2, 2), Store()

    @torch.no_grad()
    def hook(*_: Any) -> None:
        store.hook()

    module.register_forward_hook(hook)
    state = PythonState(module)
    hook()
    state.restore()
    assert store.count == 0


def test_a_function_that_runs_as_an_eager_break_is_opened() -> None:
    module, store = nn.Linear(2, 2), Store()

    @bcg.eager_on_graph
    def note() -> None:
        store.hook()

    module.note = note
    state = PythonState(module)
    note()
    state.restore()
    assert store.count == 0


def test_keys_of_dicts_and_attributes_of_tensors_are_opened() -> None:
    class Named(torch.Tensor):
        pass

    module, key = nn.Linear(2, 2), Store()
    module.table, module.named = {key: 1}, torch.ones(2).as_subclass(Named)
    module.named.items = [1]
    state = PythonState(module)
    key.write(1)
    module.named.items.append(2)
    state.restore()
    assert (key.count, module.named.items) == (0, [1])


def test_a_global_hook_that_a_forward_leaves_behind_is_removed() -> None:
    state = PythonState(nn.Linear(2, 2))
    store = Store()
    handle = nn.modules.module.register_module_forward_hook(store.hook)
    state.restore()
    nn.Linear(2, 2)(torch.ones(2))
    handle.remove()
    assert store.count == 0


def test_everything_that_the_walk_watches_is_remembered() -> None:
    holder = Holder()
    for form in FORMS.values():
        form(holder.child)
    state, walk = PythonState(holder), Walk(holder)
    walk.run()
    watched = walk.watched
    emptied = {id(empty) for empty in state._empties}
    dicts = emptied | {id(table) for table, _ in state._dicts}
    sequences = emptied | {id(sequence) for sequence, _ in state._sequences}
    assert watched.cells and watched.slots and watched.sequences
    assert {id(table) for table in watched.dicts} <= dicts
    assert {id(empty) for empty in watched.empties} <= dicts | sequences
    assert {id(sequence) for sequence in watched.sequences} <= sequences
    assert {id(cell) for cell in watched.cells} <= {id(cell) for cell, _ in state._cells}
    assert {id(owner) for owner, _ in watched.slots} <= {id(owner) for owner, _ in state._slots}


# --- what is not put back ---------------------------------------------------------------------------------------------


class Worker(threading.Thread):
    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[int] = []


class Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []


class Jobs(queue.Queue[int]):
    def __init__(self) -> None:
        super().__init__()
        self.served = 0


def test_threads_handlers_queues_and_loggers_are_not_put_back() -> None:
    module = nn.Linear(2, 2)
    worker, recorder, jobs, log = Worker(), Recorder(), Jobs(), logging.Logger("test")
    module.held = SimpleNamespace(parts=[worker, recorder, jobs, log], lock=threading.Lock())
    state = PythonState(module)
    worker.jobs.append(1)
    recorder.lines.append("line")
    jobs.put(1)
    jobs.served = 1
    log.addHandler(recorder)
    with module.held.lock:
        state.restore()
        assert module.held.lock.locked()
    assert (worker.jobs, recorder.lines, jobs.served, jobs.qsize(), log.handlers) == ([1], ["line"], 1, 1, [recorder])


def test_a_runner_in_a_closure_keeps_what_it_captured_while_its_module_is_put_back() -> None:
    inner = nn.Sequential(nn.Linear(4, 4))
    runner, module = bcg.wrap(inner), nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: runner)
    state = PythonState(module)
    serve(runner)
    inner.seen = True
    state.restore()
    assert runner.stats.captures == 1
    assert not hasattr(inner, "seen")
    serve(runner)
    assert runner.stats.replays == 5


class Silent:
    """A watch that is never active."""

    def active(self) -> bool:
        return False


def test_what_another_capture_has_put_in_place_is_neither_removed_nor_brought_back() -> None:
    inner, module = nn.Sequential(nn.Linear(4, 4)), nn.Linear(2, 2)
    module.held = [inner]
    watch: Any = Silent()
    before = PythonState(module)
    with patched(watch, inner, {"0"}, (), {}):
        during = PythonState(module)
        inner[0].seen = True
        before.restore()
        assert "forward" in vars(inner[0]) and not hasattr(inner[0], "seen")
    inner[0].seen = True
    during.restore()
    assert "forward" not in vars(inner[0]) and not hasattr(inner[0], "seen")


def test_globals_of_a_file_and_classes_are_not_put_back() -> None:
    module, names = nn.Linear(2, 2), {"__spec__": None, "count": 0}
    module.names, module.kind = names, type("Kind", (), {"count": 0})
    state = PythonState(module)
    names["count"] = module.kind.count = 1
    state.restore()
    assert names["count"] == module.kind.count == 1


class Unreadable:
    @property
    def __dict__(self) -> Any:
        raise RuntimeError("not to be looked at")


class Unsound:
    """A key that cannot be looked up again once it is broken."""

    broken = False

    def __hash__(self) -> int:
        if self.broken:
            raise RuntimeError("not to be looked up")
        return 1


def test_what_cannot_be_read_or_assigned_does_not_keep_the_rest_from_being_put_back() -> None:
    module, key = nn.Linear(2, 2), Unsound()
    module.held, module.table, module.count = [Unreadable()], {key: 1}, 0
    state = PythonState(module)
    module.count = 1
    module.table[2] = 2
    key.broken = True
    PythonState(module).restore()
    state.restore()
    assert module.count == 0
