"""A Bria FIBO checkpoint of a few megabytes, most of which are the rows of an embedding table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, BriaFiboTransformer2DModel

LATENT_CHANNELS: Final = 16
_TEXT_WIDTH: Final = 16
_VOCABULARY_SIZE: Final = 128_001
"""The pipeline encodes an empty prompt as token 128000, whatever the tokenizer."""


def build_tiny(path: Path) -> None:
    """Write a tiny Bria FIBO checkpoint, to be read with ``BriaFiboPipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import BriaFiboPipeline, FlowMatchEulerDiscreteScheduler

    with _tiny.seeded(0):
        pipe = BriaFiboPipeline(
            transformer=_tiny_encoders.without_zeros(_transformer()),
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=_vae(),
            text_encoder=_tiny_encoders.smollm3(_TEXT_WIDTH, _VOCABULARY_SIZE),
            tokenizer=_tiny_encoders.plain_tokenizer(start=False),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _vae() -> AutoencoderKLWan:
    """Make a VAE with the published layout: three halvings, and 2x2 pixels in one."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    ).eval()


def _transformer() -> BriaFiboTransformer2DModel:
    from diffusers import BriaFiboTransformer2DModel

    return BriaFiboTransformer2DModel(
        patch_size=1,
        in_channels=LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=2 * _TEXT_WIDTH,
        text_encoder_dim=_TEXT_WIDTH,
        pooled_projection_dim=None,
        axes_dims_rope=(0, 4, 4),
    )


def example_call(*, prompt: str, seed: int, height: int = 64, width: int = 96, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance in one doubled batch.

    Args:
        prompt: What to draw; padded to the longer of prompt and negative prompt, with a mask when they differ.
        seed: Seed of the noise.
        height: In pixels, a multiple of 32.
        width: In pixels, a multiple of 32.
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
        guidance_scale=5.0,
    )
