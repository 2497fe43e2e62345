"""A CogView 4 checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import CogView4Transformer2DModel

LATENT_CHANNELS: Final = 4


def build_tiny(path: Path) -> None:
    """Write a tiny CogView 4 checkpoint, to be read with ``CogView4Pipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import CogView4Pipeline, FlowMatchEulerDiscreteScheduler

    with _tiny.seeded(0):
        pipe = CogView4Pipeline(
            tokenizer=_tiny_encoders.glm_tokenizer(),
            text_encoder=_tiny_encoders.glm_model(),
            vae=_tiny.image_vae(LATENT_CHANNELS),
            transformer=_tiny_encoders.without_zeros(_transformer()),
            scheduler=FlowMatchEulerDiscreteScheduler(
                base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True, time_shift_type="linear"
            ),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _transformer() -> CogView4Transformer2DModel:
    from diffusers import CogView4Transformer2DModel

    return CogView4Transformer2DModel(
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        text_embed_dim=_tiny.HIDDEN_SIZE,
        time_embed_dim=8,
        condition_dim=4,
    )


def example_call(*, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance: two passes whose text lengths may differ.

    Args:
        prompt: What to draw; padded on the left to a multiple of 16 tokens.
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
