"""Bria Fibo: text as long as the longer of prompt and negative prompt, one more text input for every block."""

from __future__ import annotations

from typing import Final

from ..family import Family, Request, TextInputs, TextStream

_TEXT: Final = TextInputs(
    streams=(
        TextStream(
            names=("encoder_hidden_states", "text_encoder_layers", "txt_ids"),
            mask="joint_attention_kwargs.attention_mask",
            covers_image=True,
        ),
    ),
    varies=True,
)

FAMILIES: Final = (
    Family(
        name="Bria-Fibo",
        pipelines=("BriaFiboPipeline", "BriaFiboEditPipeline"),
        text=_TEXT,
        default_requests=(Request(height=1024, width=1024),),
    ),
)
