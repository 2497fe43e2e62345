"""A PixArt-Sigma checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import PixArtTransformer2DModel

LATENT_CHANNELS: Final = 4
_LEARNED_VARIANCE: Final = 2
"""The transformer gives a variance next to the noise, and the pipeline drops it."""


def build_tiny(path: Path) -> None:
    """Write a tiny PixArt-Sigma checkpoint, to be read with ``PixArtSigmaPipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import DPMSolverMultistepScheduler, PixArtSigmaPipeline

    tokenizer = _tiny.t5_tokenizer()
    with _tiny.seeded(0):
        pipe = PixArtSigmaPipeline(
            tokenizer=tokenizer,
            text_encoder=_tiny.t5_encoder(tokenizer),
            vae=_tiny.image_vae(LATENT_CHANNELS, scaling_factor=0.13025),
            transformer=_tiny_encoders.without_zeros(_transformer()),
            scheduler=DPMSolverMultistepScheduler(),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _transformer() -> PixArtTransformer2DModel:
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=_tiny.HIDDEN_SIZE,
        in_channels=LATENT_CHANNELS,
        out_channels=_LEARNED_VARIANCE * LATENT_CHANNELS,
        cross_attention_dim=24,
    )


def example_call(*, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance in one doubled batch.

    Args:
        prompt: What to draw; always padded to 300 tokens, with a mask.
        seed: Seed of the noise.
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
        negative_prompt=_tiny_calls.NEGATIVE_PROMPT,
        guidance_scale=4.5,
        use_resolution_binning=False,
        clean_caption=False,
    )
