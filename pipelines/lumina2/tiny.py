"""A Lumina-Image 2 checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import Lumina2Transformer2DModel

LATENT_CHANNELS: Final = 4


def build_tiny(path: Path) -> None:
    """Write a tiny Lumina-Image 2 checkpoint, to be read with ``Lumina2Pipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline

    with _tiny.seeded(0):
        pipe = Lumina2Pipeline(
            transformer=_tiny_encoders.without_zeros(_transformer()),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
            vae=_tiny.image_vae(
                LATENT_CHANNELS,
                scaling_factor=0.3611,
                shift_factor=0.1159,
                use_quant_conv=False,
                use_post_quant_conv=False,
            ),
            text_encoder=_tiny_encoders.gemma2_model(),
            tokenizer=None,
        )
    pipe.register_modules(tokenizer=_tiny_encoders.gemma_tokenizer(pipe.system_prompt))
    pipe.save_pretrained(path, safe_serialization=True)


def _transformer() -> Lumina2Transformer2DModel:
    from diffusers import Lumina2Transformer2DModel

    return Lumina2Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(512, 32, 32),
        cap_feat_dim=_tiny.HIDDEN_SIZE,
    )


def example_call(*, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance in two passes.

    Args:
        prompt: What to draw; always padded to 256 tokens, with a mask.
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
