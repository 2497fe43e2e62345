"""Wan and SkyReels-V2: text filled up with zeros that are attended, and in Wan 2.2 two transformers in turn.

The two transformers share the scratch memory of their graphs, as they never run at the same time.
"""

from __future__ import annotations

from typing import Final

from ..family import Family, Request, TextInputs, TextStream

_TEXT: Final = TextInputs(
    streams=(TextStream(names=("encoder_hidden_states",)),),
    default_length=512,
    reason="the transformer takes no text mask: it attends to all 512 rows, the zeros behind the prompt included",
)

FAMILIES: Final = (
    Family(
        name="Wan",
        pipelines=(
            "WanPipeline",
            "WanImageToVideoPipeline",
            "WanVideoToVideoPipeline",
            "WanVACEPipeline",
            "WanAnimatePipeline",
            "ChronoEditPipeline",
            "LucyEditPipeline",
        ),
        text=_TEXT,
        default_requests=(
            Request(height=480, width=832, num_frames=81),
            Request(height=720, width=1280, num_frames=81),
        ),
    ),
    Family(
        name="SkyReels-V2",
        pipelines=(
            "SkyReelsV2Pipeline",
            "SkyReelsV2ImageToVideoPipeline",
            "SkyReelsV2DiffusionForcingPipeline",
            "SkyReelsV2DiffusionForcingImageToVideoPipeline",
            "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        ),
        text=_TEXT,
        default_requests=(Request(height=544, width=960, num_frames=97),),
    ),
)
