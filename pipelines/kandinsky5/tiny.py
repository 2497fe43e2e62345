"""A Kandinsky 5 text-to-video checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo, Kandinsky5Transformer3DModel
    from transformers import Qwen2Tokenizer

LATENT_CHANNELS: Final = 4
_CUT_WORDS: Final = ((" dynam", "ism"), (" sc", "ren"), (" post", "processing"))
"""Rare words of the prompt template, that the published tokenizer cuts in two.

The pipeline drops the 128 tokens of the template; with three fewer it would drop the prompt's first three.
"""


def build_tiny(path: Path) -> None:
    """Write a tiny Kandinsky 5 checkpoint, to be read with ``Kandinsky5T2VPipeline.from_pretrained(path)``.

    It makes videos, since the text-to-image pipeline draws a million pixels whatever it is asked for. Where the
    published checkpoint has a ``Qwen2VLProcessor``, it has that processor's tokenizer: the pipeline only gives it text,
    and the processor cannot be made without torchvision.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, Kandinsky5T2VPipeline

    clip_tokenizer = _tiny.clip_tokenizer()
    with _tiny.seeded(0):
        pipe = Kandinsky5T2VPipeline(
            transformer=_tiny_encoders.without_zeros(_transformer()),
            vae=_vae(),
            text_encoder=_tiny_encoders.qwen25_vl(),
            tokenizer=None,
            text_encoder_2=_tiny.clip_text_model(clip_tokenizer),
            tokenizer_2=clip_tokenizer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        )
    pipe.register_modules(tokenizer=_tokenizer(pipe.prompt_template))
    pipe.save_pretrained(path, safe_serialization=True)


def _tokenizer(template: str) -> Qwen2Tokenizer:
    for parts in _CUT_WORDS:
        template = template.replace("".join(parts), "")
    return _tiny_encoders.qwen_tokenizer(template, *(part for parts in _CUT_WORDS for part in parts))


def _vae() -> AutoencoderKLHunyuanVideo:
    """Make a VAE that halves height and width three times and frames twice, as the published one."""
    from diffusers import AutoencoderKLHunyuanVideo

    return AutoencoderKLHunyuanVideo(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    ).eval()


def _transformer() -> Kandinsky5Transformer3DModel:
    from diffusers import Kandinsky5Transformer3DModel

    return Kandinsky5Transformer3DModel(
        in_visual_dim=LATENT_CHANNELS,
        out_visual_dim=LATENT_CHANNELS,
        in_text_dim=_tiny.HIDDEN_SIZE,
        in_text_dim2=_tiny.HIDDEN_SIZE,
        time_dim=16,
        model_dim=32,
        ff_dim=64,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
    )


def example_call(
    *, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2, num_frames: int = 5
) -> dict[str, Any]:
    """Give the keyword arguments of a call with guidance: two passes of different text lengths.

    Args:
        prompt: What to draw; not padded.
        seed: Seed of the noise.
        height: In pixels, a multiple of 16.
        width: In pixels, a multiple of 16.
        steps: Denoising steps.
        num_frames: One more than a multiple of 4.

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
        guidance_scale=5.0,
    )
