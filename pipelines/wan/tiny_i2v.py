"""A Wan 2.1 image-to-video checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls
from . import _parts

if TYPE_CHECKING:
    from transformers import CLIPVisionModel

_TEXT_LENGTH: Final = 512
_IMAGE_SIZE: Final = 28
_IMAGE_WIDTH: Final = 16


def build_tiny(path: Path) -> None:
    """Write a tiny Wan 2.1 checkpoint, to be read with ``WanImageToVideoPipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import WanImageToVideoPipeline
    from transformers import CLIPImageProcessor

    size = {"height": _IMAGE_SIZE, "width": _IMAGE_SIZE}
    with _tiny.seeded(0):
        pipe = WanImageToVideoPipeline(
            **_parts.text_components(),
            image_encoder=_image_encoder(),
            image_processor=CLIPImageProcessor(size=size, crop_size=size),
            transformer=_parts.transformer(in_channels=_parts.IMAGE_CHANNELS, image_width=_IMAGE_WIDTH),
            vae=_parts.vae(),
            scheduler=_parts.scheduler(),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _image_encoder() -> CLIPVisionModel:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=_IMAGE_WIDTH,
        intermediate_size=2 * _IMAGE_WIDTH,
        projection_dim=_IMAGE_WIDTH,
        num_hidden_layers=_tiny.LAYERS,
        num_attention_heads=2,
        image_size=_IMAGE_SIZE,
        patch_size=14,
    )
    return CLIPVisionModel(config).eval()


def example_call(
    *, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2, num_frames: int = 5
) -> dict[str, Any]:
    """Give the keyword arguments of a call with a picture and guidance in two passes.

    The prompt is turned into made-up embeddings: this pipeline cleans a prompt with ftfy, and without that package it
    fails with a NameError. The checkpoint has the text encoder all the same.

    Args:
        prompt: What to draw; its embeddings are padded to 512 with zeros, as the pipeline does it.
        seed: Seed of the noise and of the picture.
        height: In pixels, a multiple of 16.
        width: In pixels, a multiple of 16.
        steps: Denoising steps.
        num_frames: One more than a multiple of 4.

    Returns:
        Keyword arguments of ``pipe(...)``.
    """

    def embeddings(text: str) -> Any:
        return _tiny_calls.prompt_embeddings(text, _tiny.HIDDEN_SIZE, _TEXT_LENGTH)

    return _tiny_calls.call(
        prompt=None,
        seed=seed,
        height=height,
        width=width,
        steps=steps,
        num_frames=num_frames,
        image=_tiny_calls.picture(height, width, seed),
        prompt_embeds=embeddings(prompt),
        negative_prompt_embeds=embeddings(_tiny_calls.NEGATIVE_PROMPT),
        guidance_scale=5.0,
    )
