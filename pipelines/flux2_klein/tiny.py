"""A FLUX.2 Klein checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import Flux2Transformer2DModel

LATENT_CHANNELS: Final = 4
_PATCH_AREA: Final = 4
_TEXT_WIDTH: Final = 16
_TEXT_LAYERS: Final = (1, 2, 3)
"""The hidden states of these encoder layers, side by side, are the prompt; three of the published encoder's 36 are."""


def build_tiny(path: Path) -> None:
    """Write a tiny FLUX.2 Klein checkpoint, to be read with ``Flux2KleinPipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline

    levels = 4
    with _tiny.seeded(0):
        pipe = Flux2KleinPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=AutoencoderKLFlux2(
                down_block_types=("DownEncoderBlock2D",) * levels,
                up_block_types=("UpDecoderBlock2D",) * levels,
                block_out_channels=(8,) * levels,
                layers_per_block=1,
                latent_channels=LATENT_CHANNELS,
                norm_num_groups=4,
            ).eval(),
            text_encoder=_tiny_encoders.qwen3_causal_lm(_TEXT_WIDTH, max(_TEXT_LAYERS)),
            tokenizer=_tiny_encoders.qwen_tokenizer(_tiny_encoders.CHAT_TEMPLATE),
            transformer=_tiny_encoders.without_zeros(_transformer()),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _transformer() -> Flux2Transformer2DModel:
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        patch_size=1,
        in_channels=LATENT_CHANNELS * _PATCH_AREA,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_TEXT_WIDTH * len(_TEXT_LAYERS),
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )


def example_call(*, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance in two passes.

    Args:
        prompt: What to draw; always padded to 512 tokens.
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
        guidance_scale=4.0,
        text_encoder_out_layers=_TEXT_LAYERS,
    )
