"""Ernie-Image: text as long as the longest of the batch; a tensor tells the denoiser how much of it is text."""

from __future__ import annotations

from typing import Final

from ..family import Family, Request, TextInputs, TextStream

FAMILIES: Final = (
    Family(
        name="Ernie-Image",
        pipelines=("ErnieImagePipeline",),
        text=TextInputs(streams=(TextStream(names=("text_bth",)),), varies=True),
        default_requests=(Request(height=1024, width=1024),),
    ),
)
