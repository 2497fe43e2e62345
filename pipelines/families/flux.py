"""FLUX, FLUX.2 and Ovis-Image: a fixed length, unless embeddings or ``max_sequence_length`` are given.

Their pipelines pass no mask; the attention takes one over text and image in ``joint_attention_kwargs``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..family import Family, Request, TextInputs, TextStream

_TEXT: Final = TextInputs(
    streams=(
        TextStream(
            names=("encoder_hidden_states", "txt_ids"),
            mask="joint_attention_kwargs.attention_mask",
            covers_image=True,
        ),
    ),
    default_length=512,
)
_SQUARE: Final = (Request(height=1024, width=1024),)

FAMILIES: Final = (
    Family(
        name="FLUX",
        pipelines=(
            "FluxPipeline",
            "FluxControlPipeline",
            "FluxControlImg2ImgPipeline",
            "FluxControlInpaintPipeline",
            "FluxControlNetPipeline",
            "FluxControlNetImg2ImgPipeline",
            "FluxControlNetInpaintPipeline",
            "FluxFillPipeline",
            "FluxImg2ImgPipeline",
            "FluxInpaintPipeline",
            "FluxKontextPipeline",
            "FluxKontextInpaintPipeline",
        ),
        text=_TEXT,
        default_requests=(*_SQUARE, Request(height=768, width=1344), Request(height=1344, width=768)),
    ),
    Family(
        name="FLUX.2",
        pipelines=("Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinInpaintPipeline"),
        text=_TEXT,
        default_requests=_SQUARE,
    ),
    Family(
        name="FLUX.2-Klein-KV",
        pipelines=("Flux2KleinKVPipeline",),
        text=replace(
            _TEXT, reason="keys of the reference pictures come from a cache, so shapes do not tell what a mask covers"
        ),
        default_requests=_SQUARE,
    ),
    Family(
        name="Ovis-Image",
        pipelines=("OvisImagePipeline",),
        text=replace(_TEXT, default_length=256),
        default_requests=_SQUARE,
    ),
)
