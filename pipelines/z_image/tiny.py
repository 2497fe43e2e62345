"""A Z-Image checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import ZImageTransformer2DModel

LATENT_CHANNELS: Final = 4


def build_tiny(path: Path) -> None:
    """Write a tiny Z-Image checkpoint, to be read with ``ZImagePipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline

    with _tiny.seeded(0):
        pipe = ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_tiny.image_vae(LATENT_CHANNELS, scaling_factor=0.3611, shift_factor=0.1159),
            text_encoder=_tiny_encoders.qwen3_model(),
            tokenizer=_tiny_encoders.qwen_tokenizer(_tiny_encoders.CHAT_TEMPLATE),
            transformer=_transformer(),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _transformer() -> ZImageTransformer2DModel:
    import torch
    from diffusers import ZImageTransformer2DModel

    model = ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=_tiny.HIDDEN_SIZE,
        axes_dims=[8, 4, 4],
        axes_lens=[1024, 32, 32],
    )
    with torch.no_grad():
        # Made with torch.empty: whatever was in memory, not a number included.
        model.x_pad_token.normal_()
        model.cap_pad_token.normal_()
    return _tiny_encoders.without_zeros(model)


def example_call(*, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance: prompt and negative prompt in one list, not padded.

    Args:
        prompt: What to draw.
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
