"""Tiny diffusers transformers whose forwards read the host, copy from it, or have shapes that depend on data.

Each maker returns a module; each call maker returns keyword arguments as the model's pipeline passes them, for a seed
(other values, the same signature) and a prompt length. Where text is padded the length moves the mask alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

_ROOM = 24  # tokens that padded text is padded to


class Values:
    """Draw tensors for one call.

    Args:
        seed: Of all values.
        dtype: Of those that a pipeline casts to the model's dtype.
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(1000 + seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def time(self, batch: int, scale: float, dtype: torch.dtype | None = None) -> Tensor:
        fraction = torch.rand((), generator=self._generator).item()
        return torch.full((batch,), fraction * scale).to(dtype or self.dtype)

    def tokens(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self._generator)


def mask(batch: int, length: int, valid: int, dtype: torch.dtype) -> Tensor:
    """Return a mask of which the first tokens are valid."""
    return (torch.arange(length) < valid).expand(batch, length).clone().to(dtype)


@dataclass(frozen=True)
class TinyModel:
    """How to make a model and a call of it.

    Attributes:
        make: Builds the module.
        call: Keyword arguments from values and the prompt length.
        length: The usual prompt length.
    """

    make: Callable[[], nn.Module]
    call: Callable[[Values, int], dict[str, Any]]
    length: int = 9

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Return the module for inference, with no weights that are all zeros: those would hide errors."""
        torch.manual_seed(0)
        module = self.make().eval().requires_grad_(False)
        kept = getattr(module, "_keep_in_fp32_modules", None) or []
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if isinstance(tensor, nn.Parameter) and not tensor.any():
                tensor.normal_(std=0.05)
            if tensor.is_floating_point() and not set(kept) & set(name.split(".")):
                tensor.data = tensor.data.to(dtype)
        return module

    def arguments(self, seed: int, dtype: torch.dtype, length: int | None = None) -> dict[str, Any]:
        """Return the keyword arguments of one call."""
        return {**self.call(Values(seed, dtype), length or self.length), "return_dict": False}


def _grid(height: int, width: int, dtype: torch.dtype) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3).to(dtype)


def _cogview4() -> nn.Module:
    return diffusers.CogView4Transformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=4, num_attention_heads=4,
        text_embed_dim=32, time_embed_dim=8, condition_dim=4,
    )  # fmt: skip


def _cogview4_call(v: Values, length: int) -> dict[str, Any]:
    size = torch.full((1, 2), 64.0, dtype=v.dtype)
    return {
        "hidden_states": v.normal(1, 4, 8, 8),
        "encoder_hidden_states": v.normal(1, length, 32),
        "timestep": v.time(1, 1000, torch.float32),
        "original_size": size,
        "target_size": size.clone(),
        "crop_coords": torch.zeros(1, 2, dtype=v.dtype),
    }


def _glm_image() -> nn.Module:
    return diffusers.GlmImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        text_embed_dim=32, time_embed_dim=16, condition_dim=8, prior_vq_quantizer_codebook_size=128,
    )  # fmt: skip


def _glm_image_call(v: Values, length: int) -> dict[str, Any]:
    from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

    return {
        "hidden_states": v.normal(1, 4, 8, 8),
        "encoder_hidden_states": v.normal(1, length, 32),
        "prior_token_id": v.tokens(128, 1, 16),
        "prior_token_drop": torch.zeros(1, 16, dtype=torch.bool),
        "timestep": v.time(1, 1000, torch.float32),
        "target_size": torch.full((1, 2), 64.0, dtype=v.dtype),
        "crop_coords": torch.zeros(1, 2, dtype=v.dtype),
        "kv_caches": GlmImageKVCache(num_layers=2),
    }


def _chroma() -> nn.Module:
    return diffusers.ChromaTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=[4, 4, 8], approximator_hidden_dim=32, approximator_layers=1,
        approximator_num_channels=16,
    )  # fmt: skip


def _chroma_call(v: Values, length: int) -> dict[str, Any]:
    return {
        "hidden_states": v.normal(1, 12, 16),
        "timestep": v.time(1, 1),
        "encoder_hidden_states": v.normal(1, 12, 32),
        "txt_ids": torch.zeros(12, 3, dtype=v.dtype),
        "img_ids": _grid(4, 3, v.dtype),
        "attention_mask": torch.cat([mask(1, 12, length, v.dtype), mask(1, 12, 12, v.dtype)], 1),
    }


def _kandinsky5() -> nn.Module:
    return diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=16, in_text_dim=32, in_text_dim2=32, time_dim=16, out_visual_dim=16, patch_size=(1, 2, 2),
        model_dim=16, ff_dim=32, num_text_blocks=1, num_visual_blocks=2, axes_dims=(1, 1, 2), visual_cond=False,
    )  # fmt: skip


def _kandinsky5_call(v: Values, length: int) -> dict[str, Any]:
    return {
        "hidden_states": v.normal(1, 1, 8, 8, 16),
        "encoder_hidden_states": v.normal(1, length, 32),
        "pooled_projections": v.normal(1, 32),
        "timestep": v.time(1, 1000),
        "visual_rope_pos": [torch.arange(size) for size in (1, 4, 4)],
        "text_rope_pos": torch.arange(length),
        "scale_factor": [1.0, 1.0, 1.0],
        "sparse_params": None,
    }


def _qwen_image(**options: Any) -> Callable[[], nn.Module]:
    return lambda: diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4), **options,
    )  # fmt: skip


def _qwen_image_call(*shapes: tuple[int, int, int], padded: bool) -> Callable[[Values, int], dict[str, Any]]:
    def call(v: Values, length: int) -> dict[str, Any]:
        room = _ROOM if padded else length
        return {
            "hidden_states": v.normal(1, sum(map(math.prod, shapes)), 16),
            "timestep": v.time(1, 1),
            "encoder_hidden_states": v.normal(1, room, 16),
            "encoder_hidden_states_mask": mask(1, room, length, torch.int64) if padded else None,
            "img_shapes": [list(shapes)],
        }

    return call


def _skyreels() -> nn.Module:
    return diffusers.SkyReelsV2Transformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=32, freq_dim=256, ffn_dim=32, num_layers=2, rope_max_seq_len=32, inject_sample_info=True,
    )  # fmt: skip


def _skyreels_call(v: Values, length: int) -> dict[str, Any]:
    return {
        "hidden_states": v.normal(1, 16, 3, 4, 4),
        "timestep": v.time(1, 1000, torch.int64),
        "encoder_hidden_states": v.normal(1, length, 32),
        "fps": [1],
    }


def _lumina2() -> nn.Module:
    return diffusers.Lumina2Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2), axes_lens=(128, 128, 128),
        cap_feat_dim=32,
    )  # fmt: skip


def _lumina2_call(v: Values, length: int) -> dict[str, Any]:
    return {
        "hidden_states": v.normal(1, 4, 8, 6),
        "timestep": v.time(1, 1, torch.float32),
        "encoder_hidden_states": v.normal(1, _ROOM, 32),
        "encoder_attention_mask": mask(1, _ROOM, length, torch.bool),
    }


def _mochi() -> nn.Module:
    return diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=3, pooled_projection_dim=16,
        in_channels=4, text_embed_dim=16, time_embed_dim=4, max_sequence_length=_ROOM,
    )  # fmt: skip


def _mochi_call(v: Values, length: int) -> dict[str, Any]:
    return {
        "hidden_states": v.normal(2, 4, 2, 8, 8),
        "encoder_hidden_states": v.normal(2, _ROOM, 16),
        "timestep": v.time(2, 1000),
        "encoder_attention_mask": mask(2, _ROOM, length, torch.bool),
    }


def _hunyuan_video15() -> nn.Module:
    return diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=2, num_refiner_layers=1,
        mlp_ratio=2.0, patch_size=1, patch_size_t=1, text_embed_dim=16, text_embed_2_dim=32, image_embed_dim=12,
        rope_axes_dim=(2, 2, 4), target_size=16, task_type="t2v",
    )  # fmt: skip


def _hunyuan_video15_call(v: Values, length: int) -> dict[str, Any]:
    return {
        "hidden_states": v.normal(1, 9, 2, 2, 2),
        "image_embeds": torch.zeros(1, 5, 12, dtype=v.dtype),
        "timestep": v.time(1, 1000),
        "encoder_hidden_states": v.normal(1, _ROOM, 16),
        "encoder_attention_mask": mask(1, _ROOM, length, v.dtype),
        "encoder_hidden_states_2": v.normal(1, 8, 32),
        "encoder_attention_mask_2": mask(1, 8, 2, v.dtype),
    }


def _hunyuan_image() -> nn.Module:
    return diffusers.HunyuanImageTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=8, num_layers=2, num_single_layers=2,
        num_refiner_layers=1, patch_size=(1, 1), guidance_embeds=False, text_embed_dim=32, text_embed_2_dim=32,
        rope_axes_dim=(4, 4),
    )  # fmt: skip


def _hunyuan_image_call(v: Values, length: int) -> dict[str, Any]:
    return {
        "hidden_states": v.normal(1, 4, 8, 8),
        "timestep": v.time(1, 1000),
        "encoder_hidden_states": v.normal(1, _ROOM, 32),
        "encoder_attention_mask": mask(1, _ROOM, length, torch.int64),
        "encoder_hidden_states_2": v.normal(1, 8, 32),
        "encoder_attention_mask_2": mask(1, 8, 2, torch.int64),
    }


def _hidream() -> nn.Module:
    return diffusers.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
        num_attention_heads=4, caption_channels=[32, 16], text_emb_dim=64, num_routed_experts=4,
        num_activated_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(32, 32), llama_layers=(0, 1),
    )  # fmt: skip


def _hidream_call(v: Values, length: int) -> dict[str, Any]:
    return {
        "hidden_states": v.normal(2, 4, 16, 16),
        "timesteps": v.time(2, 1000, torch.float32),
        "encoder_hidden_states_t5": v.normal(2, length, 32),
        "encoder_hidden_states_llama3": v.normal(2, 2, length, 16),
        "pooled_embeds": v.normal(2, 64),
    }


_SQUARE, _REFERENCE = (1, 4, 3), (1, 2, 3)

MODELS = {
    "cogview4": TinyModel(_cogview4, _cogview4_call),
    "glm_image": TinyModel(_glm_image, _glm_image_call),
    "chroma": TinyModel(_chroma, _chroma_call),
    "kandinsky5": TinyModel(_kandinsky5, _kandinsky5_call),
    "qwen_image_masked": TinyModel(_qwen_image(), _qwen_image_call(_SQUARE, padded=True)),
    "qwen_image_edit_2511": TinyModel(
        _qwen_image(zero_cond_t=True), _qwen_image_call(_SQUARE, _REFERENCE, padded=False)
    ),
    "skyreels_v2": TinyModel(_skyreels, _skyreels_call),
    "lumina2": TinyModel(_lumina2, _lumina2_call),
    "mochi": TinyModel(_mochi, _mochi_call),
    "hunyuan_video15": TinyModel(_hunyuan_video15, _hunyuan_video15_call),
    "hunyuan_image": TinyModel(_hunyuan_image, _hunyuan_image_call),
    "hidream": TinyModel(_hidream, _hidream_call),
}
