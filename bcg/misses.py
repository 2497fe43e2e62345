"""What is remembered of calls that no captured graph served, so that the next warm-up can cover them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from bcg.probes import active_adapters

__all__ = ["CallerArguments", "Miss", "caller_arguments"]

MAX_CALLERS: Final = 8
"""Different caller arguments that one miss remembers."""
_MAX_LOOKS: Final = 64
_MAX_FRAMES: Final = 64
_MAX_ITEMS: Final = 64
_ENCODED: Final = ("prompt_embeds", "prompt_attention_mask", "negative_prompt_", "text_hiddens", "uncond_text_hiddens")
"""How diffusers' pipelines name what their text encoders give, where it is no parameter of the call."""
_MAX_ROWS: Final = 16
_PLAIN: Final = (bool, int, float, type(None))


@dataclass(frozen=True, kw_only=True)
class CallerArguments:
    """Describe the pipeline call around a module's call, without its prompts and without its tensors.

    Attributes:
        values: The caller's parameters that are plain numbers, booleans, None or lists of them, by name, and its local
            variable ``batch_size``.
        shapes: Shapes of its parameters that are tensors, or of the first of a list of tensors, and of its local
            variables with the text encoder's results.
        ones: For each mask among them, how many ones each row has; bounded.
        given: Names of parameters that are text or lists of text, which are not kept.
        adapters: The module's active LoRA adapters and their weights.
    """

    values: tuple[tuple[str, Any], ...] = ()
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    ones: tuple[tuple[str, tuple[int, ...]], ...] = ()
    given: tuple[str, ...] = ()
    adapters: tuple[tuple[str, float], ...] = ()


@dataclass(eq=False)
class Miss:
    """Calls of one signature and module state that ran eagerly outside of a warmup window.

    Attributes:
        summary: The signature's tensors, for tables.
        reason: Why the first of them did not replay.
        count: How many there were.
        callers: The pipeline calls that they came from, as far as they differ; bounded.
    """

    summary: str
    reason: str
    count: int = 0
    callers: dict[CallerArguments, int] = field(default_factory=dict)
    looks: int = field(default=0, repr=False)

    def note(self, module: nn.Module) -> None:
        """Count a call, and remember whose it is; must be called in the stack of the missed call.

        Args:
            module: The module that was called.
        """
        self.count += 1
        if self.looks >= _MAX_LOOKS or len(self.callers) >= MAX_CALLERS:
            return
        self.looks += 1
        caller = caller_arguments(active_adapters(module), module=module)
        if caller is not None:
            self.callers[caller] = self.callers.get(caller, 0) + 1


def caller_arguments(
    adapters: tuple[tuple[str, float], ...] = (), *, module: nn.Module | None = None
) -> CallerArguments | None:
    """Look up the stack for the pipeline call that we are in and describe its arguments.

    A pipeline class is never patched, so its ``__call__`` is found where it is: the nearest frame of a method of that
    name whose object holds the module and is none itself. It has resolved its defaults by then (``height = height or
    ...``). The alternative, deriving heights from latent shapes, needs every family's VAE scales and patch sizes and
    cannot tell the guidance. It is looked at only when a call misses, and a bounded number of times.

    Args:
        adapters: The module's active adapters, to be kept with the arguments.
        module: The module that was called; None for whatever the nearest object is.

    Returns:
        The arguments; None where the module was not called from a pipeline.

    Example:
        >>> class Pipeline:
        ...     def __call__(self, prompt, height=64):
        ...         batch_size = 2
        ...         return caller_arguments()
        >>> found = Pipeline()("a fox")
        >>> found.values, found.given
        ((('batch_size', 2), ('height', 64)), ('prompt',))
    """
    for frame in _outer_frames():
        if frame.f_code.co_name == "__call__" and _is_pipeline(frame.f_locals.get("self"), module):
            return _describe(frame, adapters)
    return None


def _outer_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _is_pipeline(owner: object, module: nn.Module | None) -> bool:
    # A runner's __call__ and a module's are on the way; a runner passes for a module.
    if owner is None or isinstance(owner, nn.Module):
        return False
    held = [value for value in getattr(owner, "__dict__", {}).values() if isinstance(value, nn.Module)]
    return module is None or any(getattr(value, "__wrapped__", value) is module for value in held)


def _describe(frame: FrameType, adapters: tuple[tuple[str, float], ...]) -> CallerArguments:
    code, found = frame.f_code, frame.f_locals
    names = {*code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount], "batch_size"}
    names.update(name for name in found if name.startswith(_ENCODED))
    arguments = {name: found[name] for name in sorted(names) if name in found}
    tensors = {name: tensor for name, value in arguments.items() if (tensor := _tensor_in(value)) is not None}
    return CallerArguments(
        values=tuple((name, _frozen(value)) for name, value in arguments.items() if _is_plain(value)),
        shapes=tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items()),
        ones=tuple((name, _ones(tensor)) for name, tensor in tensors.items() if "mask" in name and tensor.ndim),
        given=tuple(name for name, value in arguments.items() if _is_text(value)),
        adapters=adapters,
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= _MAX_ITEMS and all(_is_plain(item) for item in value)
    return type(value) in _PLAIN


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _is_text(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(item, str) for item in value)
    return isinstance(value, str)


def _tensor_in(value: object) -> torch.Tensor | None:
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None


def _ones(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple((mask != 0).sum(-1).flatten()[-_MAX_ROWS:].tolist())
