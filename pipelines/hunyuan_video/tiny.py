"""A HunyuanVideo checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoTransformer3DModel

LATENT_CHANNELS: Final = 4
_TEXT_LAYERS: Final = 3
"""The pipeline reads the hidden states before the last two layers."""


def build_tiny(path: Path) -> None:
    """Write a tiny HunyuanVideo checkpoint, to be read with ``HunyuanVideoPipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    clip_tokenizer = _tiny.clip_tokenizer()
    with _tiny.seeded(0):
        pipe = HunyuanVideoPipeline(
            text_encoder=_tiny_encoders.llama_model(layers=_TEXT_LAYERS),
            tokenizer=_tiny_encoders.llama_tokenizer(DEFAULT_PROMPT_TEMPLATE["template"]),
            transformer=_tiny_encoders.without_zeros(_transformer()),
            vae=_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
            text_encoder_2=_tiny.clip_text_model(clip_tokenizer),
            tokenizer_2=clip_tokenizer,
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _vae() -> AutoencoderKLHunyuanVideo:
    """Make a VAE that halves height and width three times and frames twice, as the published one."""
    from diffusers import AutoencoderKLHunyuanVideo

    return AutoencoderKLHunyuanVideo(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    ).eval()


def _transformer() -> HunyuanVideoTransformer3DModel:
    from diffusers import HunyuanVideoTransformer3DModel

    return HunyuanVideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=_tiny.HIDDEN_SIZE,
        pooled_projection_dim=_tiny.HIDDEN_SIZE,
        rope_axes_dim=(4, 6, 6),
    )


def example_call(
    *, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2, num_frames: int = 5
) -> dict[str, Any]:
    """Give the keyword arguments of a call with both guidances: the embedded one, and true guidance in two passes.

    Args:
        prompt: What to draw; always padded to 256 tokens, with a mask.
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
        true_cfg_scale=2.0,
    )
