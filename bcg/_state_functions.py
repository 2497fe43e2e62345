"""Find the functions that a forward may call by name, and notice when one of them is replaced.

A function calls another through a name: a global of its file (``apply_rotary_emb``), an attribute of a global module
(``F.silu``, ``torch.nn.functional.silu``), a method, or an entry of a table that a class holds. The names are in the
code objects, so the code of all that a module may run is followed from name to name, and what each name stands for now
is remembered by identity. Names are not resolved exactly: one that is an attribute in the code, and also stands for a
function in a file or class that was met, counts too. What counts needlessly changes nothing until it is replaced.

Data is not compared: a counter, a cache or a flag among the globals moves no key. Functions that bcg itself puts in
place for a while (`bcg.functions`) count as those behind them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeAlias

from bcg import _dict_epoch, _torch
from bcg.functions import original_function

Entries: TypeAlias = tuple[tuple[str, Any], ...]

MAX_CODES: Final = 3000
"""Code objects that are followed, far above what the largest transformer runs."""

_TRIES: Final = 3  # where other threads replace functions meanwhile

_DATA_ONLY: Final = frozenset(sys.stdlib_module_names) | {"numpy", "bcg"}
_TORCH: Final = "torch"
_FOLLOWED_IN_TORCH: Final = ("torch.nn.modules.", "torch.nn.functional")  # Python that others build on
_ENTERED_IN_TORCH: Final = frozenset({"torch", "torch.nn", "torch.nn.functional", "torch.functional", "torch._C._nn"})
"""Modules that are looked into where torch reaches them by itself: those that ``import torch`` has loaded. Others come
and go by when something is used first."""

_IMPLICIT: Final = frozenset(
    {
        # What Python, or torch, calls without that the name is in any code.
        "forward", "__call__", "__getattr__", "__getattribute__", "__getitem__", "__contains__", "__iter__", "__next__",
        "__len__", "__bool__", "__enter__", "__exit__", "__get__", "__torch_function__", "__torch_dispatch__",
    }
)  # fmt: skip
_CONSTRUCTION: Final = frozenset({"__init__", "__new__", "__post_init__"})
_DESCRIPTORS: Final = (staticmethod, classmethod, property, functools.cached_property)
_CACHED: Final = type(functools.lru_cache(len))


class _Namespace:
    """A dict in which names stand for functions: a module's, a class's, or a table in a class.

    Attributes:
        label: What it is called in differences.
        entries: The live dict.
        names: The names that are used; None for a table, all of whose entries count.
        modules: Modules among the entries that are looked into.
        read_before: What `read` gave when functions were found.
    """

    __slots__ = ("entries", "label", "modules", "names", "read_before")

    def __init__(self, label: str, entries: dict[Any, Any], names: set[str] | None) -> None:
        self.label = label
        self.entries = entries
        self.names = names
        self.modules: dict[str, ModuleType] = {}
        self.read_before: dict[Any, Any] = {}

    def read(self) -> dict[Any, Any]:
        """Return the used functions by their names, and nothing of the data beside them."""
        used = list(self.entries) if self.names is None else self.names & self.entries.keys()
        found = {name: original_of(self.entries.get(name)) for name in used}
        return {name: value for name, value in found.items() if _is_function(value) or self.enters(value)}

    def enters(self, value: Any) -> bool:
        """Tell whether a value is a module that is looked into; one that loads its content when asked is not."""
        if type(value) is not ModuleType:
            return False
        name = value.__dict__.get("__name__")
        if not isinstance(name, str):
            return False
        if _package(name) == _package(self.label) == _TORCH:
            return name in _ENTERED_IN_TORCH
        return _package(name) not in _DATA_ONLY

    def unchanged(self) -> bool:
        """Tell whether every used name still stands for what it did."""
        now, before = self.read(), self.read_before
        return len(now) == len(before) and all(map(is_, map(now.get, before), before.values()))

    def found(self) -> Iterator[tuple[str, Any]]:
        """Yield what is remembered, by label."""
        for name, value in self.read_before.items():
            yield f"{self.label}[{name!r}]" if self.names is None else f"{self.label}.{name}", value


class Functions:
    """Hold the functions that code may call by name, and tell whether they are still the same.

    Args:
        classes: Classes of everything whose methods may run.
        callees: Functions that may run, and classes that may be called.
        name: Makes tokens, which hold nothing that is not held elsewhere.

    Attributes:
        entries: Tokens of all that was found, by where it stands.
        roots: Where the search began.
    """

    def __init__(self, classes: Iterable[type], callees: Iterable[Any], name: Callable[[Any], Any]) -> None:
        classes, callees = list(classes), list(callees)
        self.roots = roots(classes, callees)
        for _ in range(_TRIES):
            self._version = _torch.dict_version_function()
            self._epoch = _dict_epoch.functions_epoch()
            self._count = -1 if self._epoch is None else self._epoch.count
            search = _Search(self._version, self._epoch)
            search.run(classes, callees)
            self._namespaces, self._versions = search.namespaces, search.versions
            self._dicts = [namespace.entries for namespace in self._namespaces]
            self._sum = sum(self._versions)
            for namespace in self._namespaces:
                namespace.read_before = namespace.read()
            if self._is_unwritten():
                break
        pairs = sorted((pair for namespace in self._namespaces for pair in namespace.found()), key=lambda pair: pair[0])
        self.entries: Entries = tuple((label, name(value)) for label, value in pairs)

    def unchanged(self) -> bool:
        """Tell whether no function was replaced since this object was made.

        Where something else was written to the dicts that hold them, the functions are compared, and the write is not
        looked at again.
        """
        return self._is_unwritten() or self._same_functions()

    def _is_unwritten(self) -> bool:
        if self._epoch is not None:
            return self._epoch.count == self._count
        return self._version is not None and sum(map(self._version, self._dicts)) == self._sum

    def _same_functions(self) -> bool:
        count = -1 if self._epoch is None else self._epoch.count  # before what is read: a later write counts again
        versions = self._versions if self._version is None else list(map(self._version, self._dicts))
        written = self._namespaces
        if self._version is not None:
            pairs = zip(self._namespaces, versions, self._versions, strict=True)
            written = [namespace for namespace, now, before in pairs if now != before]
        if not all(namespace.unchanged() for namespace in written):
            return False
        self._count, self._versions, self._sum = count, versions, sum(versions)
        return True


def roots(classes: Iterable[type], callees: Iterable[Any]) -> Hashable:
    """Name where a search begins, holding nothing alive."""
    return frozenset(map(weakref.ref, classes)), frozenset(map(weakref.ref, callees))


def original_of(value: Any) -> Any:
    """Return the function behind one that bcg put in its place; anything else as it is."""
    return original_function(value) if type(value) is FunctionType else value


class _Search:
    """Follow code from name to name.

    Attributes:
        namespaces: Where the names stand.
        versions: Of their dicts, read before anything in them; empty where this Python has none.
    """

    def __init__(self, version: Callable[[Any], int] | None, epoch: _dict_epoch.Epoch | None) -> None:
        self.namespaces: list[_Namespace] = []
        self.versions: list[int] = []
        self._version = version
        self._epoch = epoch
        self._by_dict: dict[int, _Namespace] = {}
        self._attributes: set[str] = set(_IMPLICIT)  # names that may be attributes of any class
        self._of_constructed: set[str] = set(_IMPLICIT | _CONSTRUCTION)
        self._waiting: dict[str, list[tuple[_Namespace, Any]]] = {}  # what classes have under names not used so far
        self._codes: set[tuple[int, int]] = set()
        self._met: dict[int, FunctionType] = {}
        self._pending: deque[FunctionType] = (
            deque()
        )  # in this order a bound leaves out what is farthest from the module

    def run(self, classes: Iterable[type], callees: Iterable[Any]) -> None:
        """Follow all that these lead to."""
        for kind in classes:
            with contextlib.suppress(Exception):
                self._class(kind, is_constructed=False)
        for callee in callees:
            self._value(callee)
        while self._pending and len(self._codes) < MAX_CODES:
            self._function(self._pending.popleft())

    # --- code ---------------------------------------------------------------------------------------------------------

    def _function(self, function: FunctionType) -> None:
        names_of = function.__globals__
        if (id(function.__code__), id(names_of)) not in self._codes:
            self._codes.add((id(function.__code__), id(names_of)))
            names = _names(function.__code__)
            self._globals(names_of, str(names_of.get("__name__")), names, set())
            for name in names - self._attributes:
                self._attribute(name)
        for cell in function.__closure__ or ():
            self._value(_content(cell))
        self._value(function.__dict__.get("__wrapped__"))

    def _globals(self, entries: dict[str, Any], label: str, names: frozenset[str], visited: set[int]) -> None:
        """Look up names of a code object in its globals, and in modules that it may reach through them."""
        visited.add(id(entries))
        namespace = self._namespace(label, entries, set())
        assert namespace.names is not None
        new = names - namespace.names
        namespace.names |= new
        for name in new & entries.keys():
            value = original_of(entries.get(name))
            if namespace.enters(value):
                namespace.modules[name] = value
            elif not isinstance(value, ModuleType):
                self._value(value)
        for name in names & namespace.modules.keys():
            module = namespace.modules[name]
            if id(module.__dict__) not in visited:
                self._globals(module.__dict__, module.__dict__["__name__"], names, visited)

    def _attribute(self, name: str) -> None:
        """Take what classes hold under a name that turned up in code."""
        if _is_special(name):
            return
        self._attributes.add(name)
        self._of_constructed.add(name)
        for namespace, value in self._waiting.pop(name, ()):
            self._member(namespace, name, value)

    # --- what names stand for -----------------------------------------------------------------------------------------

    def _value(self, value: Any) -> None:
        """Follow what a name stands for, where it can be read."""
        with contextlib.suppress(Exception):
            self._open(original_of(value))

    def _open(self, value: Any) -> None:
        kind = type(value)
        if kind is FunctionType:
            if id(value) not in self._met and _is_followed(value.__globals__.get("__name__")):
                self._met[id(value)] = value
                self._pending.append(value)
        elif kind in (staticmethod, classmethod, MethodType):
            self._value(value.__func__)
        elif kind is property:
            self._value(value.fget)
        elif kind in (functools.cached_property, functools.partial):
            self._value(value.func)
        elif kind is _CACHED:
            self._value(value.__wrapped__)
        elif isinstance(value, type):
            self._class(value, is_constructed=True)
        elif kind is not BuiltinFunctionType:
            self._class(kind, is_constructed=False)

    def _class(self, kind: type, *, is_constructed: bool) -> None:
        for base in kind.__mro__:
            if not _is_followed(base.__module__):
                continue
            names = self._of_constructed if is_constructed else self._attributes
            entries = _dict_of(base)
            known = self._by_dict.get(id(entries))
            if known is None:
                namespace = self._namespace(f"{base.__module__}.{base.__qualname__}", entries, names)
                for name, value in list(entries.items()):
                    self._offer(namespace, name, value)
            elif is_constructed and known.names is not self._of_constructed:
                known.names = names
                for name in _CONSTRUCTION & entries.keys():
                    self._member(known, name, entries.get(name))

    def _offer(self, namespace: _Namespace, name: str, value: Any) -> None:
        if name in (namespace.names or ()):
            self._member(namespace, name, value)
        elif not _is_special(name) and (_is_function(value) or isinstance(value, dict)):
            self._waiting.setdefault(name, []).append((namespace, value))

    def _member(self, namespace: _Namespace, name: str, value: Any) -> None:
        """Follow what a class holds under a used name; a table of functions is followed as a whole."""
        if isinstance(value, dict):
            table = self._namespace(f"{namespace.label}.{name}", value, None)
            for entry in table.read().values():
                self._value(entry)
        elif _is_function(value):
            self._value(value)

    def _namespace(self, label: str, entries: dict[Any, Any], names: set[str] | None) -> _Namespace:
        known = self._by_dict.get(id(entries))
        if known is None:
            known = self._by_dict[id(entries)] = _Namespace(label, entries, names)
            self.namespaces.append(known)
            if self._epoch is not None:
                self._epoch.watch([entries])
            if self._version is not None:
                self.versions.append(self._version(entries))
        return known


def _names(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a code object and those inside of it."""
    inner = [_names(constant) for constant in code.co_consts if type(constant) is CodeType]
    return frozenset(code.co_names).union(*inner)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_function(value: Any) -> bool:
    """Tell whether a value is something that code calls, if only by reading an attribute."""
    return callable(value) or isinstance(value, _DESCRIPTORS)


def _is_followed(module_name: Any) -> bool:
    if not isinstance(module_name, str):
        return False
    package = _package(module_name)
    return module_name.startswith(_FOLLOWED_IN_TORCH) if package == _TORCH else package not in _DATA_ONLY


def _package(module_name: str) -> str:
    return module_name.partition(".")[0]


def _is_special(name: Any) -> bool:
    return not isinstance(name, str) or (name.startswith("__") and name.endswith("__"))


def _dict_of(kind: type) -> dict[str, Any]:
    """Return the dict behind a class's ``__dict__``, which alone shows no writes."""
    for behind in gc.get_referents(kind.__dict__):
        if isinstance(behind, dict):
            return behind
    raise TypeError(f"{kind} has no dict")
