"""Parts of example calls of the tiny pipelines: generators, pictures, and embeddings where no encoder can run."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

NEGATIVE_PROMPT: Final = "blurry, low quality"
"""Shorter than most prompts, so that the two halves of guidance differ in length where lengths vary."""


def call(*, prompt: str | None, seed: int, height: int, width: int, steps: int, **more: Any) -> dict[str, Any]:
    """Gather the keyword arguments that nearly every pipeline takes.

    The generator is on the CPU, which every pipeline accepts wherever it runs, so that one seed means the same noise on
    every device. The result is left in latent space: decoding clips, and would hide differences.

    Args:
        prompt: What to draw, or None where embeddings are given.
        seed: Seed of the noise.
        height: In pixels.
        width: In pixels.
        steps: Denoising steps.
        **more: What this pipeline takes besides; replaces what is above.

    Returns:
        Keyword arguments of ``pipe(...)``.

    Example:
        >>> sorted(call(prompt="a fox", seed=0, height=32, width=48, steps=2))
        ['generator', 'height', 'num_inference_steps', 'output_type', 'prompt', 'width']
    """
    common: dict[str, Any] = {
        "prompt": prompt,
        "height": height,
        "width": width,
        "num_inference_steps": steps,
        "generator": torch.Generator("cpu").manual_seed(seed),
        "output_type": "latent",
    }
    return {**common, **more}


def picture(height: int, width: int, seed: int = 0) -> Image:
    """Draw coloured noise, for pipelines that take a picture.

    Args:
        height: In pixels.
        width: In pixels.
        seed: Seed of the noise.

    Returns:
        An RGB picture.
    """
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


def prompt_embeddings(prompt: str, width: int, length: int | None = None) -> torch.Tensor:
    """Make up the embeddings of a prompt, for pipelines whose encoder cannot run here.

    Args:
        prompt: The prompt; another prompt gives other values and, where `length` is not given, another length.
        width: Size of one embedding.
        length: Rows, zeros after those of the prompt; by default as many as the prompt has characters.

    Returns:
        Embeddings ``[1, length, width]`` in float32.

    Example:
        >>> prompt_embeddings("a fox", 8).shape
        torch.Size([1, 5, 8])
        >>> prompt_embeddings("a fox", 8, length=16).shape
        torch.Size([1, 16, 8])
    """
    generator = torch.Generator().manual_seed(zlib.crc32(prompt.encode()))
    embeddings = torch.randn(1, max(len(prompt), 1), width, generator=generator)
    if length is None:
        return embeddings
    padded = embeddings.new_zeros(1, length, width)
    kept = min(length, embeddings.shape[1])
    padded[:, :kept] = embeddings[:, :kept]
    return padded
