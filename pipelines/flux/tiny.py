"""A FLUX.1 checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from .. import _tiny

if TYPE_CHECKING:
    from diffusers import FluxTransformer2DModel

LATENT_CHANNELS: Final = 4
_PATCH_AREA: Final = 4
"""FLUX packs 2x2 latent pixels into one token."""


def build_tiny(path: Path) -> None:
    """Write a tiny FLUX.1-dev checkpoint, to be read with ``FluxPipeline.from_pretrained(path)``.

    It has every component of the published checkpoint: a transformer with guidance and two blocks of each kind, a VAE,
    CLIP and T5 with their tokenizers, and the scheduler. The weights are the same each time.

    Args:
        path: The folder to write to; made if it is not there.

    Example:
        >>> import tempfile
        >>> from diffusers import FluxPipeline
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     build_tiny(Path(folder))
        ...     pipe = FluxPipeline.from_pretrained(folder)
        >>> pipe.transformer.config.num_layers
        2
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    clip_tokenizer, t5_tokenizer = _tiny.clip_tokenizer(), _tiny.t5_tokenizer()
    with _tiny.seeded(0):
        pipe = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=_tiny.image_vae(
                LATENT_CHANNELS,
                scaling_factor=0.3611,
                shift_factor=0.1159,
                use_quant_conv=False,
                use_post_quant_conv=False,
            ),
            text_encoder=_tiny.clip_text_model(clip_tokenizer),
            tokenizer=clip_tokenizer,
            text_encoder_2=_tiny.t5_encoder(t5_tokenizer),
            tokenizer_2=t5_tokenizer,
            transformer=_transformer(),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _transformer() -> FluxTransformer2DModel:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=LATENT_CHANNELS * _PATCH_AREA,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_tiny.HIDDEN_SIZE,
        pooled_projection_dim=_tiny.HIDDEN_SIZE,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    ).eval()
