"""A HunyuanVideo 1.5 checkpoint of 19 megabytes: one projection in its transformer always has 2048x2048 weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
    from transformers import ByT5Tokenizer, T5EncoderModel

LATENT_CHANNELS: Final = 4
_GLYPH_WIDTH: Final = _tiny.HIDDEN_SIZE
_IMAGE_WIDTH: Final = 12


def build_tiny(path: Path) -> None:
    """Write a tiny HunyuanVideo 1.5 checkpoint, to be read with ``HunyuanVideo15Pipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, HunyuanVideo15Pipeline
    from transformers import ByT5Tokenizer

    byte_tokenizer = ByT5Tokenizer()
    with _tiny.seeded(0):
        pipe = HunyuanVideo15Pipeline(
            text_encoder=_tiny_encoders.qwen25_vl_text_model(),
            tokenizer=None,
            transformer=_tiny_encoders.without_zeros(_transformer()),
            vae=_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
            text_encoder_2=_glyph_encoder(byte_tokenizer),
            tokenizer_2=byte_tokenizer,
            guider=ClassifierFreeGuidance(guidance_scale=6.0),
        )
    template = _tiny_encoders.CHAT_TEMPLATE + pipe.system_message
    pipe.register_modules(tokenizer=_tiny_encoders.qwen_tokenizer(template))
    pipe.save_pretrained(path, safe_serialization=True)


def _glyph_encoder(tokenizer: ByT5Tokenizer) -> T5EncoderModel:
    """Make the encoder of quoted text, which is to be written in the picture letter by letter."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=_GLYPH_WIDTH,
        d_kv=_GLYPH_WIDTH // _tiny.HEADS,
        d_ff=2 * _GLYPH_WIDTH,
        num_layers=_tiny.LAYERS,
        num_heads=_tiny.HEADS,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
    )
    return T5EncoderModel(config).eval()


def _vae() -> AutoencoderKLHunyuanVideo15:
    """Make a VAE that divides height and width by 4 and frames by 2; the published one by 16 and by 4."""
    from diffusers import AutoencoderKLHunyuanVideo15

    return AutoencoderKLHunyuanVideo15(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
        downsample_match_channel=False,
        upsample_match_channel=False,
    ).eval()


def _transformer() -> HunyuanVideo15Transformer3DModel:
    from diffusers import HunyuanVideo15Transformer3DModel

    return HunyuanVideo15Transformer3DModel(
        in_channels=2 * LATENT_CHANNELS + 1,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=_tiny.HIDDEN_SIZE,
        text_embed_2_dim=_GLYPH_WIDTH,
        image_embed_dim=_IMAGE_WIDTH,
        rope_axes_dim=(2, 2, 4),
        target_size=16,
    )


def example_call(
    *, prompt: str, seed: int, height: int = 16, width: int = 32, steps: int = 2, num_frames: int = 5
) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance in two passes; the scale is the checkpoint's guider's.

    Args:
        prompt: What to draw; always padded to 1000 tokens, with a mask. Text in quotes is encoded letter by letter too.
        seed: Seed of the noise.
        height: In pixels, a multiple of 4.
        width: In pixels, a multiple of 4.
        steps: Denoising steps.
        num_frames: One more than a multiple of 2.

    Returns:
        Keyword arguments of ``pipe(...)``.
    """
    return _tiny_calls.call(
        prompt=prompt,
        seed=seed,
        height=height,
        width=width,
        steps=steps,
        num_frames=num_frames,
        negative_prompt=_tiny_calls.NEGATIVE_PROMPT,
    )
