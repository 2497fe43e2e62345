"""An ERNIE-Image checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import ErnieImageTransformer2DModel

LATENT_CHANNELS: Final = 4
_PATCH_AREA: Final = 4


def build_tiny(path: Path) -> None:
    """Write a tiny ERNIE-Image checkpoint, to be read with ``ErnieImagePipeline.from_pretrained(path)``.

    The language model that rewrites prompts is left out, as the pipeline allows.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import AutoencoderKLFlux2, ErnieImagePipeline, FlowMatchEulerDiscreteScheduler

    levels = 4
    with _tiny.seeded(0):
        pipe = ErnieImagePipeline(
            transformer=_tiny_encoders.without_zeros(_transformer()),
            vae=AutoencoderKLFlux2(
                down_block_types=("DownEncoderBlock2D",) * levels,
                up_block_types=("UpDecoderBlock2D",) * levels,
                block_out_channels=(8,) * levels,
                layers_per_block=1,
                latent_channels=LATENT_CHANNELS,
                norm_num_groups=4,
            ).eval(),
            text_encoder=_tiny_encoders.mistral3_model(),
            tokenizer=_tiny_encoders.plain_tokenizer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=4.0),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _transformer() -> ErnieImageTransformer2DModel:
    from diffusers import ErnieImageTransformer2DModel

    return ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=64,
        in_channels=LATENT_CHANNELS * _PATCH_AREA,
        out_channels=LATENT_CHANNELS * _PATCH_AREA,
        patch_size=1,
        text_in_dim=_tiny.HIDDEN_SIZE,
        rope_axes_dim=(8, 4, 4),
    )


def example_call(*, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance in one doubled batch.

    Args:
        prompt: What to draw; padded to the longer of prompt and negative prompt, with their lengths.
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
        guidance_scale=4.0,
    )
