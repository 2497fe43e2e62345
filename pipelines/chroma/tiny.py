"""A Chroma checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import ChromaTransformer2DModel

LATENT_CHANNELS: Final = 4
_PATCH_AREA: Final = 4


def build_tiny(path: Path) -> None:
    """Write a tiny Chroma checkpoint, to be read with ``ChromaPipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import ChromaPipeline, FlowMatchEulerDiscreteScheduler

    tokenizer = _tiny.t5_tokenizer()
    with _tiny.seeded(0):
        pipe = ChromaPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=_tiny.image_vae(
                LATENT_CHANNELS,
                scaling_factor=0.3611,
                shift_factor=0.1159,
                use_quant_conv=False,
                use_post_quant_conv=False,
            ),
            text_encoder=_tiny.t5_encoder(tokenizer),
            tokenizer=tokenizer,
            transformer=_tiny_encoders.without_zeros(_transformer()),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _transformer() -> ChromaTransformer2DModel:
    from diffusers import ChromaTransformer2DModel

    return ChromaTransformer2DModel(
        patch_size=1,
        in_channels=LATENT_CHANNELS * _PATCH_AREA,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_tiny.HIDDEN_SIZE,
        axes_dims_rope=(4, 4, 8),
        approximator_hidden_dim=32,
        approximator_layers=1,
        approximator_num_channels=16,
    )


def example_call(*, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance in two passes.

    Args:
        prompt: What to draw; always padded to 512 tokens, with a mask.
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
