"""Bind a call to forward's parameters and make the key under which its graphs are found.

One call has one signature however it is spelled: by position or keyword, with a default left out or given, with
keywords in any order. Two calls that a graph could not serve alike have two.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch

from bcg import ambient as ambient_module
from bcg import trees
from bcg.ambient import AmbientState, ambient_state
from bcg.errors import ConfigError
from bcg.trees import Node, Structure, labelled_children
from bcg.values import (
    EXACT_TYPES,
    UnkeyableError,
    key_function_of,
    plain_form,
    register_key_function,
    unregister_key_function,
)

__all__ = [
    "Call",
    "CallBinder",
    "Signature",
    "TensorSpec",
    "describe_difference",
    "distance",
    "register_key",
    "unregister_key",
]

VARIABLE_POSITIONALS: Final = "*args"
_MAX_VALUE_TEXT: Final = 80
_CHANNELS_LAST_ORDERS: Final = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}  # dimensions, the innermost first
_DISABLED_TORCH_DISPATCH: Final = torch.Tensor.__torch_dispatch__


# --- binding ----------------------------------------------------------------------------------------------------------


class _Missing:
    """Stand for a parameter without a default."""


class CallBinder:
    """Bind calls to the parameters of one module's forward.

    Built once for a module; `fits` tells cheaply whether the module's forward is another function now.

    Args:
        forward: ``module.forward``. Decorators are looked through by ``__wrapped__``; a function without a readable
            signature takes anything.

    Example:
        >>> binder = CallBinder(torch.nn.Linear(2, 2).forward)
        >>> binder.bind((1,), {}) == binder.bind((), {"input": 1})
        True
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._function = _function_of(forward)
        parameters = _parameters_of(forward)
        kinds = [parameter.kind for parameter in parameters]
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self._defaults = {p.name: _Missing if p.default is p.empty else p.default for p in named}
        self._by_position = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
        self._only_by_position = frozenset(p.name for p in named if p.kind is p.POSITIONAL_ONLY)
        self._takes_more_positionals = inspect.Parameter.VAR_POSITIONAL in kinds
        self._takes_more_keywords = inspect.Parameter.VAR_KEYWORD in kinds

    def fits(self, forward: Callable[..., Any]) -> bool:
        """Tell whether this binder was built for a function.

        Args:
            forward: ``module.forward`` as it is now.

        Returns:
            False where a new binder is needed.
        """
        return _function_of(forward) is self._function

    def bind(self, args: Sequence[object], kwargs: dict[str, Any]) -> dict[str, object] | None:
        """Give every argument its parameter's name.

        Args:
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.

        Returns:
            Arguments in the order of forward's parameters, defaults filled in, then further positionals as
            ``"*args"`` and further keywords, sorted. None where the call does not bind: the module, called as it
            was, raises the error that its user expects.
        """
        bound = dict(zip(self._by_position, args, strict=False))
        further = args[len(bound) :]
        if further and not self._takes_more_positionals:
            return None
        arguments: dict[str, object] = {}
        taken = 0
        for name, default in self._defaults.items():
            if name in kwargs:
                if name in bound or name in self._only_by_position:
                    return None
                arguments[name] = kwargs[name]
                taken += 1
            elif name in bound:
                arguments[name] = bound[name]
            elif default is _Missing:
                return None
            else:
                arguments[name] = default
        if further:
            arguments[VARIABLE_POSITIONALS] = tuple(further)
        if taken == len(kwargs):
            return arguments
        return self._with_further_keywords(arguments, kwargs)

    def _with_further_keywords(self, arguments: dict[str, object], kwargs: dict[str, Any]) -> dict[str, object] | None:
        further = sorted(name for name in kwargs if name not in self._defaults)
        if not self._takes_more_keywords or VARIABLE_POSITIONALS in further:
            return None
        arguments.update((name, kwargs[name]) for name in further)
        return arguments

    def call(
        self, args: Sequence[object], kwargs: dict[str, Any], *, max_leaves: int = trees.DEFAULT_MAX_LEAVES
    ) -> Call | None:
        """Bind a call, take its arguments apart and key it.

        Args:
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.
            max_leaves: Elements of all arguments together that are looked at.

        Returns:
            The call, with a signature or a reason why there is none; None where the call does not bind.
        """
        arguments = self.bind(args, kwargs)
        if arguments is None:
            return None
        tree = trees.flatten_arguments(arguments, max_leaves=max_leaves)
        state = ambient_state()
        signature, refusal = _signature_or_refusal(tree, state)
        slots = [index for index, leaf in enumerate(tree.leaves) if isinstance(leaf, torch.Tensor)]
        return Call(
            arguments=arguments,
            structure=tree.structure,
            leaves=tree.leaves,
            tensors=[tree.leaves[index] for index in slots],  # type: ignore[misc]
            tensor_slots=slots,
            signature=signature,
            refusal=refusal,
            positionals=min(len(args), len(self._by_position)),
            keywords=tuple(kwargs),
        )


def _function_of(forward: Callable[..., Any]) -> object:
    # A method is a new object at each access, its function is not.
    return getattr(forward, "__func__", forward)


def _parameters_of(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(forward).parameters.values())
    except (ValueError, TypeError):  # builtins, or a __signature__ that is none
        anything = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [inspect.Parameter(name, kind) for name, kind in zip(("args", "kwargs"), anything, strict=True)]


@dataclass(slots=True)
class Call:
    """Hold one bound call, taken apart.

    Attributes:
        arguments: Values by parameter name, see `CallBinder.bind`.
        structure: What is left of the arguments without their leaves.
        leaves: Tensors and values, in order.
        tensors: The leaves that are tensors, each once.
        tensor_slots: Their indices in ``leaves``.
        signature: The key, or None.
        refusal: Why there is no key; names the argument.
        positionals: Parameters that the caller gave by position.
        keywords: Names that the caller gave by keyword.
    """

    arguments: dict[str, object]
    structure: Structure
    leaves: list[object]
    tensors: list[torch.Tensor]
    tensor_slots: list[int]
    signature: Signature | None
    refusal: str | None
    positionals: int
    keywords: tuple[str, ...]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the call's arguments with other tensors.

        What was given by position stays so and what was left out stays out: hooks and decorators around forward may
        look.

        Args:
            tensors: One for each of ``tensors``.

        Returns:
            Positional and keyword arguments in new containers.
        """
        leaves = list(self.leaves)
        for slot, tensor in zip(self.tensor_slots, tensors, strict=True):
            leaves[slot] = tensor
        arguments: dict[str, Any] = self.structure.unflatten(leaves)
        named = list(arguments.values())[: self.positionals]
        return (*named, *arguments.get(VARIABLE_POSITIONALS, ())), {name: arguments[name] for name in self.keywords}

    def without_tensors(self) -> Call:
        """Return a copy that can be kept: it can `rebuild`, and holds none of the caller's tensors alive."""
        leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return replace(self, arguments={}, leaves=leaves, tensors=[])


# --- the key ----------------------------------------------------------------------------------------------------------


class TensorSpec(NamedTuple):
    """Describe one tensor argument, and the static input that stands for it.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        device: Its device, as text.
        stride: The stride of the static input: the argument's own where it is dense, else a contiguous one.
        traits: What sets the tensor apart from a plain one: subclass, required gradient, conjugate or negative bit.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: str
    stride: tuple[int, ...]
    traits: tuple[object, ...] = ()

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


class Signature:
    """Key a call by value: what its graph depends on, and nothing that it does not.

    Attributes:
        structure: Containers, names, and which tensors are the same object.
        leaf_keys: A `TensorSpec` for each tensor, a form of type and value for each other leaf.
        ambient: The state around the call, see `bcg.ambient`.
    """

    __slots__ = ("__weakref__", "_hash", "ambient", "leaf_keys", "structure")

    def __init__(self, structure: Structure, leaf_keys: tuple[Any, ...], ambient: AmbientState) -> None:
        self.structure = structure
        self.leaf_keys = leaf_keys
        self.ambient = ambient
        self._hash = hash((structure.node, leaf_keys, ambient))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Signature) or self._hash != other._hash:
            return False
        return (self.structure, self.leaf_keys, self.ambient) == (other.structure, other.leaf_keys, other.ambient)

    def __repr__(self) -> str:
        return f"<Signature {self.summary()}>"

    def under(self, ambient: AmbientState) -> Signature:
        """Return the signature of the same call under another ambient state.

        Args:
            ambient: What `bcg.ambient.ambient_state` returned.

        Returns:
            This signature where the state is the same.
        """
        return self if ambient == self.ambient else Signature(self.structure, self.leaf_keys, ambient)

    @property
    def tensor_specs(self) -> list[TensorSpec]:
        """The tensors' part of the key, in the order of `Call.tensors`."""
        return [key for key in self.leaf_keys if isinstance(key, TensorSpec)]

    def summary(self) -> str:
        """Name the tensors and their shapes on one line, for tables.

        Returns:
            Such as ``hidden_states float32[1,64,16], timestep float32[1]``.
        """
        named = zip(self.structure.paths, self.leaf_keys, strict=True)
        return ", ".join(f"{path} {key}" for path, key in named if isinstance(key, TensorSpec))


def _signature_or_refusal(tree: trees.Tree, ambient: AmbientState) -> tuple[Signature | None, str | None]:
    keys: list[Any] = []
    try:
        gradients = torch.is_grad_enabled()
        for leaf in tree.leaves:
            kind = type(leaf)
            keys.append((kind, leaf) if kind in EXACT_TYPES else _leaf_key(tree, len(keys), gradients))
    except UnkeyableError as error:
        return None, f"argument `{tree.structure.paths[len(keys)]}` {error}"
    try:
        return Signature(tree.structure, tuple(keys), ambient), None
    except TypeError as error:  # a default factory, or what the user made equal but not hashable
        return None, f"the arguments cannot be hashed: {error}"


def _leaf_key(tree: trees.Tree, index: int, gradients: bool) -> Any:
    leaf = tree.leaves[index]
    if isinstance(leaf, torch.Tensor):
        return _tensor_key(leaf, gradients)
    if index in tree.refused:
        raise UnkeyableError(tree.refused[index])
    return _value_key(leaf)


def opaque_arguments(
    arguments: dict[str, object], *, max_leaves: int = trees.DEFAULT_MAX_LEAVES
) -> Iterator[tuple[str, str]]:
    """Yield every argument, or part of one, that keeps a call from having a key.

    Args:
        arguments: Values by parameter name, as `CallBinder.bind` returns them.
        max_leaves: Elements of all arguments together that are looked at.

    Yields:
        The path of the argument, and what it is that it cannot be keyed.

    Example:
        >>> [path for path, reason in opaque_arguments({"x": 1, "options": {"steps": iter([1])}})]
        ["options['steps']"]
    """
    tree = trees.flatten_arguments(arguments, max_leaves=max_leaves)
    for index, path in enumerate(tree.structure.paths):
        try:
            if type(tree.leaves[index]) not in EXACT_TYPES:
                _leaf_key(tree, index, torch.is_grad_enabled())
        except UnkeyableError as error:
            yield path, str(error)


def _tensor_key(tensor: torch.Tensor, gradients: bool) -> TensorSpec:
    kind = type(tensor)
    if kind is not torch.Tensor and kind.__torch_dispatch__ is not _DISABLED_TORCH_DISPATCH:
        raise UnkeyableError(f"is a {kind.__qualname__}, a tensor that runs Python of its own in every operation")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise UnkeyableError(f"is a {_uncommon_kind(tensor)} tensor, for which bcg has no static input")
    shape = tensor.shape
    plain = len(shape) not in _CHANNELS_LAST_ORDERS and tensor.is_contiguous()
    stride = _contiguous_stride(shape) if plain else _static_stride(shape, tensor.stride())
    return TensorSpec(shape, tensor.dtype, _device_text(tensor.device), stride, _traits(tensor, kind, gradients))


def _uncommon_kind(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    return "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")


def _traits(tensor: torch.Tensor, kind: type, gradients: bool) -> tuple[object, ...]:
    wants_gradient = gradients and tensor.requires_grad
    if kind is torch.Tensor and not wants_gradient and not tensor.is_conj() and not tensor.is_neg():
        return ()
    named = {"requires grad": wants_gradient, "conjugate": tensor.is_conj(), "negative": tensor.is_neg()}
    traits = [name for name, present in named.items() if present]
    return (*traits,) if kind is torch.Tensor else (kind, *traits)


@functools.lru_cache(maxsize=256)
def _device_text(device: torch.device) -> str:
    return str(device)


@functools.lru_cache(maxsize=4096)
def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    stride: list[int] = []
    size = 1
    for extent in reversed(shape):
        stride.append(size)
        size *= max(extent, 1)
    return tuple(reversed(stride))


@functools.lru_cache(maxsize=4096)
def _static_stride(shape: torch.Size, stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride of a static input: the same order of dimensions where they are dense, else contiguous."""
    # Dimensions of one element have arbitrary strides; only whether torch takes the whole for channels last counts.
    if 0 in shape:
        return _contiguous_stride(shape)
    order = sorted((index for index, extent in enumerate(shape) if extent != 1), key=lambda index: stride[index])
    size = 1
    for index in order:
        if stride[index] != size:
            return _contiguous_stride(shape)
        size *= shape[index]
    if _is_channels_last(shape, stride):
        return _channels_last_stride(shape)
    dense = list(stride)
    for index in reversed(range(len(shape))):
        if shape[index] == 1:
            dense[index] = dense[index + 1] * shape[index + 1] if index + 1 < len(shape) else 1
    return tuple(dense)


def _is_channels_last(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Tell whether kernels take a tensor for channels last, dimensions of one element included.

    As c10's ``is_channels_last_strides_2d`` and ``_3d``: convolutions, norms and resampling choose algorithms by it.
    """
    if stride[1:2] == (0,):
        return False
    least = 0
    for index in _CHANNELS_LAST_ORDERS.get(len(shape), ()):
        if stride[index] < least or (index == 0 and least == stride[1]):
            return False
        least = stride[index] * shape[index]
    return len(shape) in _CHANNELS_LAST_ORDERS


def _channels_last_stride(shape: torch.Size) -> tuple[int, ...]:
    stride = [1] * len(shape)
    size = 1
    for index in _CHANNELS_LAST_ORDERS[len(shape)]:
        stride[index] = size
        size *= shape[index]
    return tuple(stride)


def _value_key(value: object) -> tuple[Any, ...]:
    key_function = key_function_of(type(value))
    if key_function is None:
        return _plain_key(value)
    try:
        key = key_function(value)
        hash(key)
    except Exception as error:  # a user's function must not raise out of a call that runs without it
        kind, reason = type(value).__qualname__, f"{type(error).__name__}: {error}"
        raise UnkeyableError(f"is a {kind} whose registered key function gives no hashable key ({reason})") from error
    return (type(value), "registered", key)


def _plain_key(value: object) -> tuple[Any, ...]:
    try:
        return plain_form(value)
    except UnkeyableError as error:
        advice = "that bcg cannot key; register a key function with bcg.register_key(type, function)"
        raise UnkeyableError(f"{error} {advice}") from None


def register_key(kind: type, key_function: Callable[[Any], Any]) -> None:
    """Tell bcg how arguments of a type are compared.

    Calls that pass such an object are served by graphs then; without, they run eagerly. The object itself is handed to
    the module at capture only, so its key must hold everything that the module reads from it.

    Args:
        kind: The type, subclasses included.
        key_function: Returns a hashable key of an instance; equal keys mean that a graph captured with one instance
            serves the other.

    Raises:
        ConfigError: Values of this type are compared by value already.

    Example:
        >>> class Schedule:
        ...     __slots__ = ()
        >>> register_key(Schedule, lambda schedule: "constant")
        >>> unregister_key(Schedule)
    """
    if kind in trees.BUILTIN_OPENERS:
        raise ConfigError(f"values of type {kind.__qualname__} are opened: no key function is needed.")
    try:
        register_key_function(kind, key_function)
    except TypeError as error:
        raise ConfigError(f"{error}: no key function is needed.") from None
    trees.forget_types()


def unregister_key(kind: type) -> None:
    """Undo `register_key`.

    Args:
        kind: The type that was registered; another one changes nothing.
    """
    unregister_key_function(kind)
    trees.forget_types()


# --- comparing two signatures -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Difference:
    line: str
    weight: int


_OTHER_KIND: Final = 16  # a tensor and None, a list and a dict: no small change of the request leads there
_OTHER_VALUE: Final = 4
_OTHER_EXTENT: Final = 1


def describe_difference(expected: Signature, got: Signature) -> list[str]:
    """Say argument by argument in what two signatures differ.

    Args:
        expected: The captured signature.
        got: The one of a call.

    Returns:
        One line for each difference, such as ``timestep: expected float32[1] on cpu, got bfloat16[1] on cpu``; empty
        where the signatures are equal.
    """
    return [difference.line for difference in _differences(expected, got)]


def distance(expected: Signature, got: Signature) -> int:
    """Measure how far apart two signatures are, to find the nearest captured one.

    Args:
        expected: The captured signature.
        got: The one of a call.

    Returns:
        0 for equal ones; other extents of a tensor count least, another kind of value most.
    """
    return sum(difference.weight for difference in _differences(expected, got))


def _differences(expected: Signature, got: Signature) -> list[_Difference]:
    found: list[_Difference] = []
    _compare_nodes(expected, got, expected.structure.node, got.structure.node, "", found)
    lines = ambient_module.describe(expected.ambient, got.ambient)
    return [*found, *(_Difference(line, _OTHER_VALUE) for line in lines)]


def _compare_nodes(
    expected: Signature, got: Signature, one: Node, other: Node, path: str, found: list[_Difference]
) -> None:
    if isinstance(one, int) and isinstance(other, int):
        difference = _leaf_difference(expected, got, one, other, path)
        if difference is not None:
            found.append(difference)
    elif isinstance(one, int) or isinstance(other, int) or not _same_container(one, other):
        texts = _node_text(expected, one), _node_text(got, other)
        if texts[0] == texts[1]:
            texts = (texts[0], f"{texts[1]} with other keys or in another order")
        found.append(_Difference(_line(path, *texts), _OTHER_KIND))
    else:
        _compare_children(expected, got, one, other, path, found)


def _same_container(one: Any, other: Any) -> bool:
    if one[0] is not other[0]:
        return False
    is_call = one[0] is dict and one[1][1] is None and other[1][1] is None
    return is_call or (one[1] == other[1] and len(one[2]) == len(other[2]))


def _compare_children(
    expected: Signature, got: Signature, one: Node, other: Node, path: str, found: list[_Difference]
) -> None:
    ones = dict(labelled_children(one, expected.structure.of_arguments and not path))
    others = dict(labelled_children(other, got.structure.of_arguments and not path))
    before = len(found)
    for suffix in ones | others:
        where = path + suffix
        if suffix not in others:
            found.append(_Difference(_line(where, _node_text(expected, ones[suffix]), "nothing"), _OTHER_KIND))
        elif suffix not in ones:
            found.append(_Difference(_line(where, "nothing", _node_text(got, others[suffix])), _OTHER_KIND))
        else:
            _compare_nodes(expected, got, ones[suffix], others[suffix], where, found)
    if len(found) == before and list(ones) != list(others):
        found.append(_Difference(_line(path, f"keys in the order {', '.join(ones)}", ", ".join(others)), _OTHER_VALUE))


def _leaf_difference(expected: Signature, got: Signature, one: int, other: int, path: str) -> _Difference | None:
    first, second = expected.leaf_keys[one], got.leaf_keys[other]
    if isinstance(first, TensorSpec) and isinstance(second, TensorSpec):
        if first != second:
            return _Difference(_line(path, *_tensor_texts(first, second)), _tensor_weight(first, second))
        if one != other and expected.structure.paths[one] != got.structure.paths[other]:
            texts = (f"the tensor of {s.structure.paths[i]}" for s, i in ((expected, one), (got, other)))
            return _Difference(_line(path, *texts), _OTHER_VALUE)
        return None
    if first == second:
        return None
    same_kind = not isinstance(first, TensorSpec) and not isinstance(second, TensorSpec) and first[0] is second[0]
    line = _line(path, _node_text(expected, one), _node_text(got, other))
    return _Difference(line, _OTHER_VALUE if same_kind else _OTHER_KIND)


def _tensor_texts(one: TensorSpec, other: TensorSpec) -> tuple[str, str]:
    texts = []
    for spec in (one, other):
        text = f"{spec} on {spec.device}"
        if one.shape == other.shape and one.stride != other.stride:
            text += f" with strides {spec.stride}"
        if one.traits != other.traits:
            text += f" ({', '.join(map(_trait_text, spec.traits)) or 'plain'})"
        texts.append(text)
    return texts[0], texts[1]


def _trait_text(trait: object) -> str:
    return trait.__name__ if isinstance(trait, type) else str(trait)


def _tensor_weight(one: TensorSpec, other: TensorSpec) -> int:
    weight = _OTHER_VALUE * ((one.dtype != other.dtype) + (one.device != other.device) + (one.traits != other.traits))
    if len(one.shape) != len(other.shape):
        return weight + _OTHER_VALUE
    extents = sum(a != b for a, b in zip(one.shape, other.shape, strict=True))
    return weight + _OTHER_EXTENT * (extents or one.stride != other.stride)


def _node_text(signature: Signature, node: Node) -> str:
    if not isinstance(node, int):
        return trees.describe_container(node)
    key = signature.leaf_keys[node]
    if isinstance(key, TensorSpec):
        return str(key)
    return _value_text(key)


def _value_text(key: tuple[Any, ...]) -> str:
    kind, *rest = key
    plain = len(rest) == 1 and kind in (type(None), bool, int, float, str, torch.dtype, torch.device)
    text = str(rest[0]) if plain and kind is not str else repr(rest[0] if len(rest) == 1 else tuple(rest))
    if not plain:
        text = f"{kind.__name__} {text}"
    return text if len(text) <= _MAX_VALUE_TEXT else text[: _MAX_VALUE_TEXT - 3] + "..."


def _line(path: str, expected: str, got: str) -> str:
    return f"{path or 'arguments'}: expected {expected}, got {got}"
