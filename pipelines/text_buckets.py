"""Text buckets: pad text to the next of a few lengths, where that is exact, so that few graphs serve all prompts.

The layer between pipeline and runner. It changes the arguments of a call before its signature is made, so that a call
is the same padded call whether a graph serves it or it runs eagerly.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from bcg.errors import ConfigError

from .family import TextInputs, TextStream

__all__ = ["TextBuckets"]

_TOKEN_COLUMNS: Final = -1  # the dimension of tokens in a mask
_IMAGE_TOKENS: Final = ("hidden_states", 1)  # the input with image tokens, and its dimension of them

_Arguments = dict[str, Any]


class TextBuckets:
    """Pad the text of a denoiser's calls to the next bucket, and tell it by a mask what is padding.

    A mask is always passed, of ones where nothing is padded, so that every length in a bucket is one signature. Text
    longer than the largest bucket keeps its length. A call whose text inputs are not of the form that the family
    describes is left as it is.

    Args:
        text: The family's text inputs, which can be padded exactly.
        buckets: Lengths in tokens.
        module: The denoiser.

    Raises:
        ConfigError: ``buckets`` is empty or holds something else than whole numbers from 1.

    Example:
        >>> class Denoiser(nn.Module):
        ...     def forward(self, hidden_states, text, mask=None): ...
        >>> text = TextInputs(streams=(TextStream(names=("text",), mask="mask"),))
        >>> prepare = TextBuckets(text, (8, 16), Denoiser())
        >>> args, kwargs = prepare((torch.ones(1, 4, 2),), {"text": torch.ones(1, 5, 2)})
        >>> kwargs["text"].shape, kwargs["mask"].sum()
        (torch.Size([1, 8, 2]), tensor(5))
    """

    def __init__(self, text: TextInputs, buckets: Sequence[int], module: nn.Module) -> None:
        if not buckets or not all(type(bucket) is int and bucket > 0 for bucket in buckets):
            raise ConfigError(
                f"text_buckets={buckets!r} is not accepted: give lengths in tokens, such as (64, 128, 256)."
            )
        self.text = text
        self.buckets = tuple(sorted(set(buckets)))
        self._parameters = tuple(inspect.signature(module.forward).parameters)

    def __call__(self, args: tuple[Any, ...], kwargs: _Arguments) -> tuple[tuple[Any, ...], _Arguments]:
        """Return the arguments with padded text.

        Args:
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.

        Returns:
            New arguments; the given ones are not changed.
        """
        positional = self._parameters[: len(args)]
        arguments: _Arguments = {**dict(zip(positional, args, strict=False)), **kwargs}
        for stream in self.text.streams:
            arguments = _padded(stream, arguments, self.bucket)
        given_by_position = tuple(arguments.pop(name) for name in positional)
        return given_by_position + args[len(positional) :], arguments

    def bucket(self, length: int) -> int:
        """Return the length that text is padded to.

        Args:
            length: In tokens.

        Returns:
            The next bucket, or the length itself beyond the largest one.
        """
        index = bisect_left(self.buckets, length)
        return self.buckets[index] if index < len(self.buckets) else length


def _padded(stream: TextStream, arguments: _Arguments, bucket: Any) -> _Arguments:
    """Return a call's arguments with one stream of text padded."""
    length = _length(stream, arguments)
    if length is None:
        return arguments
    more = bucket(length) - length
    changed = {name: _longer(arguments[name], stream.dim, length, more) for name in stream.names if name in arguments}
    for name in stream.joint_names:
        changed[name] = _longer(arguments[name], -2, length, more)
    masked = _with_mask(stream, {**arguments, **changed}, length, more)
    return arguments if masked is None else masked


def _length(stream: TextStream, arguments: _Arguments) -> int | None:
    """Return the tokens of a stream; None where the call has none, or inputs that do not agree."""
    inputs = [tensor for name in stream.names for tensor in _tensors(arguments.get(name))]
    if not _tensors(arguments.get(stream.names[0])) or any(tensor.ndim < abs(stream.dim) for tensor in inputs):
        return None
    lengths = {tensor.shape[stream.dim] for tensor in inputs}
    return lengths.pop() if len(lengths) == 1 else None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, (list, tuple)) else []


def _longer(value: Any, dim: int, at: int, more: int) -> Any:
    """Put zeros into a tensor, or into each of several, behind the text."""
    if isinstance(value, (list, tuple)):
        return type(value)([_longer(item, dim, at, more) for item in value])
    if not isinstance(value, Tensor):
        return value
    shape = list(value.shape)
    shape[dim] = more
    text, rest = value.narrow(dim, 0, at), value.narrow(dim, at, value.shape[dim] - at)
    return torch.cat([text, value.new_zeros(shape), rest], dim)


def _with_mask(stream: TextStream, arguments: _Arguments, length: int, more: int) -> _Arguments | None:
    """Return the arguments with the mask for a text made longer; None where the given mask is of another form."""
    if stream.mask is None:
        return arguments
    name, _, key = stream.mask.partition(".")
    holder = arguments.get(name)
    given = (holder or {}).get(key) if key else holder
    shape = _mask_shape(stream, arguments, length)
    if given is None:
        given = arguments[stream.names[0]].new_ones(shape, dtype=stream.mask_dtype)
    elif tuple(given.shape) != shape:
        return None
    mask = _longer(given.to(stream.mask_dtype), _TOKEN_COLUMNS, length, more)
    return {**arguments, name: {**(holder or {}), key: mask} if key else mask}


def _mask_shape(stream: TextStream, arguments: _Arguments, length: int) -> tuple[int, ...]:
    batch = arguments[stream.names[0]].shape[0]
    if not stream.covers_image:
        return batch, length
    name, dim = _IMAGE_TOKENS
    return batch, 1, 1, length + arguments[name].shape[dim]
