"""An LTX-Video checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import AutoencoderKLLTXVideo, LTXVideoTransformer3DModel

LATENT_CHANNELS: Final = 8


def build_tiny(path: Path) -> None:
    """Write a tiny LTX-Video checkpoint, to be read with ``LTXPipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline

    tokenizer = _tiny.t5_tokenizer()
    with _tiny.seeded(0):
        pipe = LTXPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1
            ),
            vae=_vae(),
            text_encoder=_tiny.t5_encoder(tokenizer),
            tokenizer=tokenizer,
            transformer=_tiny_encoders.without_zeros(_transformer()),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _vae() -> AutoencoderKLLTXVideo:
    """Make a VAE that halves height, width and frames twice; the published one divides by 32, 32 and 8."""
    from diffusers import AutoencoderKLLTXVideo

    levels = 4
    return AutoencoderKLLTXVideo(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(8,) * levels,
        decoder_block_out_channels=(8,) * levels,
        layers_per_block=(1,) * (levels + 1),
        decoder_layers_per_block=(1,) * (levels + 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * (levels + 1),
        upsample_residual=(False,) * levels,
        upsample_factor=(1,) * levels,
        patch_size=1,
        patch_size_t=1,
    ).eval()


def _transformer() -> LTXVideoTransformer3DModel:
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=_tiny.HIDDEN_SIZE,
    )


def example_call(
    *, prompt: str, seed: int, height: int = 32, width: int = 64, steps: int = 2, num_frames: int = 9
) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance in one doubled batch.

    Args:
        prompt: What to draw; always padded to 128 tokens, with a mask.
        seed: Seed of the noise.
        height: In pixels, a multiple of 32.
        width: In pixels, a multiple of 32.
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
        guidance_scale=3.0,
    )
