"""A CogVideoX checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel

LATENT_CHANNELS: Final = 4
_TEXT_LENGTH: Final = 226
"""Positions are learned for this many text tokens, so every prompt must have them."""


def build_tiny(path: Path) -> None:
    """Write a tiny CogVideoX checkpoint, to be read with ``CogVideoXPipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline

    tokenizer = _tiny.t5_tokenizer(_TEXT_LENGTH)
    with _tiny.seeded(0):
        pipe = CogVideoXPipeline(
            tokenizer=tokenizer,
            text_encoder=_tiny.t5_encoder(tokenizer),
            vae=_vae(),
            transformer=_tiny_encoders.without_zeros(_transformer()),
            scheduler=CogVideoXDDIMScheduler(
                beta_schedule="scaled_linear",
                clip_sample=False,
                prediction_type="v_prediction",
                rescale_betas_zero_snr=True,
                snr_shift_scale=3.0,
                timestep_spacing="trailing",
            ),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _vae() -> AutoencoderKLCogVideoX:
    """Make a VAE that halves height and width three times and frames twice, as the published one."""
    from diffusers import AutoencoderKLCogVideoX

    return AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        latent_channels=LATENT_CHANNELS,
        layers_per_block=1,
        norm_num_groups=2,
    ).eval()


def _transformer() -> CogVideoXTransformer3DModel:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        time_embed_dim=16,
        text_embed_dim=_tiny.HIDDEN_SIZE,
        num_layers=2,
        sample_width=6,
        sample_height=4,
        sample_frames=9,
        max_text_seq_length=_TEXT_LENGTH,
    )


def example_call(
    *, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2, num_frames: int = 9
) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance in one doubled batch.

    Args:
        prompt: What to draw; always padded to 226 tokens.
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
        guidance_scale=6.0,
    )
