"""How tensors lie in memory, and where they stand among an operation's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements of memory from a tensor's first to its last element; 0 for an empty one.

    Args:
        shape: The tensor's shape.
        strides: Its strides, in elements.

    Example:
        >>> extent((2, 3), (3, 1)), extent((2, 3), (0, 1))
        (6, 3)
    """
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def has_repeats(tensor: Tensor) -> bool:
    """Tell whether an expanded tensor's elements share memory with each other, so that it cannot be copied into."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def without_repeats(tensor: Tensor) -> Tensor:
    """Return the part of an expanded tensor whose elements each have memory of their own."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def operands(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results: lists, tuples and dicts are all that it takes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from operands(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from operands(item)
