"""A Qwen-Image checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders
from . import _parts

_HALVINGS: Final = 3


def build_tiny(path: Path) -> None:
    """Write a tiny Qwen-Image checkpoint, to be read with ``QwenImagePipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import QwenImagePipeline

    with _tiny.seeded(0):
        pipe = QwenImagePipeline(
            scheduler=_parts.scheduler(),
            vae=_parts.vae(_HALVINGS),
            text_encoder=_tiny_encoders.qwen25_vl(_parts.TEXT_WIDTH),
            tokenizer=None,
            transformer=_parts.transformer(),
        )
    pipe.register_modules(tokenizer=_tiny_encoders.qwen_tokenizer(pipe.prompt_template_encode))
    pipe.save_pretrained(path, safe_serialization=True)


def example_call(*, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call with true guidance: two passes of different text lengths.

    Args:
        prompt: What to draw; not padded.
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
        true_cfg_scale=4.0,
    )
