"""Modules from outside of diffusers on the GPU, in bfloat16: encoders of transformers, vision transformers of timm."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers encoders are what is tested")

from foreign_modules import (
    ENCODERS,
    VISION_TRANSFORMERS,
    check_other_lengths,
    check_replays,
    encoder,
    encoder_call,
    image_call,
    vision_transformer,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


@MODES
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_of_transformers_replays_exactly(name, mode):
    check_replays(encoder(name), lambda seed: encoder_call(name, seed), mode, torch.bfloat16, DEVICE)


@pytest.mark.parametrize("name", ["bert", "t5", "clip text", "qwen2"])
def test_another_prompt_length_is_never_a_wrong_embedding(name):
    check_other_lengths(name, DEVICE)


@MODES
@pytest.mark.parametrize("name", VISION_TRANSFORMERS)
def test_a_vision_transformer_of_timm_replays_exactly(name, mode):
    check_replays(vision_transformer(name), lambda seed: image_call(name, seed), mode, torch.bfloat16, DEVICE)
