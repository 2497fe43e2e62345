"""What the tiny Wan checkpoints have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel

LATENT_CHANNELS: Final = 16
IMAGE_CHANNELS: Final = 2 * LATENT_CHANNELS + 4
"""Image to video: noise, the encoded picture, and a mask of four frames to each latent frame."""


def text_components() -> dict[str, Any]:
    """Make the tokenizer and the UMT5 encoder, by the pipeline's names for them."""
    tokenizer = _tiny.t5_tokenizer()
    return {"tokenizer": tokenizer, "text_encoder": _tiny_encoders.umt5_encoder(tokenizer)}


def scheduler() -> UniPCMultistepScheduler:
    """Make the scheduler with the published settings for 480p."""
    from diffusers import UniPCMultistepScheduler

    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def vae() -> AutoencoderKLWan:
    """Make a VAE that halves height and width three times and frames twice, as the published one."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()


def transformer(*, in_channels: int = LATENT_CHANNELS, image_width: int | None = None) -> WanTransformer3DModel:
    """Make a denoiser.

    Args:
        in_channels: Channels of what it reads.
        image_width: Width of the embeddings of a picture, or None where there are none.

    Returns:
        The denoiser, in evaluation mode.
    """
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=in_channels,
        out_channels=LATENT_CHANNELS,
        text_dim=_tiny.HIDDEN_SIZE,
        ffn_dim=32,
        num_layers=2,
        image_dim=image_width,
        added_kv_proj_dim=None if image_width is None else 24,
        rope_max_seq_len=32,
    )
    return _tiny_encoders.without_zeros(model)
