"""Modules from outside of diffusers: a capture knows none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bcg

MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
transformers = pytest.importorskip("transformers", reason="transformers encoders are what is tested")

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 100,
}


def _bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(max_position_embeddings=32, **_SIZES))


def _t5() -> nn.Module:
    return transformers.T5EncoderModel(
        transformers.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=100)
    )


def _clip_text() -> nn.Module:
    config = transformers.CLIPTextConfig(
        max_position_embeddings=32, bos_token_id=1, eos_token_id=99, pad_token_id=0, **_SIZES
    )
    return transformers.CLIPTextModel(config)


def _vit() -> nn.Module:
    sizes = {name: size for name, size in _SIZES.items() if name != "vocab_size"}
    return transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=4, **sizes))


def _qwen2() -> nn.Module:
    # A decoder used as a text encoder, as the newer pipelines do; its KV cache is off.
    config = transformers.Qwen2Config(num_key_value_heads=1, max_position_embeddings=64, use_cache=False, **_SIZES)
    return transformers.Qwen2Model(config)


def _text(seed: int, valid: int = 6) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, 98, (2, 8), generator=generator)
    tokens[:, valid - 1] = 99
    mask = (torch.arange(8) < valid).long().expand(2, 8).clone()
    return {"input_ids": tokens * mask, "attention_mask": mask}


def _image(seed: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))}


ENCODERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]]]] = {
    "bert": (_bert, _text),
    "t5": (_t5, _text),
    "clip text": (_clip_text, _text),
    "vit": (_vit, _image),
    "qwen2": (_qwen2, _text),
}


def _assert_equal(expected: Any, got: Any) -> None:
    assert type(expected) is type(got)
    assert list(expected) == list(got)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=0)


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_of_transformers_replays_exactly(name, dtype, mode):
    make, arguments = ENCODERS[name]

    def call(seed: int) -> dict[str, Any]:
        return {key: value.to(dtype) if value.is_floating_point() else value for key, value in arguments(seed).items()}

    module = make().eval().requires_grad_(False).to(dtype)
    runner = bcg.wrap(module)
    with mode():
        with bcg.warmup():
            _assert_equal(module(**call(0)), runner(**call(0)))
        assert len(runner.entries) == 1, runner.explain(**call(0))
        for seed in (1, 2, 0):
            _assert_equal(module(**call(seed)), runner(**call(seed)))
    assert runner.stats.replays == 3


@pytest.mark.parametrize("name", ["bert", "t5", "clip text", "qwen2"])
def test_another_prompt_length_is_never_a_wrong_embedding(name):
    make, _ = ENCODERS[name]
    module = make().eval().requires_grad_(False)
    runner = bcg.wrap(module)
    with torch.no_grad():
        with bcg.warmup():
            runner(**_text(0))
        for seed, valid in ((1, 4), (2, 8), (3, 6), (4, 3)):
            _assert_equal(module(**_text(seed, valid)), runner(**_text(seed, valid)))
    assert runner.stats.captures == 1
    assert runner.stats.replays >= 1


@MODES
def test_a_vision_transformer_of_timm_replays_exactly(mode):
    timm = pytest.importorskip("timm", reason="timm is not installed: it needs torchvision")
    module = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5
    )
    module.eval().requires_grad_(False)
    runner = bcg.wrap(module)
    images = [torch.randn(2, 3, 16, 16) for _ in range(3)]
    with mode():
        with bcg.warmup():
            runner(images[0])
        for image in images:
            torch.testing.assert_close(runner(image), module(image), rtol=0, atol=0)
    assert runner.stats.replays == 3


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
