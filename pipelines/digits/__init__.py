"""A tiny FLUX that really draws: handwritten digits, in a checkpoint that comes with the package.

The checkpoint has every component of FLUX.1-schnell in the same classes, so what is served is the published code, and a
person can see whether the right thing was drawn. ``README.md`` beside this file is its model card;
``scripts/train_digits`` makes it anew.

Example:
    >>> from diffusers import FluxPipeline
    >>> pipe = FluxPipeline.from_pretrained(checkpoint_path())
    >>> pipe.set_progress_bar_config(disable=True)
    >>> pipe("a handwritten seven", height=64, width=64, num_inference_steps=12, max_sequence_length=32).images[0].size
    (64, 64)
"""

from __future__ import annotations

from pathlib import Path


def checkpoint_path() -> Path:
    """Say where the checkpoint lies.

    Returns:
        A folder for ``FluxPipeline.from_pretrained``. It belongs to the installed package: copy it before changing it.
    """
    return Path(__file__).resolve().parent / "checkpoint"


def digit_side(height: int, width: int) -> int:
    """Say how large the digit is in an image: it fills a square in the middle.

    Args:
        height: Of the image, in pixels; 64 or more.
        width: Of the image, in pixels; 64 or more.

    Returns:
        The side of the square in pixels, a multiple of 32.

    Example:
        >>> digit_side(64, 128), digit_side(96, 128), digit_side(128, 128)
        (64, 64, 96)
    """
    return max(64, min(height, width) - 32) // 32 * 32
