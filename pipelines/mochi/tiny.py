"""A Mochi 1 checkpoint of a few megabytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import AutoencoderKLMochi, MochiTransformer3DModel

LATENT_CHANNELS: Final = 12
_TEXT_LENGTH: Final = 256


def build_tiny(path: Path) -> None:
    """Write a tiny Mochi 1 checkpoint, to be read with ``MochiPipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, MochiPipeline

    tokenizer = _tiny.t5_tokenizer(_TEXT_LENGTH)
    with _tiny.seeded(0):
        pipe = MochiPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
            vae=_vae(),
            text_encoder=_tiny.t5_encoder(tokenizer),
            tokenizer=tokenizer,
            transformer=_tiny_encoders.without_zeros(_transformer()),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _vae() -> AutoencoderKLMochi:
    """Make a VAE that divides height and width by 8 and frames by 6, as the published one; its norms want 32 groups."""
    from diffusers import AutoencoderKLMochi

    return AutoencoderKLMochi(
        latent_channels=LATENT_CHANNELS,
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
        layers_per_block=(1,) * 5,
    ).eval()


def _transformer() -> MochiTransformer3DModel:
    from diffusers import MochiTransformer3DModel

    return MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=3,
        pooled_projection_dim=16,
        in_channels=LATENT_CHANNELS,
        text_embed_dim=_tiny.HIDDEN_SIZE,
        time_embed_dim=16,
        max_sequence_length=_TEXT_LENGTH,
    )


def example_call(
    *, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2, num_frames: int = 7
) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance in one doubled batch.

    Args:
        prompt: What to draw; always padded to 256 tokens, with a mask.
        seed: Seed of the noise.
        height: In pixels, a multiple of 16.
        width: In pixels, a multiple of 16.
        steps: Denoising steps.
        num_frames: One more than a multiple of 6.

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
        guidance_scale=4.5,
    )
