"""A Sana checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import AutoencoderDC, SanaTransformer2DModel

LATENT_CHANNELS: Final = 4


def build_tiny(path: Path) -> None:
    """Write a tiny Sana checkpoint, to be read with ``SanaPipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import DPMSolverMultistepScheduler, SanaPipeline

    with _tiny.seeded(0):
        pipe = SanaPipeline(
            tokenizer=_tiny_encoders.gemma_tokenizer(),
            text_encoder=_tiny_encoders.gemma2_model(),
            vae=_vae(),
            transformer=_tiny_encoders.without_zeros(_transformer()),
            scheduler=DPMSolverMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
            ),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _vae() -> AutoencoderDC:
    """Make a deep-compression VAE that halves height and width three times; the published one does it five times."""
    from diffusers import AutoencoderDC

    blocks = ("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock")
    scales = ((), (), (), (5,))
    return AutoencoderDC(
        latent_channels=LATENT_CHANNELS,
        attention_head_dim=2,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=(8,) * len(blocks),
        decoder_block_out_channels=(8,) * len(blocks),
        encoder_layers_per_block=(1,) * len(blocks),
        decoder_layers_per_block=(1,) * len(blocks),
        encoder_qkv_multiscales=scales,
        decoder_qkv_multiscales=scales,
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41407,
    ).eval()


def _transformer() -> SanaTransformer2DModel:
    from diffusers import SanaTransformer2DModel

    return SanaTransformer2DModel(
        patch_size=1,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=_tiny.HIDDEN_SIZE,
        sample_size=32,
    )


def example_call(*, prompt: str, seed: int, height: int = 32, width: int = 64, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance in one doubled batch.

    The long instruction that the pipeline puts before the prompt is left out: it only takes time.

    Args:
        prompt: What to draw; always padded to 300 tokens, with a mask.
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
        guidance_scale=4.5,
        use_resolution_binning=False,
        complex_human_instruction=None,
    )
