"""A FLUX.1 Kontext checkpoint of one megabyte: the components are those of FLUX.1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import _tiny_calls
from . import tiny


def build_tiny(path: Path) -> None:
    """Write a tiny FLUX.1 Kontext checkpoint, to be read with ``FluxKontextPipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import FluxKontextPipeline

    tiny.build_tiny(path)
    # Saved again, so that the index names this pipeline.
    FluxKontextPipeline.from_pretrained(path).save_pretrained(path, safe_serialization=True)


def example_call(*, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call that edits a picture of the size of the result.

    Args:
        prompt: What to change; always padded to 512 tokens.
        seed: Seed of the noise and of the picture.
        height: In pixels, a multiple of 16.
        width: In pixels, a multiple of 16.
        steps: Denoising steps.

    Returns:
        Keyword arguments of ``pipe(...)``.
    """
    return _tiny_calls.call(
        prompt=prompt,
        seed=seed,
        height=height,
        width=width,
        steps=steps,
        image=_tiny_calls.picture(height, width, seed),
        max_area=height * width,
        _auto_resize=False,
    )
