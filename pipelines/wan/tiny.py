"""A Wan 2.1 checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import _tiny, _tiny_calls
from . import _parts


def build_tiny(path: Path) -> None:
    """Write a tiny Wan 2.1 checkpoint, to be read with ``WanPipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import WanPipeline

    with _tiny.seeded(0):
        pipe = WanPipeline(
            **_parts.text_components(),
            transformer=_parts.transformer(),
            vae=_parts.vae(),
            scheduler=_parts.scheduler(),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def example_call(
    *, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2, num_frames: int = 5
) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance in two passes.

    Args:
        prompt: What to draw; always padded to 512 tokens with zeros.
        seed: Seed of the noise.
        height: In pixels, a multiple of 16.
        width: In pixels, a multiple of 16.
        steps: Denoising steps.
        num_frames: One more than a multiple of 4.

    Returns:
        Keyword arguments of ``pipe(...)``.
    """
    return _tiny_calls.call(
        prompt=prompt,
        seed=seed,
        height=height,
        width=width,
        steps=steps,
        num_frames=num_frames,
        negative_prompt=_tiny_calls.NEGATIVE_PROMPT,
        guidance_scale=5.0,
    )
