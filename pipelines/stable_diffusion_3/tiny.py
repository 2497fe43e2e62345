"""A Stable Diffusion 3.5 checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import SD3Transformer2DModel

LATENT_CHANNELS: Final = 4
SKIP_LAYERS: Final = (1,)
"""A block that skip-layer guidance may leave out."""

_CLIP_WIDTH: Final = 16
"""The two CLIP encoders' states are put side by side and padded to the width of T5's, so they must not be wider."""


def build_tiny(path: Path) -> None:
    """Write a tiny Stable Diffusion 3.5 checkpoint, to be read with ``StableDiffusion3Pipeline.from_pretrained(path)``.

    Its transformer has dual attention in the first of three blocks, as 3.5 Medium has it in its first thirteen.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    clip_tokenizer, t5_tokenizer = _tiny.clip_tokenizer(), _tiny.t5_tokenizer()
    with _tiny.seeded(0):
        pipe = StableDiffusion3Pipeline(
            transformer=_tiny_encoders.without_zeros(_transformer()),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_tiny.image_vae(
                LATENT_CHANNELS,
                scaling_factor=1.5305,
                shift_factor=0.0609,
                use_quant_conv=False,
                use_post_quant_conv=False,
            ),
            text_encoder=_tiny.clip_text_model_with_projection(clip_tokenizer, _CLIP_WIDTH),
            tokenizer=clip_tokenizer,
            text_encoder_2=_tiny.clip_text_model_with_projection(clip_tokenizer, _CLIP_WIDTH),
            tokenizer_2=_tiny.clip_tokenizer(),
            text_encoder_3=_tiny.t5_encoder(t5_tokenizer),
            tokenizer_3=t5_tokenizer,
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _transformer() -> SD3Transformer2DModel:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=_tiny.HIDDEN_SIZE,
        pooled_projection_dim=2 * _CLIP_WIDTH,
        pos_embed_max_size=96,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )


def example_call(*, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance; add ``skip_guidance_layers=SKIP_LAYERS`` for skip-layer too.

    Args:
        prompt: What to draw; always padded to 77 and 256 tokens.
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
        guidance_scale=5.0,
    )
