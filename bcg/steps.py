"""The eager parts of a breakable graph: functions that run, and host reads that are compared, between segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from bcg import _torch, trees
from bcg.errors import CaptureError, GuardMiss
from bcg.layout import extent, has_repeats
from bcg.source import Where


class Step(Protocol):
    """A part of a breakable graph; a graph replays its steps without knowing their kind."""

    @property
    def is_stale(self) -> bool:
        """Whether a replay would raise, since what the step draws random numbers from is another one now."""

    def replay(self) -> None:
        """Run the step again."""

    def reset(self) -> None:
        """Give back what the step holds."""


class EagerStep:
    """A function that runs between two segments, with static tensors that its results are copied into.

    Args:
        function: What runs.
        args: Its positional arguments; tensors are static or borrowed from the segments before.
        kwargs: Its keyword arguments, likewise.
        name: What a user would call the step.
        where: Where the module calls it.
    """

    is_stale = False  # draws as eager does

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, where: Where
    ) -> None:
        self.name = name
        self.where = where
        self._function: Callable[..., Any] | None = function
        self._args = args
        self._kwargs = kwargs
        self._results: list[Any] = []
        self._copied: list[bool] = []
        self._structure: Any = None

    def adopt(self, result: Any, input_storages: set[int], borrow: Callable[[Tensor], Tensor]) -> Any:
        """Take the result of the first run.

        Args:
            result: What the function returned.
            input_storages: Keys of the storages of the arguments. A result in one of them stays what it is: replays
                find it at the same address.
            borrow: Makes a reference that keeps no scratch memory alive.

        Returns:
            The result with its fresh tensors replaced by static ones.
        """
        tree = trees.flatten(result)
        self._structure = tree.structure
        for reason in tree.refused.values():
            raise CaptureError(f"the result of eager break {self.name} at {self.where} {reason}: return plain tensors.")
        fresh = [isinstance(leaf, Tensor) and _torch.storage_key(leaf) not in input_storages for leaf in tree.leaves]
        tensors = [leaf for leaf, is_fresh in zip(tree.leaves, fresh, strict=True) if is_fresh]
        statics = iter(static_copies(cast(list[Tensor], tensors)))
        given = [next(statics) if is_fresh else leaf for leaf, is_fresh in zip(tree.leaves, fresh, strict=True)]
        self._copied = fresh
        self._results = [borrow(leaf) if isinstance(leaf, Tensor) else leaf for leaf in given]
        return tree.structure.unflatten(given)

    def static_bytes(self) -> int:
        """Return the bytes of the static tensors that the results are copied into."""
        return sum(result.nbytes for result, copied in zip(self._results, self._copied, strict=False) if copied)

    def replay(self) -> None:
        """Run the function and copy its results into the static tensors.

        Raises:
            GuardMiss: A result has another structure, shape, dtype or Python value than when it was captured.
        """
        assert self._function is not None
        tree = trees.flatten(self._function(*self._args, **self._kwargs))
        if tree.structure != self._structure:
            raise self._miss("result", "another structure", str(tree.structure), str(self._structure))
        for expected, got, copied in zip(self._results, tree.leaves, self._copied, strict=True):
            self._receive(expected, got, copied)

    def _receive(self, expected: Any, got: Any, copied: bool) -> None:
        if not isinstance(expected, Tensor):
            if not same_value(expected, got):
                raise self._miss("result", "another value", repr(got), repr(expected))
            return
        if not isinstance(got, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
            raise self._miss("result", "another shape", _form(got), _form(expected))
        if copied:
            expected.copy_(got)
        elif got.data_ptr() != expected.data_ptr() or got.stride() != expected.stride():
            # The next segment reads the argument's memory, where this result is not.
            raise self._miss("result", "another place", "other memory", "memory of an argument")

    def _miss(self, what: str, how: str, got: str, expected: str) -> GuardMiss:
        return GuardMiss(
            f"eager break {self.name} at {self.where}: {what} has {how}: expected {expected}, got {got}", self
        )

    def reset(self) -> None:
        """Drop the function, its arguments and the static tensors."""
        self._function = None
        self._args, self._kwargs, self._results, self._copied = (), {}, [], []


class GuardStep:
    """A host read: made again in every replay, and compared with the value that the capture relied on.

    Args:
        read: Makes the read.
        expected: The value at capture.
        name: What a user would call the read.
        where: Where the module makes it.
    """

    is_stale = False

    def __init__(self, read: Callable[[], Any], expected: Any, *, name: str, where: Where) -> None:
        self.name = name
        self.where = where
        self.expected = expected
        self._read: Callable[[], Any] | None = read

    def replay(self) -> None:
        """Make the read.

        Raises:
            GuardMiss: The value is another one than at capture.
        """
        assert self._read is not None
        value = self._read()
        if not same_value(self.expected, value):
            raise GuardMiss(
                f"guard {self.name} at {self.where}: expected {_short(self.expected)}, got {_short(value)}", self
            )

    def reset(self) -> None:
        """Drop the read and what it holds."""
        self._read = None


def static_copy(tensor: Tensor) -> Tensor:
    """Return an ordinary tensor with memory of its own, outside every graph pool, with the same content and layout."""
    with torch.inference_mode(False), torch.no_grad():
        static = torch.empty_like(tensor, memory_format=torch.preserve_format, requires_grad=False)
        return static.copy_(tensor)


def static_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return static copies of tensors; those that share memory share it again, so that a write to one shows in all."""
    groups: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(_torch.storage_key(tensor), []).append(tensor)
    copies: dict[int, Tensor] = {}
    for group in groups.values():
        shared = len(group) > 1 and len({tensor.dtype for tensor in group}) == 1 and not any(map(has_repeats, group))
        made = _sharing_copies(group) if shared else [static_copy(tensor) for tensor in group]
        copies.update((id(tensor), copy) for tensor, copy in zip(group, made, strict=True))
    return [copies[id(tensor)] for tensor in tensors]


def _sharing_copies(group: list[Tensor]) -> list[Tensor]:
    """Copy tensors of one storage into one static storage, at the same distances from each other."""
    begin = min(int(tensor.storage_offset()) for tensor in group)
    end = max(int(tensor.storage_offset()) + extent(tensor.shape, tensor.stride()) for tensor in group)
    with torch.inference_mode(False), torch.no_grad():
        memory = torch.empty(end - begin, dtype=group[0].dtype, device=group[0].device)
        views = [memory.as_strided(t.shape, t.stride(), int(t.storage_offset()) - begin) for t in group]
        for view, tensor in zip(views, group, strict=True):
            view.copy_(tensor)
        return views


def frozen(value: Any) -> Any:
    """Return a host value that nobody can change: tensors are cloned."""
    return trees.map_tensors(value, lambda tensor: tensor.detach().clone())


def tensors_in(value: Any) -> list[Tensor]:
    """Return every distinct tensor of a nested value."""
    return [leaf for leaf in trees.flatten(value).leaves if isinstance(leaf, Tensor)]


def same_value(expected: Any, got: Any) -> bool:
    """Compare two host values or tensors bit by bit as far as a reader can tell: types count, and NaN equals NaN."""
    if isinstance(expected, Tensor):
        return isinstance(got, Tensor) and _same_tensor(expected, got)
    if type(expected) is not type(got):
        return False
    if isinstance(expected, (list, tuple)):
        return len(expected) == len(got) and all(map(same_value, expected, got))
    if isinstance(expected, (float, complex)):
        return repr(expected) == repr(got)
    return bool(expected == got)


def _same_tensor(expected: Tensor, got: Tensor) -> bool:
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, got)
    # The sign of zero counts, as it does for Python's floats: a forward may branch on it.
    equal = (expected == got) & (expected.signbit() == got.signbit())
    return bool((equal | (expected.isnan() & got.isnan())).all())


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return _short(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _short(value: Any) -> str:
    text = repr(value.tolist()) if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
