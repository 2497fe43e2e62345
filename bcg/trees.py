"""Take nested Python values apart into leaves and put them together again.

`torch.utils._pytree` does not open dataclasses, UserDict, dict subclasses or plain objects, and diffusers passes and
returns all of them: a tensor that is not found is a tensor that is not copied into a static input.

A *node* describes one value without its leaves. It is a leaf's index (an ``int``; the same index again is the same
tensor again) or a tuple ``(type, labels, children)``, so that hashing and comparing structures happens in C:

- ``(list | tuple, None, items)``
- ``(dict | OrderedDict, (keys, key forms), values)``
- ``(subclass of those, extra, (items node, state node))``; ``extra`` is the factory of a defaultdict
- ``(_State, (attributes, mirrored attributes), values)``: what such a subclass keeps in its ``__dict__`` and slots
- ``(plain class, attributes, values)``
- ``(_Again, n, ())``: the n-th plain object again
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeAlias

import torch

from bcg.values import EXACT_TYPES, UnkeyableError, key_function_of, plain_form

__all__ = ["Structure", "Tree", "flatten", "flatten_arguments", "map_tensors"]

DEFAULT_MAX_LEAVES: Final = 2048
_MAX_DEPTH: Final = 64  # well below the recursion limit, far above what a call of a model passes
_MAX_CACHED_TYPES: Final = 1024
_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: set for every class made by a class statement
_POINTER_BYTES: Final = 8 if sys.maxsize > 2**32 else 4

Node: TypeAlias = "int | tuple[Any, Any, tuple[Any, ...]]"


class _Again:
    """Node type of a plain object that occurred before."""


class _State:
    """Node type of the attributes of a container's subclass."""


# --- the result of taking apart ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Structure:
    """Hold everything of a nested value but its leaves; hashable and compared by value.

    Attributes:
        node: The description (see the module's docstring).
        of_arguments: The outermost dict is a call's arguments, so that paths begin with their names.
    """

    node: Node
    of_arguments: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self.node == other.node and self.of_arguments == other.of_arguments

    def __hash__(self) -> int:
        return hash(self.node)

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """Name every leaf as it is reached from the value: ``x[1]``, ``kwargs['mask']``, ``cache.layers[0].k``."""
        paths: list[str] = []
        _collect_paths(self.node, "", paths, self.of_arguments)
        return tuple(paths)

    def unflatten(self, leaves: Sequence[object]) -> Any:
        """Build the value with other leaves.

        Args:
            leaves: One object for every leaf, in the order in which `flatten` found them.

        Returns:
            New containers and objects of the same types around the given leaves.

        Raises:
            ValueError: Another number of leaves is needed.
        """
        builder = _Builder(leaves)
        value = builder.build(self.node)
        if builder.used != len(leaves):
            raise ValueError(f"{builder.used} leaves are needed, {len(leaves)} were given.")
        return value


@dataclass
class Tree:
    """Hold a value that was taken apart.

    Attributes:
        leaves: Tensors and everything that is not opened, in order; a tensor that occurs twice is one leaf.
        structure: The rest.
        refused: Why a leaf that is a container was not opened, by the leaf's index.
    """

    leaves: list[object]
    structure: Structure
    refused: dict[int, str] = field(default_factory=dict)


def flatten(value: object, *, max_leaves: int = DEFAULT_MAX_LEAVES) -> Tree:
    """Take a nested value apart.

    Opened are lists, tuples, dicts, their subclasses (named tuples, `OrderedDict`, diffusers' `BaseOutput`),
    dataclasses, `UserDict` and *plain objects*: instances of Python classes without a ``__new__`` of their own, whose
    whole state is in ``__dict__`` and slots. Modules, functions, generators, arrays, locks and so on are leaves.

    Args:
        value: Anything.
        max_leaves: Elements (leaves and containers together) that are looked at before giving up.

    Returns:
        The leaves and the structure. A value that is too large, too deep or contains itself is one leaf, with the
        reason in `Tree.refused`.

    Example:
        >>> tree = flatten({"a": [1, 2]})
        >>> tree.leaves, tree.structure.unflatten([3, 4])
        ([1, 2], {'a': [3, 4]})
    """
    walker = _Walker(max_leaves)
    node = walker.visit_or_refuse(value)
    return Tree(walker.leaves, Structure(node), walker.refused)


def flatten_arguments(arguments: dict[str, object], *, max_leaves: int = DEFAULT_MAX_LEAVES) -> Tree:
    """Take a call's arguments apart; like `flatten`, but one argument that is refused leaves the others open.

    Args:
        arguments: Values by parameter name.
        max_leaves: Elements of all arguments together that are looked at.

    Returns:
        The leaves and the structure, whose paths begin with the parameters' names.
    """
    walker = _Walker(max_leaves)
    visit, leaves = walker.visit_or_refuse, walker.leaves
    nodes: list[Node] = []
    for value in arguments.values():
        if type(value) in EXACT_TYPES:  # most arguments of most calls
            nodes.append(len(leaves))
            leaves.append(value)
        else:
            nodes.append(visit(value))
    node = (dict, (tuple(arguments), None), tuple(nodes))
    return Tree(leaves, Structure(node, True), walker.refused)


def map_tensors(value: Any, function: Callable[[torch.Tensor], object]) -> Any:
    """Rebuild a nested value with every tensor replaced.

    Args:
        value: Anything that `flatten` opens, of any size.
        function: Called once for each distinct tensor.

    Returns:
        New containers of the same types; leaves that are no tensors are the same objects.

    Raises:
        UnkeyableError: The value contains itself or is too deep, so that tensors in it cannot be replaced.

    Example:
        >>> map_tensors((torch.ones(1), None), lambda t: t.clone())
        (tensor([1.]), None)
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    tree = flatten(value, max_leaves=sys.maxsize)
    for reason in tree.refused.values():
        raise UnkeyableError(reason)
    leaves = [function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in tree.leaves]
    return tree.structure.unflatten(leaves)


# --- taking apart -----------------------------------------------------------------------------------------------------


class _RefusedError(Exception):
    """The walk met a value that it does not open; the message completes "argument `x` ..."."""


class _Walker:
    """Collect leaves and build nodes, within a bound."""

    __slots__ = ("active", "leaves", "limit", "nodes", "objects", "refused", "tensors")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nodes = 0
        self.leaves: list[object] = []
        self.tensors: dict[int, int] = {}
        self.objects: dict[int, int] = {}
        self.active: set[int] = set()
        self.refused: dict[int, str] = {}

    def visit_or_refuse(self, value: object) -> Node:
        leaves, objects, nodes = len(self.leaves), len(self.objects), self.nodes
        try:
            return self.visit(value)
        except _RefusedError as refusal:
            self._go_back(leaves, objects)
            self.nodes = nodes
            self.active.clear()
            self.refused[leaves] = str(refusal)
            return self.leaf(value)

    def _go_back(self, leaves: int, objects: int) -> None:
        del self.leaves[leaves:]
        self.tensors = {key: index for key, index in self.tensors.items() if index < leaves}
        self.objects = {key: number for key, number in self.objects.items() if number < objects}

    def visit(self, value: object) -> Node:
        kind = type(value)
        if kind in EXACT_TYPES:
            return self.leaf(value)
        opener = _OPENERS.get(kind) or _opener_for(kind)
        return opener(self, value)

    def leaf(self, value: object) -> int:
        index = len(self.leaves)
        self.leaves.append(value)
        return index

    def tensor(self, value: object) -> int:
        key = id(value)  # alive in `leaves`, so that the id is the object's own
        index = self.tensors.get(key)
        if index is None:
            index = self.tensors[key] = len(self.leaves)
            self.leaves.append(value)
        return index

    def children(self, owner: object, values: Any) -> tuple[Node, ...]:
        """Visit what is inside of a container, which counts against the bound before any of it is looked at."""
        if not values:
            return ()
        self._enter(owner, len(values))
        leaves = self.leaves
        nodes: list[Node] = []
        for value in values:
            if type(value) in EXACT_TYPES:  # long lists of plain numbers: no call for each
                nodes.append(len(leaves))
                leaves.append(value)
            else:
                nodes.append(self.visit(value))
        self.active.discard(id(owner))
        return tuple(nodes)

    def _enter(self, owner: object, size: int) -> None:
        self.nodes += size
        if self.nodes > self.limit:
            raise _RefusedError(f"has more elements than bcg looks at ({self.limit} in all arguments together)")
        if id(owner) in self.active:
            raise _RefusedError("contains itself")
        if len(self.active) >= _MAX_DEPTH:
            raise _RefusedError(f"is nested deeper than {_MAX_DEPTH} levels")
        self.active.add(id(owner))


_Opener: TypeAlias = Callable[[_Walker, Any], Node]


def _open_leaf(walker: _Walker, value: object) -> Node:
    return walker.leaf(value)


def _open_list(walker: _Walker, value: list[object]) -> Node:
    return (list, None, walker.children(value, value))


def _open_tuple(walker: _Walker, value: tuple[object, ...]) -> Node:
    return (tuple, None, walker.children(value, value))


def _open_dict(walker: _Walker, value: dict[object, object]) -> Node:
    return (dict, _key_labels(tuple(value)), walker.children(value, value.values()))


def _open_ordered_dict(walker: _Walker, value: OrderedDict[object, object]) -> Node:
    # The order of an OrderedDict is its own, dict's methods do not know it.
    return (OrderedDict, _key_labels(tuple(value)), walker.children(value, value.values()))


def _key_labels(keys: tuple[object, ...]) -> tuple[tuple[object, ...], object]:
    """Keep the keys and, unless all are strings, forms that tell 1 from True."""
    for key in keys:
        if type(key) is not str:
            return keys, _key_forms(keys)
    return keys, None


def _key_forms(keys: tuple[object, ...]) -> tuple[object, ...]:
    try:
        return tuple(plain_form(key) for key in keys)
    except UnkeyableError as error:
        raise _RefusedError(f"has a key that {error}") from None


def _open_subclass(base: type, walker: _Walker, value: Any) -> Node:
    """Open a container's subclass: its items as the base's, its attributes beside them."""
    kind = type(value)
    items, mirrored = _items_of(base, value)
    if base is list or base is tuple:
        items_node: Node = (base, None, walker.children(value, items))
    else:
        items_node = (base, _key_labels(tuple(items)), walker.children(value, items.values()))
    state, mirrors = _split_state(_state_of(value), mirrored)
    state_node = (_State, (tuple(state), mirrors), walker.children(value, list(state.values())))
    extra = value.default_factory if isinstance(value, defaultdict) else None
    return (kind, extra, (items_node, state_node))


def _items_of(base: type, value: Any) -> tuple[Any, dict[object, object]]:
    """Read the items past any override of the subclass; the second result is what attributes may mirror."""
    if base is list or base is tuple:
        return list(base.__iter__(value)), {}
    items: dict[object, object] = dict(base.items(value))  # type: ignore[attr-defined]
    return items, items


def _split_state(state: dict[str, object], mirrored: dict[object, object]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Part attributes that only repeat an item (`BaseOutput`, `FrozenDict`) from state of its own."""
    missing = object()
    mirrors = tuple(name for name, value in state.items() if mirrored.get(name, missing) is value)
    return {name: value for name, value in state.items() if name not in mirrors}, mirrors


def _open_object(walker: _Walker, value: object) -> Node:
    number = walker.objects.get(id(value))
    if number is not None:
        if id(value) in walker.active:
            raise _RefusedError("contains itself")
        return (_Again, number, ())
    walker.objects[id(value)] = len(walker.objects)
    state = _state_of(value)
    return (type(value), tuple(state), walker.children(value, list(state.values())))


def _state_of(value: object) -> dict[str, object]:
    state: dict[str, object] = dict(getattr(value, "__dict__", ()))
    for name, slot in _slots_of(type(value)):
        try:
            state[name] = slot.__get__(value)
        except AttributeError:  # an unset slot
            continue
    return state


def _slots_of(kind: type) -> list[tuple[str, Any]]:
    # Descriptors rather than `__slots__`: the latter may be a string, an iterator, or hold names that get mangled.
    return [
        (name, entry)
        for base in reversed(kind.__mro__)
        if base.__flags__ & _HEAP_TYPE
        for name, entry in vars(base).items()
        if isinstance(entry, types.MemberDescriptorType)
    ]


_OPENERS: Final[dict[type, _Opener]] = {
    torch.Tensor: _Walker.tensor,
    torch.nn.Parameter: _Walker.tensor,
    float: _open_leaf,
    list: _open_list,
    tuple: _open_tuple,
    dict: _open_dict,
    OrderedDict: _open_ordered_dict,
}
BUILTIN_OPENERS: Final[frozenset[type]] = frozenset(_OPENERS)


def forget_types() -> None:
    """Choose anew how each type is opened; needed after a key function was registered."""
    for kind in set(_OPENERS) - BUILTIN_OPENERS:
        _OPENERS.pop(kind, None)


def _opener_for(kind: type) -> _Opener:
    """Choose how values of a type are opened, once per type."""
    if len(_OPENERS) >= _MAX_CACHED_TYPES:  # classes made inside of functions must not pile up
        forget_types()
    opener = _OPENERS[kind] = _choose_opener(kind)
    return opener


def _choose_opener(kind: type) -> _Opener:
    if key_function_of(kind) is not None:
        return _open_leaf
    if issubclass(kind, torch.Tensor):
        return _Walker.tensor
    for base in (OrderedDict, dict, list, tuple):
        if issubclass(kind, base):
            return functools.partial(_open_subclass, base) if _is_rebuildable(kind) else _open_leaf
    return _open_object if _is_plain_class(kind) else _open_leaf


def _is_rebuildable(kind: type) -> bool:
    if issubclass(kind, Enum) or hasattr(kind, "__del__"):
        return False
    foreign = [base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE]
    known = {object, list, tuple, dict, OrderedDict, defaultdict}
    return set(foreign) <= known or _is_struct_sequence(kind)


def _is_struct_sequence(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "n_sequence_fields")


def _is_plain_class(kind: type) -> bool:
    """Tell whether an instance is its ``__dict__`` and slots and nothing else.

    ``__new__ is object.__new__`` alone is not enough: generators, locks and compiled patterns inherit it and keep their
    state in C. The size of an instance gives that away, as it does for pickle.
    """
    new: Any = kind.__new__
    if new is not object.__new__ or issubclass(kind, torch.nn.Module) or hasattr(kind, "__del__"):
        return False
    if not all(base.__flags__ & _HEAP_TYPE for base in kind.__mro__[:-1]) or kind.__itemsize__:
        return False
    slots = len(_slots_of(kind))
    # A negative offset is a dict or weak reference that CPython keeps in front of the object.
    pointers = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    if kind.__basicsize__ > object.__basicsize__ + pointers * _POINTER_BYTES:
        return False
    return kind.__dictoffset__ != 0 or slots > 0


# --- putting together -------------------------------------------------------------------------------------------------


class _Builder:
    """Build one value from a node and leaves."""

    __slots__ = ("leaves", "objects", "used")

    def __init__(self, leaves: Sequence[object]) -> None:
        self.leaves = leaves
        self.objects: list[object] = []
        self.used = 0

    def build(self, node: Node) -> Any:
        if isinstance(node, int):
            return self._leaf(node)
        kind, labels, children = node
        if kind is list:
            return [self.build(child) for child in children]
        if kind is tuple:
            return tuple([self.build(child) for child in children])
        if kind is dict or kind is OrderedDict:
            return kind(zip(labels[0], [self.build(child) for child in children], strict=True))
        if kind is _Again:
            return self.objects[labels]
        if issubclass(kind, (list, tuple, dict)):
            return self._subclass(kind, labels, children)
        return self._object(kind, labels, children)

    def _leaf(self, index: int) -> object:
        if index >= self.used:
            self.used = index + 1
        if index >= len(self.leaves):
            raise ValueError(f"more than {len(self.leaves)} leaves are needed.")
        return self.leaves[index]

    def _subclass(self, kind: type, extra: object, children: tuple[Any, ...]) -> object:
        items = self.build(children[0])
        names, mirrors = children[1][1]
        values = [self.build(child) for child in children[1][2]]
        new = _new_container(kind, items)
        if extra is not None:
            new.default_factory = extra
        for name, value in zip(names, values, strict=True):
            _set_attribute(new, name, value)
        for name in mirrors:
            _set_attribute(new, name, items[name])
        return new

    def _object(self, kind: type, names: tuple[str, ...], children: tuple[Any, ...]) -> object:
        new: Any = object.__new__(kind)
        self.objects.append(new)
        for name, child in zip(names, children, strict=True):
            _set_attribute(new, name, self.build(child))
        return new


def _new_container(kind: Any, items: Any) -> Any:
    """Make a container of a subclass with the base's methods: what the class itself adds may refuse or count writes."""
    if issubclass(kind, tuple):
        return kind(items) if _is_struct_sequence(kind) else tuple.__new__(kind, items)
    if issubclass(kind, list):
        new: Any = list.__new__(kind)
        list.extend(new, items)
        return new
    base: Any = next(base for base in (OrderedDict, defaultdict, dict) if issubclass(kind, base))
    new = base.__new__(kind)
    if base is OrderedDict:
        OrderedDict.__init__(new)  # below 3.12 the C part needs it
    for key, value in items.items():
        base.__setitem__(new, key, value)
    return new


def _set_attribute(target: object, name: str, value: object) -> None:
    # Past frozen dataclasses and properties: the state is put back as it was found, in `__dict__` or in a slot.
    namespace = getattr(target, "__dict__", None)
    if namespace is not None and not isinstance(getattr(type(target), name, None), types.MemberDescriptorType):
        namespace[name] = value
    else:
        object.__setattr__(target, name, value)


# --- reading a node ---------------------------------------------------------------------------------------------------


def labelled_children(node: Node, of_arguments: bool = False) -> Iterator[tuple[str, Node]]:
    """Yield every child of a node with what its path adds to the node's own.

    Args:
        node: A node that is no leaf.
        of_arguments: The node is the dict of a call's arguments.

    Yields:
        Path suffix and child.
    """
    assert not isinstance(node, int)
    kind, labels, children = node
    if kind is list or kind is tuple:
        yield from ((f"[{index}]", child) for index, child in enumerate(children))
    elif kind is dict or kind is OrderedDict:
        text = str if of_arguments else "[{!r}]".format
        yield from ((text(key), child) for key, child in zip(labels[0], children, strict=True))
    elif kind is not _Again and issubclass(kind, (list, tuple, dict)):
        fields = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
        for index, (suffix, child) in enumerate(labelled_children(children[0])):
            yield (f".{fields[index]}" if fields else suffix), child
        yield from labelled_children(children[1])
    else:
        names = labels[0] if kind is _State else labels
        yield from ((f".{name}", child) for name, child in zip(names if children else (), children, strict=True))


def describe_container(node: Node) -> str:
    """Say in a few words what a container is.

    Args:
        node: A node that is no leaf.

    Returns:
        Such as ``list of 3`` or ``GlmImageKVCache``.
    """
    assert not isinstance(node, int)
    kind, _, children = node
    if kind is _Again:
        return "an object that occurs before"
    if kind in (list, tuple, dict, OrderedDict):
        return f"{kind.__name__} of {len(children)}"
    if issubclass(kind, (list, tuple, dict)):
        return f"{kind.__name__} of {len(children[0][2])}"
    return str(kind.__name__)


def _collect_paths(node: Node, path: str, paths: list[str], of_arguments: bool) -> None:
    if isinstance(node, int):
        if node == len(paths):
            paths.append(path)
        return
    for suffix, child in labelled_children(node, of_arguments):
        _collect_paths(child, path + suffix, paths, False)
