"""Modules from outside of diffusers: a capture knows none of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers encoders are what is tested")

import bcg
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

MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_of_transformers_replays_exactly(name, dtype, mode):
    check_replays(encoder(name), lambda seed: encoder_call(name, seed), mode, dtype)


@pytest.mark.parametrize("name", ["bert", "t5", "clip text", "qwen2"])
def test_another_prompt_length_is_never_a_wrong_embedding(name):
    check_other_lengths(name)


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", VISION_TRANSFORMERS)
def test_a_vision_transformer_of_timm_replays_exactly(name, dtype, mode):
    check_replays(vision_transformer(name), lambda seed: image_call(name, seed), mode, dtype)


@MODES
@pytest.mark.parametrize("make", [nn.TransformerEncoder, nn.LSTM], ids=["TransformerEncoder", "LSTM"])
def test_modules_of_torch_replay_exactly(make, mode):
    if make is nn.LSTM:
        module: nn.Module = nn.LSTM(8, 8, num_layers=2, batch_first=True)
    else:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    module.eval().requires_grad_(False)
    runner = bcg.wrap(module)
    inputs = [torch.randn(2, 5, 8) for _ in range(3)]
    with mode():
        with bcg.warmup():
            runner(inputs[0])
        assert len(runner.entries) == 1, runner.explain(inputs[0])
        for given in inputs:
            torch.testing.assert_close(runner(given), module(given), rtol=0, atol=0)
    assert runner.stats.replays == 3
