"""Modules from outside of diffusers, which a capture knows nothing of, and the checks that every device shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import bcg

HERE = torch.device("cpu")

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


Encoder = tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]]]

ENCODERS: dict[str, Encoder] = {
    "bert": (_bert, _text),
    "t5": (_t5, _text),
    "clip text": (_clip_text, _text),
    "vit": (_vit, _image),
    "qwen2": (_qwen2, _text),
}


_TIMM_SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def _plain_vit(timm: Any) -> nn.Module:
    return timm.models.vision_transformer.VisionTransformer(**_TIMM_SIZES)


def _registers_vit(timm: Any) -> nn.Module:
    # Position embeddings are interpolated to the image's size in every forward.
    return timm.models.vision_transformer.VisionTransformer(
        dynamic_img_size=True, reg_tokens=2, qk_norm=True, init_values=0.1, **_TIMM_SIZES
    )


def _eva(timm: Any) -> nn.Module:
    # Rotary embeddings, made from the image's size in every forward.
    return timm.models.eva.Eva(use_rot_pos_emb=True, dynamic_img_size=True, swiglu_mlp=True, **_TIMM_SIZES)


# With the height of the image that each is called with: only a plain one is bound to its own size.
VISION_TRANSFORMERS = {"plain": (_plain_vit, 16), "registers": (_registers_vit, 24), "eva": (_eva, 24)}


def vision_transformer(name: str) -> nn.Module:
    """Return a vision transformer of timm; skip the test where timm cannot be imported.

    Args:
        name: One of `VISION_TRANSFORMERS`.
    """
    try:
        import timm
    except Exception as error:  # torchvision, which it needs, raises RuntimeError beside a torch of another build
        pytest.skip(f"timm cannot be imported: {type(error).__name__}: {error}")
    torch.manual_seed(0)
    return VISION_TRANSFORMERS[name][0](timm)


def encoder(name: str) -> nn.Module:
    """Return an encoder of transformers.

    Args:
        name: One of `ENCODERS`.
    """
    torch.manual_seed(0)
    return ENCODERS[name][0]()


def encoder_call(name: str, seed: int) -> dict[str, Any]:
    """Return the keyword arguments of a call of an encoder."""
    return ENCODERS[name][1](seed)


def image_call(name: str, seed: int) -> dict[str, Any]:
    """Return the keyword arguments of a call of a vision transformer."""
    height = VISION_TRANSFORMERS[name][1]
    return {"x": torch.randn(2, 3, height, 16, generator=torch.Generator().manual_seed(seed))}


def assert_equal(expected: Any, got: Any) -> None:
    """Compare results bit for bit, in any dict that a model returns."""
    assert type(expected) is type(got)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        return
    assert list(expected) == list(got)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=0)


def check_replays(
    module: nn.Module,
    arguments: Callable[[int], dict[str, Any]],
    mode: Callable[[], Any],
    dtype: torch.dtype = torch.float32,
    device: torch.device = HERE,
) -> None:
    """Check that a module is captured as it is, and replays new values exactly.

    Args:
        module: The module.
        arguments: Makes keyword arguments from a seed.
        mode: Makes the context that all calls run under.
        dtype: Of the module and of its floating-point arguments.
        device: Where both lie.
    """

    def given(seed: int) -> dict[str, Any]:
        return {
            key: value.to(device, dtype if value.is_floating_point() else None)
            for key, value in arguments(seed).items()
        }

    module = module.eval().requires_grad_(False).to(device, dtype)
    runner = bcg.wrap(module)
    with mode():
        with bcg.warmup():
            assert_equal(module(**given(0)), runner(**given(0)))
        assert len(runner.entries) == 1, runner.explain(**given(0))
        for seed in (1, 2, 0):
            assert_equal(module(**given(seed)), runner(**given(seed)))
    assert runner.stats.replays == 3


def check_other_lengths(name: str, device: torch.device = HERE) -> None:
    """Check that an encoder captured for one prompt length is never wrong for another one behind the same signature.

    Args:
        name: Of an encoder of text.
        device: Where it lies.
    """
    module = encoder(name).eval().requires_grad_(False).to(device)
    runner = bcg.wrap(module)

    def given(seed: int, valid: int = 6) -> dict[str, Any]:
        return {key: value.to(device) for key, value in _text(seed, valid).items()}

    with torch.no_grad():
        with bcg.warmup():
            runner(**given(0))
        for seed, valid in ((1, 4), (2, 8), (3, 6), (4, 3)):
            assert_equal(module(**given(seed, valid)), runner(**given(seed, valid)))
    assert runner.stats.captures == 1
    assert runner.stats.replays >= 1
