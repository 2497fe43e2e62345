"""A Wan 2.2 checkpoint of one megabyte, with two transformers: one for the noisy steps and one for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from .. import _tiny
from . import _parts, tiny

BOUNDARY_RATIO: Final = 0.875
"""Steps above this part of the noise go to ``transformer``, the others to ``transformer_2``."""


def build_tiny(path: Path) -> None:
    """Write a tiny Wan 2.2 (14B) checkpoint, to be read with ``WanPipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import WanPipeline

    with _tiny.seeded(0):
        pipe = WanPipeline(
            **_parts.text_components(),
            transformer=_parts.transformer(),
            transformer_2=_parts.transformer(),
            boundary_ratio=BOUNDARY_RATIO,
            vae=_parts.vae(),
            scheduler=_parts.scheduler(),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def example_call(
    *, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2, num_frames: int = 5
) -> dict[str, Any]:
    """Give the keyword arguments of a call in which either transformer runs, with a guidance scale of its own.

    Args:
        prompt: What to draw; always padded to 512 tokens with zeros.
        seed: Seed of the noise.
        height: In pixels, a multiple of 16.
        width: In pixels, a multiple of 16.
        steps: Denoising steps, at least 2.
        num_frames: One more than a multiple of 4.

    Returns:
        Keyword arguments of ``pipe(...)``.
    """
    arguments = tiny.example_call(
        prompt=prompt, seed=seed, height=height, width=width, steps=steps, num_frames=num_frames
    )
    return {**arguments, "guidance_scale_2": 3.0}
