"""Qwen-Image in all variants: text as long as the prompt, and a mask only where prompts of one batch differ."""

from __future__ import annotations

from typing import Final

from ..family import Family, Request, TextInputs, TextStream

_TEXT: Final = TextInputs(
    streams=(TextStream(names=("encoder_hidden_states",), mask="encoder_hidden_states_mask"),), varies=True
)

FAMILIES: Final = (
    Family(
        name="Qwen-Image",
        pipelines=(
            "QwenImagePipeline",
            "QwenImageImg2ImgPipeline",
            "QwenImageInpaintPipeline",
            "QwenImageControlNetPipeline",
            "QwenImageControlNetInpaintPipeline",
            "QwenImageLayeredPipeline",
        ),
        text=_TEXT,
        default_requests=(
            Request(height=1328, width=1328),
            Request(height=928, width=1664),
            Request(height=1664, width=928),
            Request(height=1104, width=1472),
            Request(height=1472, width=1104),
            Request(height=1056, width=1584),
            Request(height=1584, width=1056),
        ),
    ),
    Family(
        name="Qwen-Image-Edit",
        pipelines=("QwenImageEditPipeline", "QwenImageEditInpaintPipeline", "QwenImageEditPlusPipeline"),
        text=_TEXT,
        default_requests=(Request(height=1024, width=1024),),
    ),
)
