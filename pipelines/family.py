"""What bcg knows of one diffusers family, as data: which inputs hold text, how they may be padded, usual sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

__all__ = ["Family", "Request", "TextInputs", "TextStream", "family_of"]

TOKEN_ROWS: Final = -2  # the dimension of tokens in ``[B, S, D]``, ``[S, D]`` and ``[B, 1, S, D]`` alike


@dataclass(frozen=True, kw_only=True)
class Request:
    """Name one size that a model was published for.

    Attributes:
        height: In pixels.
        width: In pixels.
        num_frames: Frames of a video; None for a picture.

    Example:
        >>> Request(height=480, width=832, num_frames=81)
        Request(height=480, width=832, num_frames=81)
    """

    height: int
    width: int
    num_frames: int | None = None


@dataclass(frozen=True, kw_only=True)
class TextStream:
    """Describe one sequence of text tokens among the inputs of a denoiser, and how it gets longer without effect.

    Padding goes behind the text: zeros in the inputs, zeros in the mask.

    Attributes:
        names: Inputs with one row for each token, tensors or lists of tensors; the first tells the length.
        dim: Their dimension of tokens.
        mask: The input that tells text from padding, ``[B, S]``, one for text; ``dict_input.key`` for a key of an input
            that is a dictionary. None where the denoiser is told the lengths otherwise.
        mask_dtype: What the mask is converted to, so that it is one signature whatever the pipeline gave.
        covers_image: The mask goes on over the image tokens and is shaped ``[B, 1, 1, S + N]``.
        joint_names: Inputs with one row for each text token and then one for each image token.
    """

    names: tuple[str, ...]
    dim: int = TOKEN_ROWS
    mask: str | None = None
    mask_dtype: torch.dtype = torch.bool
    covers_image: bool = False
    joint_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TextInputs:
    """Describe all text inputs of a family's denoisers.

    Attributes:
        streams: The sequences of tokens.
        varies: Whether lengths follow the prompt; else the pipeline pads every prompt to ``default_length``.
        default_length: Tokens of the first stream that the pipeline pads to by default, where it does.
        reason: Why text cannot be padded without changing the picture; None where it can.
    """

    streams: tuple[TextStream, ...]
    varies: bool = False
    default_length: int | None = None
    reason: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether text can be padded without changing the picture."""
        return self.reason is None


@dataclass(frozen=True, kw_only=True)
class Family:
    """Gather what is known of pipelines that call their denoisers alike.

    Attributes:
        name: A short name, for messages.
        pipelines: Names of the pipeline classes; their subclasses belong to the family too.
        text: The text inputs; None where they are not known.
        default_requests: Sizes that the models were published for, the most usual one first.
        denoisers: Components that are called once or more in every denoising step, as far as a pipeline has them.
    """

    name: str
    pipelines: tuple[str, ...]
    text: TextInputs | None
    default_requests: tuple[Request, ...]
    denoisers: tuple[str, ...] = ("transformer", "transformer_2", "unconditional_transformer", "unet")

    @property
    def text_reason(self) -> str | None:
        """Why text is not padded in this family; None where it can be, exactly."""
        if self.text is None:
            return "bcg knows no exact way to pad the text of this pipeline"
        return self.text.reason


def family_of(pipe: Any) -> Family:
    """Find the family of a pipeline by the names of its class and base classes.

    Args:
        pipe: A pipeline, or a pipeline class.

    Returns:
        The family; the generic one for a pipeline that is not known.

    Example:
        >>> class FluxPipeline: ...
        >>> family_of(FluxPipeline()).name
        'FLUX'
        >>> family_of(object()).name
        'generic'
    """
    from .families import BY_PIPELINE, GENERIC  # they are built from the classes above

    kind = pipe if isinstance(pipe, type) else type(pipe)
    for base in kind.__mro__:
        family = BY_PIPELINE.get(base.__name__)
        if family is not None:
            return family
    return GENERIC
