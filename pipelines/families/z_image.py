"""Z-Image: a list of prompts, none of them padded, which the forward pads to multiples of 32 by itself."""

from __future__ import annotations

from typing import Final

from ..family import Family, Request, TextInputs, TextStream

_TEXT: Final = TextInputs(
    streams=(TextStream(names=("cap_feats",)),),
    varies=True,
    reason=(
        "the transformer pads text to a multiple of 32 itself, with rows that are attended, and the positions of the "
        "picture begin where the padding ends"
    ),
)

FAMILIES: Final = (
    Family(
        name="Z-Image",
        pipelines=(
            "ZImagePipeline",
            "ZImageImg2ImgPipeline",
            "ZImageInpaintPipeline",
            "ZImageControlNetPipeline",
            "ZImageControlNetInpaintPipeline",
            "ZImageOmniPipeline",
        ),
        text=_TEXT,
        default_requests=(Request(height=1024, width=1024),),
    ),
)
