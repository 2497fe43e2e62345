"""Prove, faster than a walk, that nothing changed since the last walk.

Everything is compared in loops that run in C, over lists built once. A wrong "unchanged" would be a wrong image, so a
value is compared by identity, or its container by version, never by ``==`` between values: ``1 == True``, and a
tensor's ``==`` runs a kernel. A needless "changed" only costs a walk.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, nn

from bcg import _dict_epoch, _torch, probes
from bcg._state_walk import Watched

_UNSET: Final = object()


class Watch:
    """Tell whether a walked module is as it was.

    Args:
        root: The module, held weakly.
        watched: The live containers that the walk met.
        on_death: Called when a walked module dies, so that what this object holds of it can be let go. (Tensors that
            are replaced while their module lives are held until the next walk.)
    """

    def __init__(self, root: nn.Module, watched: Watched, on_death: Callable[[Any], None]) -> None:
        self._root = weakref.ref(root)
        self._root_type = type(root)
        self._dicts = DictCheck(watched.dicts, [empty for empty in watched.empties if isinstance(empty, dict)])
        self._empties = [empty for empty in watched.empties if not isinstance(empty, dict)]
        self._tensors = TensorCheck(watched.tensors)
        self._child_types = _ChildTypeCheck(watched.children)
        self._sequences = _SequenceCheck(watched.sequences)
        self._cells = watched.cells
        self._cell_contents = _cell_contents(watched.cells)
        self._slots = watched.slots
        self._slot_values = _slot_values(watched.slots)
        self._classes = list(watched.classes)
        self._methods = _methods(self._classes)
        self._libraries = probes.ambient_probes()
        self._deaths = [weakref.ref(module, on_death) for module in _living(watched.modules)]

    def unchanged(self) -> bool:
        """Tell whether nothing changed; never raises.

        Returns:
            True if another walk would find the same; False if it might not.
        """
        try:
            return (
                self._dicts.unchanged()
                and not any(self._empties)
                and self._tensors.unchanged()
                and self._child_types.unchanged()
                and type(self._root()) is self._root_type
                and self._rest_unchanged()
            )
        except Exception:
            return False

    def _rest_unchanged(self) -> bool:
        return (
            self._sequences.unchanged()
            and _same(_cell_contents(self._cells), self._cell_contents)
            and _same(_slot_values(self._slots), self._slot_values)
            and _same(_methods(self._classes), self._methods)
            and probes.ambient_probes() == self._libraries
        )


class DictCheck:
    """Tell whether none of many dicts was written to.

    Args:
        dicts: Dicts that were not empty, held until this object is dropped.
        empties: Dicts that were empty, held likewise.
    """

    def __init__(self, dicts: list[dict[Any, Any]], empties: list[dict[Any, Any]]) -> None:
        version = _torch.dict_version_function()
        self._empties = empties
        self._filled = _DictValues(dicts) if version is None else _DictVersions(dicts, version)
        self._epoch = _dict_epoch.epoch()
        self._count = -1
        if self._epoch is not None:
            self._epoch.watch(chain(dicts, empties))
            self._count = self._epoch.count

    def unchanged(self) -> bool:
        """Tell whether none was written to since this object was made."""
        count = -1 if self._epoch is None else self._epoch.count
        if count == self._count != -1:
            return True
        unchanged = self._filled.unchanged() and not any(self._empties)
        if unchanged:
            self._count = count  # the write was to a dict of another module
        return unchanged


class _DictVersions:
    """Compare the sum of all dict versions: each only grows, so the sum is the same only if every one is."""

    def __init__(self, dicts: list[dict[Any, Any]], version: Callable[[Any], int]) -> None:
        self._dicts = dicts
        self._version = version
        self._sum = sum(map(version, dicts))

    def unchanged(self) -> bool:
        return sum(map(self._version, self._dicts)) == self._sum


class _DictValues:
    """Compare keys and values of all dicts by identity; ten times as slow as their versions."""

    def __init__(self, dicts: list[dict[Any, Any]]) -> None:
        self._dicts = dicts
        self._lengths = list(map(len, dicts))
        self._saved = self._contents()

    def _contents(self) -> list[Any]:
        return [*chain.from_iterable(self._dicts), *chain.from_iterable(map(dict.values, self._dicts))]

    def unchanged(self) -> bool:
        return list(map(len, self._dicts)) == self._lengths and _same(self._contents(), self._saved)


class TensorCheck:
    """Tell whether tensors still have their address, shape, stride, dtype and device.

    Args:
        tensors: The tensors, held until this object is dropped.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tuple(tensors)  # what a call with a star takes as it is
        self._addresses = list(map(Tensor.data_ptr, tensors))
        self._layouts = self._read_layouts()
        self._guards: dict[bool, Callable[..., bool] | None] = {}

    def unchanged(self) -> bool:
        """Tell whether all of them are as they were."""
        if not self._tensors:
            return True
        inference = torch.is_inference_mode_enabled()  # torch's guard also compares thread-local dispatch keys
        guard = self._guards.get(inference)
        if guard is not None and guard(*self._tensors):
            return self._same_addresses()
        # No guard for this mode yet, or something differs that is not in the key, such as requires_grad.
        if self._read_layouts() != self._layouts:
            return False
        self._guards[inference] = _torch.tensor_guard(self._tensors)
        return self._same_addresses()

    def _same_addresses(self) -> bool:
        return list(map(Tensor.data_ptr, self._tensors)) == self._addresses

    def _read_layouts(self) -> list[Any]:
        return [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in self._tensors]


class _SequenceCheck:
    def __init__(self, sequences: list[Any]) -> None:
        self._sequences = sequences
        self._lengths = list(map(len, sequences))
        self._saved = list(chain.from_iterable(sequences))

    def unchanged(self) -> bool:
        return list(map(len, self._sequences)) == self._lengths and all(
            map(is_, chain.from_iterable(self._sequences), self._saved)
        )


class _ChildTypeCheck:
    """Tell whether modules still are of the classes that they were of: ``module.__class__`` can be assigned.

    Asked after the dicts that hold the modules. Going through a thousand small dicts costs more than the modules in
    them, so they are listed once, where the list can be let go in time.
    """

    def __init__(self, children: list[dict[str, Any]]) -> None:
        self._children = [modules.values() for modules in children]
        self._epoch = _dict_epoch.epoch()
        self._types = list(map(type, chain.from_iterable(self._children)))

    def unchanged(self) -> bool:
        return list(map(type, self._modules())) == self._types

    def _modules(self) -> Iterable[Any]:
        if self._epoch is None:
            return chain.from_iterable(self._children)
        return self._epoch.until_written(self, lambda: list(chain.from_iterable(self._children)))


def _same(live: list[Any], saved: list[Any]) -> bool:
    return len(live) == len(saved) and all(map(is_, live, saved))


def _cell_contents(cells: list[Any]) -> list[Any]:
    try:
        return [cell.cell_contents for cell in cells]
    except ValueError:  # a cell that is not assigned yet
        return [getattr(cell, "cell_contents", _UNSET) if _is_assigned(cell) else _UNSET for cell in cells]


def _is_assigned(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _slot_values(slots: list[tuple[Any, str]]) -> list[Any]:
    return [getattr(owner, name, _UNSET) for owner, name in slots]


def _methods(classes: list[tuple[type, str]]) -> list[Any]:
    return [getattr(kind, name, None) for kind, name in classes]


def _living(references: Iterable[weakref.ref[nn.Module]]) -> list[nn.Module]:
    return [module for module in (reference() for reference in references) if module is not None]
