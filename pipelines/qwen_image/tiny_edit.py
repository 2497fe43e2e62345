"""A Qwen-Image-Edit checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders
from . import _parts

_HALVINGS: Final = 5
"""The picture to edit is always scaled to about a million pixels; five halvings keep that at 256 tokens.

For the same reason the VAE is as thin as it can be: nearly all of a call is its encoder.
"""


def build_tiny(path: Path) -> None:
    """Write a tiny Qwen-Image-Edit checkpoint, to be read with ``QwenImageEditPipeline.from_pretrained(path)``.

    Its processor is only a tokenizer: the published ``Qwen2VLProcessor`` also reads videos and cannot even be made
    without torchvision. So the encoder cannot be shown a picture, and `example_call` brings embeddings of the prompt.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import QwenImageEditPipeline

    with _tiny.seeded(0):
        pipe = QwenImageEditPipeline(
            scheduler=_parts.scheduler(),
            vae=_parts.vae(_HALVINGS, width=2, blocks=0),
            text_encoder=_tiny_encoders.qwen25_vl(_parts.TEXT_WIDTH),
            tokenizer=None,
            processor=None,
            transformer=_parts.transformer(),
        )
    tokenizer = _tiny_encoders.qwen_tokenizer(pipe.prompt_template_encode)
    pipe.register_modules(tokenizer=tokenizer, processor=tokenizer)
    pipe.save_pretrained(path, safe_serialization=True)


def example_call(*, prompt: str, seed: int, height: int = 64, width: int = 128, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call with a picture and true guidance.

    Args:
        prompt: What to change; turned into made-up embeddings, one for each character.
        seed: Seed of the noise and of the picture.
        height: In pixels, a multiple of 64.
        width: In pixels, a multiple of 64.
        steps: Denoising steps.

    Returns:
        Keyword arguments of ``pipe(...)``.
    """
    embeddings = _tiny_calls.prompt_embeddings(prompt, _parts.TEXT_WIDTH)
    negative_embeddings = _tiny_calls.prompt_embeddings(_tiny_calls.NEGATIVE_PROMPT, _parts.TEXT_WIDTH)
    return _tiny_calls.call(
        prompt=None,
        seed=seed,
        height=height,
        width=width,
        steps=steps,
        image=_tiny_calls.picture(height, width, seed),
        prompt_embeds=embeddings,
        prompt_embeds_mask=embeddings.new_ones(embeddings.shape[:2]),
        negative_prompt_embeds=negative_embeddings,
        negative_prompt_embeds_mask=negative_embeddings.new_ones(negative_embeddings.shape[:2]),
        true_cfg_scale=4.0,
    )
