"""The fixed memory that a graph reads its arguments from, and the copies of live arguments into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bcg import _torch
from bcg.layout import extent
from bcg.signature import TensorSpec


class StaticArena:
    """Memory for static inputs that several entries share.

    Entries of one pool never replay at the same time, so the n-th floating-point input of each can lie in the same
    memory: capture the largest signature first, and the smaller ones fit in.

    Attributes:
        allocated_bytes: Bytes of all memory that was ever made, whether it is still held or not.
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._slots: dict[tuple[int, torch.device], Tensor] = {}

    def take(self, slot: int, spec: TensorSpec, device: torch.device) -> Tensor:
        """Return memory for one static input; entries that hold earlier, smaller memory of the slot keep it."""
        size_bytes = extent(spec.shape, spec.stride) * spec.dtype.itemsize
        memory = self._slots.get((slot, device))
        if memory is None or memory.numel() < size_bytes:
            memory = torch.empty(max(size_bytes, 1), dtype=torch.uint8, device=device)
            self._slots[slot, device] = memory
            self.allocated_bytes += memory.numel()
        # No view: compiled code for dynamic shapes is guarded by what a view is a view of; a caller's tensor is none.
        tensor = torch.empty(0, dtype=spec.dtype, device=device)
        return tensor.set_(memory.untyped_storage(), 0, spec.shape, spec.stride)

    def bytes(self) -> int:
        """Return the bytes that the arena holds for coming entries."""
        return sum(memory.numel() for memory in self._slots.values())

    def memories(self) -> list[Tensor]:
        """Return the memory that the arena holds for coming entries."""
        return list(self._slots.values())

    def clear(self) -> None:
        """Forget all memory; entries keep what they hold."""
        self._slots.clear()


class StaticInputs:
    """One static tensor for each distinct tensor of a call.

    Integers and masks have memory of their own, since a later capture needs their values again; floating-point inputs
    share the arena's.

    Args:
        specs: What the signature says of each tensor.
        device: Where the module is. Host tensors become tensors there.
        arena: Shared memory.
    """

    def __init__(self, specs: Sequence[TensorSpec], device: torch.device, arena: StaticArena) -> None:
        with torch.inference_mode(False):
            self.tensors = [self._make(slot, spec, device, arena) for slot, spec in enumerate(specs)]

    @staticmethod
    def _make(slot: int, spec: TensorSpec, device: torch.device, arena: StaticArena) -> Tensor:
        if _is_shared(spec.dtype, spec.shape):
            return arena.take(slot, spec, device)
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)

    def load(self, live: Sequence[Tensor]) -> None:
        """Copy live tensors in, in one batched copy."""
        if self.tensors:
            with torch.no_grad():
                _torch.copy_all(self.tensors, live)

    def owned_bytes(self) -> int:
        """Return the bytes of inputs that share no memory with other entries."""
        return sum(tensor.nbytes for tensor in self.tensors if not tensor.dtype.is_floating_point)

    def bytes(self) -> int:
        """Return the bytes of all inputs."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def shared(self) -> list[Tensor]:
        """Return the inputs that lie in the arena's memory."""
        return [tensor for tensor in self.tensors if _is_shared(tensor.dtype, tensor.shape)]

    def shared_extents(self) -> dict[int, int]:
        """Return the bytes that each input in the arena's memory asks for, by slot."""
        return {
            slot: extent(tensor.shape, tensor.stride()) * tensor.itemsize
            for slot, tensor in enumerate(self.tensors)
            if _is_shared(tensor.dtype, tensor.shape)
        }

    def release(self) -> None:
        """Let go of all memory; nothing can be loaded afterwards."""
        self.tensors = []


def _is_shared(dtype: torch.dtype, shape: torch.Size) -> bool:
    return dtype.is_floating_point and 0 not in shape
