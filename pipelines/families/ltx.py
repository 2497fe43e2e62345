"""LTX-Video and LTX-2: a fixed length with a mask; LTX-2 has text for the picture and for the sound."""

from __future__ import annotations

from typing import Final

import torch

from ..family import Family, Request, TextInputs, TextStream

_PICTURE: Final = TextStream(names=("encoder_hidden_states",), mask="encoder_attention_mask", mask_dtype=torch.int64)
_SOUND: Final = TextStream(
    names=("audio_encoder_hidden_states",), mask="audio_encoder_attention_mask", mask_dtype=torch.int64
)

FAMILIES: Final = (
    Family(
        name="LTX",
        pipelines=("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline", "LTXI2VLongMultiPromptPipeline"),
        text=TextInputs(streams=(_PICTURE,), default_length=128),
        default_requests=(Request(height=512, width=704, num_frames=161),),
    ),
    Family(
        name="LTX-2",
        pipelines=(
            "LTX2Pipeline",
            "LTX2ImageToVideoPipeline",
            "LTX2ConditionPipeline",
            "LTX2DFRPipeline",
            "LTX2DFRTemporalRefinePipeline",
            "LTX2HDRPipeline",
            "LTX2InContextPipeline",
        ),
        text=TextInputs(streams=(_PICTURE, _SOUND), default_length=1024),
        default_requests=(Request(height=512, width=768, num_frames=121),),
    ),
)
