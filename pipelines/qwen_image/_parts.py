"""What the tiny Qwen-Image checkpoints have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import _tiny, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel

LATENT_CHANNELS: Final = 4
TEXT_WIDTH: Final = _tiny.HIDDEN_SIZE
_PATCH_AREA: Final = 4


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Make the scheduler with the published settings."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )


def transformer() -> QwenImageTransformer2DModel:
    """Make the denoiser."""
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=LATENT_CHANNELS * _PATCH_AREA,
        out_channels=LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 4, 4),
    )
    return _tiny_encoders.without_zeros(model)


def vae(halvings: int, *, width: int = 4, blocks: int = 1) -> AutoencoderKLQwenImage:
    """Make the VAE.

    Args:
        halvings: How often height and width are halved; the published one does it three times.
        width: Channels of every level.
        blocks: Residual blocks of every level.

    Returns:
        The VAE, in evaluation mode.
    """
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(
        base_dim=width,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1] * (halvings + 1),
        num_res_blocks=blocks,
        temperal_downsample=[False] * (halvings - 2) + [True] * 2,
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    ).eval()
