"""Families whose text has a fixed length and a mask; what they differ in is the name and the dtype of the mask."""

from __future__ import annotations

from typing import Final

import torch

from ..family import Family, Request, TextInputs, TextStream

_TEXT: Final = "encoder_hidden_states"
_MASK: Final = "encoder_attention_mask"
_SQUARE: Final = (Request(height=1024, width=1024),)


def _text(length: int, mask_dtype: torch.dtype = torch.int64, mask: str = _MASK, second: bool = False) -> TextInputs:
    stream = TextStream(names=(_TEXT,), mask=mask, mask_dtype=mask_dtype)
    glyphs = TextStream(names=(f"{_TEXT}_2",), mask=f"{_MASK}_2", mask_dtype=mask_dtype)
    return TextInputs(streams=(stream, glyphs) if second else (stream,), default_length=length)


_KREA2: Final = TextInputs(
    # [B, S, layers, D], and positions [S + N, 3]
    streams=(TextStream(names=(_TEXT,), dim=1, mask=_MASK, joint_names=("position_ids",)),),
    default_length=512,
)

FAMILIES: Final = (
    Family(
        name="Sana",
        pipelines=("SanaPipeline", "SanaPAGPipeline", "SanaControlNetPipeline"),
        text=_text(300),
        default_requests=_SQUARE,
    ),
    Family(
        name="Sana-Sprint",
        pipelines=("SanaSprintPipeline", "SanaSprintImg2ImgPipeline"),
        text=_text(300),
        default_requests=_SQUARE,
    ),
    Family(
        name="Sana-Video",
        pipelines=("SanaVideoPipeline", "SanaImageToVideoPipeline"),
        text=_text(300),
        default_requests=(Request(height=480, width=832, num_frames=81),),
    ),
    Family(
        name="PixArt-Alpha",
        pipelines=("PixArtAlphaPipeline",),
        text=_text(120),
        default_requests=_SQUARE,
    ),
    Family(
        name="PixArt-Sigma",
        pipelines=("PixArtSigmaPipeline", "PixArtSigmaPAGPipeline"),
        text=_text(300),
        default_requests=_SQUARE,
    ),
    Family(
        name="HunyuanVideo",
        pipelines=("HunyuanVideoPipeline", "HunyuanSkyreelsImageToVideoPipeline", "HunyuanVideoImageToVideoPipeline"),
        text=_text(256),
        default_requests=(Request(height=720, width=1280, num_frames=129),),
    ),
    Family(
        name="HunyuanVideo-1.5",
        pipelines=("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
        text=_text(1000, second=True),
        default_requests=(Request(height=480, width=848, num_frames=121),),
    ),
    Family(
        name="HunyuanImage",
        pipelines=("HunyuanImagePipeline", "HunyuanImageRefinerPipeline"),
        text=_text(1000, second=True),
        default_requests=(Request(height=2048, width=2048),),
    ),
    Family(
        name="Mochi",
        pipelines=("MochiPipeline",),
        text=_text(256, torch.bool),
        default_requests=(Request(height=480, width=848, num_frames=19),),
    ),
    Family(
        name="Motif-Video",
        pipelines=("MotifVideoPipeline", "MotifVideoImage2VideoPipeline"),
        # One dtype for both halves of guidance: the pipeline passes bool for one and may pass int64 for the other.
        text=_text(512, torch.bool),
        default_requests=(Request(height=736, width=1280, num_frames=121),),
    ),
    Family(
        name="Allegro",
        pipelines=("AllegroPipeline",),
        text=_text(512),
        default_requests=(Request(height=720, width=1280, num_frames=88),),
    ),
    Family(
        name="PRX",
        pipelines=("PRXPipeline",),
        text=_text(256, torch.bool, mask="attention_mask"),
        default_requests=(Request(height=512, width=512),),
    ),
    Family(
        name="Cosmos",
        pipelines=(
            "CosmosTextToWorldPipeline",
            "CosmosVideoToWorldPipeline",
            "Cosmos2TextToImagePipeline",
            "Cosmos2VideoToWorldPipeline",
        ),
        text=_text(512, torch.bool, mask="attention_mask"),
        default_requests=(Request(height=704, width=1280, num_frames=121),),
    ),
    Family(name="Krea 2", pipelines=("Krea2Pipeline",), text=_KREA2, default_requests=_SQUARE),
)
