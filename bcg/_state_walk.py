"""Walk over everything in a module that its forward may depend on, and name it by value.

A walk gives two things: *tokens* (hashable, compared by value, holding neither tensors nor modules), and the live
containers in which a change would show, for the fast check of `bcg._state_watch`.

A token is ``(tag, type, payload)``:

    value     a number, string, dtype, enum, class...     payload: the value
    tensor    address, shape, stride, dtype, device       payload: a tuple of them
    list      list, tuple, deque                          payload: tokens
    set       set, frozenset                              payload: a frozenset of tokens
    dict      any mapping that is a dict                  payload: (key token, token) pairs in insertion order
    object    attributes of a plain object, parts of a function, of a bound method   payload: (name, token) pairs
    same      something met before                        payload: where
    identity  anything else                               payload: an `Identity`
"""

from __future__ import annotations

import enum
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from bcg import _torch, probes
from bcg.proxy import ModuleProxy

Token: TypeAlias = tuple[str, Any, Any]
Entries: TypeAlias = tuple[tuple[str, Token], ...]

MAX_DEPTH: Final = 12
"""Containers and objects inside one attribute that are opened; what lies deeper is known by identity."""

CLASSES: Final = "<classes>"
HOOKS: Final = "<global hooks>"
LIBRARIES: Final = "<libraries>"

_VALUE_TYPES: Final = frozenset(
    {
        bool, int, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range,
        torch.dtype, torch.device, torch.layout, torch.memory_format,
    }
)  # fmt: skip

_WITHOUT_EFFECT: Final = frozenset(
    {
        # Neither state-dict hooks nor backward hooks change what a forward computes.
        "_non_persistent_buffers_set", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook",
        "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
        # These only qualify hooks and are read together with them.
        "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    }
)  # fmt: skip
_HOOK_FLAGS: Final = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}

_OPENED_STDLIB: Final = frozenset({"argparse", "builtins", "collections", "dataclasses", "functools", "types"})
_CLOSED_PACKAGES: Final = (frozenset(sys.stdlib_module_names) | {"torch", "numpy"}) - _OPENED_STDLIB
"""Objects of these packages (loggers, locks, streams, compiled code) are known by identity and not opened."""


class Identity:
    """Stand for one object, equal only to another stand-in for the very same object while it lives.

    The object is held weakly where it can be: a dead one is never equal to a new one at the same address.
    """

    __slots__ = ("_hash", "_name", "_target")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        self._name = _describe(value)
        self._target: Callable[[], Any]
        try:
            self._target = weakref.ref(value)
        except TypeError:
            self._target = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Identity) or self._hash != other._hash:
            return False
        value = self._target()
        return value is not None and value is other._target()

    def __repr__(self) -> str:
        return self._name


def _describe(value: Any) -> str:
    if type(value) is types.CodeType:
        return value.co_qualname
    if type(value) in (types.FunctionType, types.BuiltinFunctionType):
        return str(value.__qualname__)
    return f"<{type(value).__qualname__} object>"


@dataclass
class Watched:
    """Hold the live objects in which a change of the walked state would show.

    Attributes:
        dicts: Namespaces of modules and objects, and dicts that were not empty.
        empties: Containers that were empty.
        sequences: Lists, sets and deques that were not empty.
        cells: Closure cells of functions.
        slots: Objects with the name of a slot.
        tensors: Tensors whose address, shape, stride, dtype and device are in the key.
        children: ``_modules`` dicts that were not empty, for the types of the modules in them.
        modules: Every module that was walked, held weakly.
        classes: Classes of the modules and objects, with the name of the method that they run.
    """

    dicts: list[dict[Any, Any]] = field(default_factory=list)
    empties: list[Any] = field(default_factory=list)
    sequences: list[Any] = field(default_factory=list)
    cells: list[types.CellType] = field(default_factory=list)
    slots: list[tuple[Any, str]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    children: list[dict[str, Any]] = field(default_factory=list)
    modules: list[weakref.ref[nn.Module]] = field(default_factory=list)
    classes: dict[tuple[type, str], None] = field(default_factory=dict)


class Walk:
    """Walk over one module once."""

    def __init__(self, root: nn.Module) -> None:
        self.watched = Watched()
        self._paths: dict[int, str] = {}
        self._queue: list[tuple[str, nn.Module]] = []
        self._alive: list[Any] = []
        self._enlist(root, "")
        self._reads_all_adapters = any(_chooses_adapters(module) for _, module in self._queue)

    def run(self) -> dict[str, Entries]:
        """Return the entries of every module by its path, and those of what all modules share.

        Returns:
            Path to entries, in the order of ``named_modules``. Modules that are reached only through plain attributes
            follow under the path of that attribute.
        """
        records: dict[str, Entries] = {}
        position = 0
        while position < len(self._queue):  # grows while modules in plain attributes are found
            path, module = self._queue[position]
            records[path] = self._module(module, path)
            position += 1
        records[HOOKS] = tuple(
            (name, self._hooks(hooks, (), HOOKS)) for name, hooks in _torch.global_forward_hooks().items()
        )
        records[LIBRARIES] = (("backend", self.token(probes.ambient_probes(), LIBRARIES, 0)),)
        records[CLASSES] = tuple(
            (f"{kind.__qualname__}.{name}", _identity(getattr(kind, name, kind))) for kind, name in self.watched.classes
        )
        return records

    # --- modules ------------------------------------------------------------------------------------------------------

    def _enlist(self, module: nn.Module, path: str) -> None:
        """Give paths to a module and all below it before any attribute is read, so that references find them."""
        module = _bare(module)
        if id(module) in self._paths:
            return
        self._paths[id(module)] = path
        self._queue.append((path, module))
        prefix = f"{path}." if path else ""
        for name, child in list(module.__dict__.get("_modules", {}).items()):
            if isinstance(child, nn.Module):
                self._enlist(child, prefix + name)

    def _module(self, module: nn.Module, path: str) -> Entries:
        namespace = module.__dict__
        self.watched.modules.append(weakref.ref(module))
        self.watched.dicts.append(namespace)
        self.watched.classes[(type(module), "forward")] = None
        entries: list[tuple[str, Token]] = []
        for name, value in list(namespace.items()):
            if name in _WITHOUT_EFFECT:
                continue
            if name == "_parameters" or name == "_buffers":
                self._tensors(value, path, entries)
            elif name in _HOOK_FLAGS:
                self._module_hooks(namespace, name, path, entries)
            elif name != "_modules":
                self._attribute(module, name, value, path, entries)
        entries.sort(key=lambda entry: entry[0])
        entries.append(("<type>", ("value", type, type(module))))
        entries.append(("<modules>", self._children(namespace.get("_modules"), path)))
        return tuple(entries)

    def _tensors(self, tensors: Any, path: str, entries: list[tuple[str, Token]]) -> None:
        if not tensors:
            self.watched.empties.append(tensors)
            return
        self.watched.dicts.append(tensors)
        entries.extend((name, self.token(tensor, _join(path, name), 0)) for name, tensor in list(tensors.items()))

    def _children(self, children: Any, path: str) -> Token:
        if not children:
            self.watched.empties.append(children)
            return ("dict", dict, ())
        self.watched.dicts.append(children)
        self.watched.children.append(children)
        pairs = [(name, self.token(child, _join(path, name), 0)) for name, child in list(children.items())]
        return ("dict", dict, tuple((("value", str, name), token) for name, token in pairs))

    def _module_hooks(self, namespace: dict[str, Any], name: str, path: str, entries: list[tuple[str, Token]]) -> None:
        hooks = namespace[name]
        if not hooks:
            self.watched.empties.append(hooks)
            return
        flags = [namespace.get(flag, {}) for flag in _HOOK_FLAGS[name]]
        entries.append((name, self._hooks(hooks, flags, _join(path, name))))

    def _hooks(self, hooks: dict[int, Any], flags: Iterable[dict[int, bool]], path: str) -> Token:
        """Name hooks by order and flags; their numbers come from a counter and would make a hook put back a new one."""
        flags = list(flags)
        for container in (hooks, *flags):
            self._watch_dict(container)
        listed = tuple(
            (
                "list",
                tuple,
                (self.token(hook, f"{path}[{position}]", 0), *(("value", bool, number in flag) for flag in flags)),
            )
            for position, (number, hook) in enumerate(list(hooks.items()))
        )
        return ("list", tuple, listed)

    def _attribute(self, module: nn.Module, name: str, value: Any, path: str, entries: list[tuple[str, Token]]) -> None:
        if _is_own_method(module, name, value) or _is_default_none(module, name, value):
            return
        if name in probes.bookkeeping_attributes(module):
            return
        token = self.token(value, _join(path, name), 0)
        if name == "scaling" and token[0] == "dict" and not self._reads_all_adapters:
            unread = probes.unread_adapters(module)
            token = (*token[:2], tuple(pair for pair in token[2] if pair[0][2] not in unread))
        if not probes.is_inert(value):  # it was walked all the same, so that the fast check sees a hook come
            entries.append((name, token))

    # --- values -------------------------------------------------------------------------------------------------------

    def token(self, value: Any, path: str, depth: int) -> Token:
        """Name a value; never raises.

        Args:
            value: Anything.
            path: Where it was found.
            depth: Containers and objects around it.

        Returns:
            Its token.
        """
        kind = type(value)
        if kind in _VALUE_TYPES:
            return ("value", kind, value)
        if kind is float:
            return ("value", float, value.hex())  # equal for NaN, different for -0.0
        try:
            return self._open(value, kind, path, depth)
        except Exception:
            return _identity(value)

    def _open(self, value: Any, kind: type, path: str, depth: int) -> Token:
        if isinstance(value, type):
            return ("value", type, value)
        if isinstance(value, enum.Enum):
            return ("value", kind, value.name if value.name is not None else repr(value))
        if isinstance(value, nn.Module):
            self._enlist(value, path)
            return ("same", None, self._paths[id(_bare(value))])
        if isinstance(value, Tensor):
            return self._tensor(value, kind, path, depth)
        if isinstance(value, (int, float, complex, str, bytes)):
            return ("value", kind, _plain_text(value))
        if depth >= MAX_DEPTH:
            return _identity(value)
        if isinstance(value, (tuple, frozenset)):  # immutable: nothing to watch, no cycle that is not broken below
            return self._elements(value, kind, path, depth)
        known = self._paths.get(id(value))
        if known is not None:
            return ("same", kind, known)
        self._paths[id(value)] = path
        self._alive.append(value)
        return self._mutable(value, kind, path, depth)

    def _mutable(self, value: Any, kind: type, path: str, depth: int) -> Token:
        if isinstance(value, dict):
            return self._dict(value, kind, path, depth)
        if isinstance(value, (list, set, deque)):
            self._watch_sequence(value)
            return self._elements(value, kind, path, depth)
        if isinstance(value, types.FunctionType):
            return self._function(value, path, depth)
        if isinstance(value, types.MethodType):
            return self._parts(kind, (("function", value.__func__), ("self", value.__self__)), path, depth)
        if isinstance(value, functools.partial):
            parts = (("func", value.func), ("args", value.args), ("keywords", value.keywords))
            return self._parts(kind, parts, path, depth)
        if _is_closed(kind):
            return _identity(value)
        return self._object(value, kind, path, depth)

    def _dict(self, value: dict[Any, Any], kind: type, path: str, depth: int) -> Token:
        self._watch_dict(value)
        pairs = tuple(
            (self.token(key, path, depth + 1), self.token(item, f"{path}[{_key_text(key, position)}]", depth + 1))
            for position, (key, item) in enumerate(list(value.items()))
        )
        return self._with_attributes(("dict", kind, pairs), value, path, depth)

    def _elements(self, value: Iterable[Any], kind: type, path: str, depth: int) -> Token:
        tokens = [self.token(element, f"{path}[{position}]", depth + 1) for position, element in enumerate(list(value))]
        if isinstance(value, (set, frozenset)):
            return ("set", kind, frozenset(tokens))
        return self._with_attributes(("list", kind, tuple(tokens)), value, path, depth)

    def _with_attributes(self, token: Token, value: Any, path: str, depth: int) -> Token:
        """Add the attributes that an instance of a subclass of dict, list or tuple may have."""
        namespace = getattr(value, "__dict__", None)
        if namespace is None:
            return token
        self._watch_dict(namespace)
        if not namespace:
            return token
        attributes = self._namespace(namespace, frozenset(), path, depth)
        return ("object", token[1], (("<items>", token), *attributes))

    def _function(self, value: types.FunctionType, path: str, depth: int) -> Token:
        """Name a function by code, defaults and closure: a closure made anew around the same things is the same."""
        if _package(value.__globals__.get("__name__")) in _CLOSED_PACKAGES:
            return _identity(value)  # torch.compile and its kind keep counters and caches in their closures
        self._watch_dict(value.__dict__)
        cells = value.__closure__ or ()
        self.watched.cells.extend(cells)
        contents = [("cell " + name, _cell(cell)) for name, cell in zip(value.__code__.co_freevars, cells, strict=True)]
        parts = [("defaults", value.__defaults__), ("kwdefaults", value.__kwdefaults__), *contents]
        kept = [part for part in parts if part[1] is not None]
        opened = self._parts(types.FunctionType, kept, path, depth)[2]
        attributes = self._namespace(value.__dict__, frozenset({"__wrapped__"}), path, depth)
        return ("object", types.FunctionType, (("code", _identity(value.__code__)), *opened, *attributes))

    def _parts(self, kind: type, parts: Iterable[tuple[str, Any]], path: str, depth: int) -> Token:
        return ("object", kind, tuple((name, self.token(part, f"{path}.{name}", depth + 1)) for name, part in parts))

    def _object(self, value: Any, kind: type, path: str, depth: int) -> Token:
        namespace = getattr(value, "__dict__", None)
        slots = _slot_names(kind)
        if not isinstance(namespace, dict) and not slots:
            return _identity(value)
        if any("__call__" in base.__dict__ for base in kind.__mro__):
            self.watched.classes[(kind, "__call__")] = None
        self.watched.slots.extend((value, name) for name in slots)
        held = [(name, getattr(value, name, None)) for name in slots]
        attributes = list(self._parts(kind, held, path, depth)[2])
        if isinstance(namespace, dict):
            self._watch_dict(namespace)
            ignored = probes.bookkeeping_attributes(value) | {
                name for name, part in namespace.items() if _is_default_none(value, name, part)
            }
            attributes += self._namespace(namespace, ignored, path, depth)
        return ("object", kind, tuple(attributes))

    def _namespace(self, namespace: dict[str, Any], ignored: frozenset[str], path: str, depth: int) -> Entries:
        return tuple(
            (name, self.token(namespace[name], _join(path, name), depth + 1))
            for name in sorted(filter(_is_text, list(namespace)))
            if name not in ignored
        )

    def _tensor(self, value: Tensor, kind: type, path: str, depth: int) -> Token:
        if hasattr(value, "__tensor_flatten__"):
            return self._wrapper_tensor(value, kind, path, depth)
        facts = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, value.device)
        self.watched.tensors.append(value)
        token: Token = ("tensor", kind, facts)
        if kind is Tensor or kind is nn.Parameter:
            return token
        return self._with_attributes(token, value, path, depth)

    def _wrapper_tensor(self, value: Any, kind: type, path: str, depth: int) -> Token:
        """Name a tensor subclass without storage of its own (quantised weights, DTensor) by the tensors inside."""
        names, context = value.__tensor_flatten__()
        self._watch_dict(value.__dict__)
        parts = [(name, getattr(value, name)) for name in names]
        facts = (tuple(value.shape), value.stride(), value.dtype, value.device)
        return self._parts(kind, [*parts, ("context", context), ("facts", facts)], path, depth)

    # --- watching -----------------------------------------------------------------------------------------------------

    def _watch_dict(self, value: dict[Any, Any]) -> None:
        (self.watched.dicts if value else self.watched.empties).append(value)

    def _watch_sequence(self, value: Any) -> None:
        (self.watched.sequences if value else self.watched.empties).append(value)


def _bare(module: nn.Module) -> nn.Module:
    """Return the module behind a runner: what is hooked through a runner refers to the runner."""
    return module.transformer if isinstance(module, ModuleProxy) else module


def _identity(value: Any) -> Token:
    return ("identity", type(value), Identity(value))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _key_text(key: Any, position: int) -> str:
    return repr(key) if type(key) in (str, int) else f"key {position}"


def _is_text(name: Any) -> bool:
    return isinstance(name, str)


def _is_own_method(module: nn.Module, name: str, value: Any) -> bool:
    """Tell whether an instance attribute repeats the class's method, as removed hooks leave it: the same as none."""
    return (
        type(value) is types.MethodType
        and value.__self__ is module
        and value.__func__ is getattr(type(module), name, None)
    )


def _is_default_none(owner: Any, name: Any, value: Any) -> bool:
    """Tell whether an instance attribute repeats the class's None, as switched-off features leave it."""
    return value is None and isinstance(name, str) and getattr(type(owner), name, owner) is None


def _plain_text(value: Any) -> Any:
    """Return the bare value of an instance of a subclass of a number or string type."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, int):
        return int.__index__(value)
    return float.hex(value) if isinstance(value, float) else repr(value)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return NotImplemented


def _chooses_adapters(module: nn.Module) -> bool:
    kind: Any = type(module)  # a class is hashable, whatever its __hash__ says to a type checker
    return probes.chooses_adapters_in_calls(kind)


def _package(module_name: Any) -> str:
    return module_name.partition(".")[0] if isinstance(module_name, str) else ""


def _is_closed(kind: type) -> bool:
    return _package(kind.__module__) in _CLOSED_PACKAGES or issubclass(kind, types.ModuleType)


@functools.lru_cache(maxsize=4096)
def _slot_names(kind: type) -> tuple[str, ...]:
    declared = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else tuple(slots))]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__") and not _is_mangled(name))


def _is_mangled(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")
