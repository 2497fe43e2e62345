"""Lumina2: a fixed length with a mask, from which the forward reads the lengths on the host.

The mask's content thus guards a captured graph: a prompt of another length is another variant of one signature.
"""

from __future__ import annotations

from typing import Final

import torch

from ..family import Family, Request, TextInputs, TextStream

_STREAM: Final = TextStream(names=("encoder_hidden_states",), mask="encoder_attention_mask", mask_dtype=torch.int64)

FAMILIES: Final = (
    Family(
        name="Lumina2",
        pipelines=("Lumina2Pipeline",),
        text=TextInputs(streams=(_STREAM,), default_length=256),
        default_requests=(Request(height=1024, width=1024),),
    ),
)
