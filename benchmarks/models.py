"""Diffusion transformers at their published sizes with random weights, and the calls their pipelines make.

`build` needs no checkpoint: parameters are created without storage, then drawn directly on the device, so that a model
of 20 billion parameters is there in seconds. Buffers and rope caches are computed as the constructor does, and dtypes
are those that ``from_pretrained(torch_dtype=...)`` gives: ``_keep_in_fp32_modules`` stay in float32.

Every model has a ``tiny`` size with the same structure, for machines without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

WEIGHT_STD: Final = 0.02
CONTENT_TOKENS: Final = (24, 9)
"""Valid text tokens of the two prompts of a guidance batch, where the text is padded and masked."""


@dataclass(frozen=True)
class Shape:
    """Name one request: pixels, and frames for video.

    ``load`` says what bounds the step: ``launch`` (the GPU waits for the host) or ``compute``.
    """

    load: str
    height: int
    width: int
    frames: int = 1

    @property
    def name(self) -> str:
        """Return the shape as ``height x width``, with frames where there are several."""
        frames = f"x{self.frames}" if self.frames > 1 else ""
        return f"{self.height}x{self.width}{frames}"


@dataclass(frozen=True)
class Call:
    """Hold the arguments of one call of a transformer, split as the pipeline splits them."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, module: Callable[..., Any]) -> Any:
        """Call ``module`` with these arguments."""
        return module(*self.args, **self.kwargs)


class Draw:
    """Draw the inputs of one call from a seed; the values are the same on every device.

    Args:
        device: Where the tensors go.
        dtype: The model's dtype, which latents and text embeddings have.
        seed: Another seed gives other values and the same signature.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(1234 + seed)

    def normal(self, *shape: int) -> torch.Tensor:
        """Return standard normal values in the model's dtype."""
        return torch.randn(*shape, generator=self._generator).to(self.device, self.dtype)

    def time(self, batch: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return one time in [1, 1000) for the whole batch, as ``t.expand(batch)`` does: stride 0 where batch > 1."""
        value = 1 + 998 * torch.rand((), generator=self._generator).item()
        return torch.tensor(value).to(self.device, dtype).expand(batch)

    def mask(self, batch: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a right-padded text mask; the rows of a guidance batch differ in length."""
        lengths = torch.tensor([min(CONTENT_TOKENS[row], tokens) for row in range(batch)])
        return (torch.arange(tokens)[None] < lengths[:, None]).to(self.device, dtype)

    def image_ids(self, height: int, width: int) -> torch.Tensor:
        """Return FLUX's ids of a latent grid, ``[height * width, 3]`` in the model's dtype."""
        ids = torch.zeros(height, width, 3)
        ids[..., 1] += torch.arange(height)[:, None]
        ids[..., 2] += torch.arange(width)[None, :]
        return ids.reshape(-1, 3).to(self.device, self.dtype)


Config = Mapping[str, Any]
Inputs = Callable[[Config, Shape, int, Draw], Call]
"""Make the arguments of one call from the model's config, the shape, the text length and a source of values."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Hold one size of a model: constructor arguments, request shapes and text length in tokens."""

    config: Config
    shapes: tuple[Shape, ...]
    text: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """Describe one diffusion transformer: its diffusers class, its sizes and its pipeline's call."""

    name: str
    title: str
    transformer: str
    published: Size
    tiny: Size
    inputs: Inputs

    def size(self, tiny: bool) -> Size:
        """Return the tiny size or the published one."""
        return self.tiny if tiny else self.published


def _sana_inputs(config: Config, shape: Shape, text: int, draw: Draw) -> Call:
    latents = draw.normal(2, config["in_channels"], shape.height // 32, shape.width // 32)
    kwargs: dict[str, Any] = {
        "encoder_hidden_states": draw.normal(2, text, config["caption_channels"]),
        "encoder_attention_mask": draw.mask(2, text, torch.int64),
        "timestep": draw.time(2) * 1.0,  # the pipeline multiplies by `timestep_scale`, which makes it dense
        "return_dict": False,
        "attention_kwargs": None,
    }
    return Call((latents,), kwargs)


def _sd3_inputs(config: Config, shape: Shape, text: int, draw: Draw) -> Call:
    kwargs: dict[str, Any] = {
        "hidden_states": draw.normal(2, config["in_channels"], shape.height // 8, shape.width // 8),
        "timestep": draw.time(2),
        "encoder_hidden_states": draw.normal(2, text, config["joint_attention_dim"]),
        "pooled_projections": draw.normal(2, config["pooled_projection_dim"]),
        "joint_attention_kwargs": None,
        "return_dict": False,
    }
    return Call((), kwargs)


def _flux_inputs(config: Config, shape: Shape, text: int, draw: Draw) -> Call:
    rows, columns = shape.height // 16, shape.width // 16
    kwargs: dict[str, Any] = {
        "hidden_states": draw.normal(1, rows * columns, config["in_channels"]),
        "timestep": draw.time(1).to(draw.dtype) / 1000,
        "guidance": torch.full([1], 3.5, device=draw.device, dtype=torch.float32).expand(1),
        "pooled_projections": draw.normal(1, config["pooled_projection_dim"]),
        "encoder_hidden_states": draw.normal(1, text, config["joint_attention_dim"]),
        "txt_ids": torch.zeros(text, 3, device=draw.device, dtype=draw.dtype),
        "img_ids": draw.image_ids(rows, columns),
        "joint_attention_kwargs": {},
        "return_dict": False,
    }
    return Call((), kwargs)


def _qwen_inputs(config: Config, shape: Shape, text: int, draw: Draw) -> Call:
    rows, columns = shape.height // 16, shape.width // 16
    kwargs: dict[str, Any] = {
        "hidden_states": draw.normal(1, rows * columns, config["in_channels"]),
        "timestep": draw.time(1).to(draw.dtype) / 1000,
        "guidance": None,
        "encoder_hidden_states_mask": None,  # the pipeline drops a mask of ones, and one prompt has no padding
        "encoder_hidden_states": draw.normal(1, text, config["joint_attention_dim"]),
        "img_shapes": [[(1, rows, columns)]],
        "attention_kwargs": {},
        "return_dict": False,
    }
    return Call((), kwargs)


def _z_image_inputs(config: Config, shape: Shape, text: int, draw: Draw) -> Call:
    latents = draw.normal(1, config["in_channels"], shape.height // 8, shape.width // 8)
    args = (
        list(latents.unsqueeze(2).unbind(dim=0)),
        (1000 - draw.time(1)) / 1000,
        [draw.normal(text, config["cap_feat_dim"])],
    )
    return Call(args, {"joint_attention_kwargs": None, "return_dict": False})


def _wan_inputs(config: Config, shape: Shape, text: int, draw: Draw) -> Call:
    frames = (shape.frames - 1) // 4 + 1
    kwargs: dict[str, Any] = {
        "hidden_states": draw.normal(1, config["in_channels"], frames, shape.height // 8, shape.width // 8),
        "timestep": draw.time(1, torch.int64),
        "encoder_hidden_states": draw.normal(1, text, config["text_dim"]),
        "attention_kwargs": None,
        "return_dict": False,
    }
    return Call((), kwargs)


def _ltx_inputs(config: Config, shape: Shape, text: int, draw: Draw) -> Call:
    frames, rows, columns = (shape.frames - 1) // 8 + 1, shape.height // 32, shape.width // 32
    kwargs: dict[str, Any] = {
        "hidden_states": draw.normal(2, frames * rows * columns, config["in_channels"]),
        "encoder_hidden_states": draw.normal(2, text, config["caption_channels"]),
        "timestep": draw.time(2),
        "encoder_attention_mask": draw.mask(2, text, torch.bool),
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "rope_interpolation_scale": (8 / 25, 32, 32),  # 25 frames a second
        "attention_kwargs": None,
        "return_dict": False,
    }
    return Call((), kwargs)


def _square(launch: int, compute: int) -> tuple[Shape, Shape]:
    return Shape("launch", launch, launch), Shape("compute", compute, compute)


_ALL: Final = (
    Model(
        name="sana",
        title="SANA 1.6B, batch 2",
        transformer="SanaTransformer2DModel",
        published=Size(
            config={"num_layers": 20, "num_attention_heads": 70, "attention_head_dim": 32, "caption_channels": 2304},
            shapes=_square(512, 1024),
            text=300,
        ),
        tiny=Size(
            config={
                "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_attention_heads": 2,
                "attention_head_dim": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 4,
                "cross_attention_dim": 8, "caption_channels": 8, "sample_size": 32,
            },
            shapes=_square(128, 192),
            text=24,
        ),
        inputs=_sana_inputs,
    ),
    Model(
        name="sd35",
        title="SD3.5-medium 2.2B, batch 2",
        transformer="SD3Transformer2DModel",
        published=Size(
            config={
                "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 24, "attention_head_dim": 64,
                "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536,
                "pooled_projection_dim": 2048, "out_channels": 16, "pos_embed_max_size": 384,
                "dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm",
            },
            shapes=_square(512, 1024),
            text=77 + 256,
        ),
        tiny=Size(
            config={
                "sample_size": 32, "patch_size": 2, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8,
                "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32,
                "pooled_projection_dim": 64, "out_channels": 4, "pos_embed_max_size": 96,
                "dual_attention_layers": (0, 1), "qk_norm": "rms_norm",
            },
            shapes=_square(64, 96),
            text=12,
        ),
        inputs=_sd3_inputs,
    ),
    Model(
        name="flux",
        title="FLUX.1-dev 12B",
        transformer="FluxTransformer2DModel",
        published=Size(
            config={
                "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38,
                "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 4096,
                "pooled_projection_dim": 768, "guidance_embeds": True, "axes_dims_rope": (16, 56, 56),
            },
            shapes=(Shape("launch", 256, 256), Shape("launch", 512, 512), Shape("compute", 1024, 1024)),
            text=512,
        ),
        tiny=Size(
            config={
                "patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 2,
                "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32,
                "pooled_projection_dim": 32, "guidance_embeds": True, "axes_dims_rope": (4, 4, 8),
            },
            shapes=_square(64, 96),
            text=12,
        ),
        inputs=_flux_inputs,
    ),
    Model(
        name="qwen",
        title="Qwen-Image 20B",
        transformer="QwenImageTransformer2DModel",
        published=Size(
            config={
                "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 60, "attention_head_dim": 128,
                "num_attention_heads": 24, "joint_attention_dim": 3584, "guidance_embeds": False,
                "axes_dims_rope": (16, 56, 56),
            },
            shapes=_square(512, 1024),
            text=64,
        ),
        tiny=Size(
            config={
                "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
                "num_attention_heads": 3, "joint_attention_dim": 16, "guidance_embeds": False,
                "axes_dims_rope": (8, 4, 4),
            },
            shapes=_square(64, 96),
            text=12,
        ),
        inputs=_qwen_inputs,
    ),
    Model(
        name="z_image",
        title="Z-Image-Turbo 6B",
        transformer="ZImageTransformer2DModel",
        published=Size(
            config={
                "all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 16, "dim": 3840, "n_layers": 30,
                "n_refiner_layers": 2, "n_heads": 30, "n_kv_heads": 30, "norm_eps": 1e-5, "qk_norm": True,
                "cap_feat_dim": 2560, "rope_theta": 256.0, "t_scale": 1000.0, "axes_dims": [32, 48, 48],
                "axes_lens": [1536, 512, 512],
            },
            shapes=_square(512, 1024),
            text=50,
        ),
        tiny=Size(
            config={
                "all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 16, "dim": 32, "n_layers": 2,
                "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "norm_eps": 1e-5, "qk_norm": True,
                "cap_feat_dim": 16, "rope_theta": 256.0, "t_scale": 1000.0, "axes_dims": [8, 4, 4],
                "axes_lens": [256, 32, 32],
            },
            shapes=_square(64, 96),
            text=13,
        ),
        inputs=_z_image_inputs,
    ),
    Model(
        name="wan",
        title="Wan 2.1 1.3B",
        transformer="WanTransformer3DModel",
        published=Size(
            config={
                "patch_size": (1, 2, 2), "num_attention_heads": 12, "attention_head_dim": 128, "in_channels": 16,
                "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 8960, "num_layers": 30,
                "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024,
            },
            shapes=(Shape("launch", 480, 832, 5), Shape("compute", 480, 832, 17)),
            text=512,
        ),
        tiny=Size(
            config={
                "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16,
                "out_channels": 16, "text_dim": 32, "freq_dim": 256, "ffn_dim": 32, "num_layers": 2,
                "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32,
            },
            shapes=(Shape("launch", 64, 64, 5), Shape("compute", 64, 96, 9)),
            text=16,
        ),
        inputs=_wan_inputs,
    ),
    Model(
        name="ltx",
        title="LTX-Video 2B, batch 2",
        transformer="LTXVideoTransformer3DModel",
        published=Size(
            config={
                "in_channels": 128, "out_channels": 128, "patch_size": 1, "patch_size_t": 1,
                "num_attention_heads": 32, "attention_head_dim": 64, "cross_attention_dim": 2048, "num_layers": 28,
                "caption_channels": 4096,
            },
            shapes=(Shape("launch", 512, 768, 25), Shape("compute", 512, 768, 97)),
            text=128,
        ),
        tiny=Size(
            config={
                "in_channels": 8, "out_channels": 8, "patch_size": 1, "patch_size_t": 1, "num_attention_heads": 4,
                "attention_head_dim": 8, "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 32,
            },
            shapes=(Shape("launch", 64, 64, 9), Shape("compute", 64, 96, 17)),
            text=24,
        ),
        inputs=_ltx_inputs,
    ),
)  # fmt: skip

MODELS: Final[dict[str, Model]] = {model.name: model for model in _ALL}


@dataclass(frozen=True)
class Built:
    """Hold a model that stands on a device, and make its calls."""

    model: Model
    module: nn.Module
    device: torch.device
    dtype: torch.dtype
    tiny: bool

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of this size of the model."""
        return self.model.size(self.tiny).shapes

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def call(self, shape: Shape, seed: int = 0) -> Call:
        """Make the arguments that the pipeline would pass for ``shape``; the seed changes values only."""
        config: Config = self.module.config  # type: ignore[assignment]  # what diffusers registered
        draw = Draw(self.device, self.dtype, seed)
        return self.model.inputs(config, shape, self.model.size(self.tiny).text, draw)


def build(
    name: str,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tiny: bool = False,
    seed: int = 0,
    **overrides: Any,
) -> Built:
    """Build a transformer with random weights.

    Args:
        name: A key of `MODELS`.
        device: Where the weights are drawn.
        dtype: What ``from_pretrained`` would be given as ``torch_dtype``.
        tiny: Take the tiny size.
        seed: Seed of the weights.
        **overrides: Constructor arguments that differ from the size's.

    Returns:
        The model in evaluation mode, without gradients.

    Raises:
        KeyError: No model has this name; the message lists those there are.
    """
    import diffusers  # heavy, and the rest of this file describes models without it
    from accelerate import init_empty_weights

    if name not in MODELS:
        raise KeyError(f"unknown model {name!r}: choose from {', '.join(MODELS)}")
    model = MODELS[name]
    constructor = getattr(diffusers, model.transformer)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as from_pretrained does: it is the dtype of what a constructor leaves open
    try:
        with init_empty_weights(include_buffers=False):
            module: nn.Module = constructor(**{**model.size(tiny).config, **overrides})
    finally:
        torch.set_default_dtype(previous)
    device = torch.device(device)
    _materialise(module, device, dtype, seed)
    return Built(model, module.eval().requires_grad_(False), device, dtype, tiny)


def _materialise(module: nn.Module, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Give every parameter storage and random values on ``device``, and move the buffers there."""
    keep = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    generator = torch.Generator(device).manual_seed(seed)

    def dtype_of(path: str, tensor: torch.Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        return torch.float32 if keep & set(path.split(".")) else dtype

    for prefix, submodule in module.named_modules():
        for name, parameter in list(submodule._parameters.items()):
            if parameter is None:
                continue
            path = f"{prefix}.{name}"
            values = torch.empty(parameter.shape, dtype=dtype_of(path, parameter), device=device)
            _fill(name, values, generator)
            submodule._parameters[name] = nn.Parameter(values, requires_grad=False)
        for name, buffer in list(submodule._buffers.items()):
            if buffer is None:
                continue
            # A persistent buffer comes out of the checkpoint and is cast; another keeps what the constructor made.
            cast = (
                buffer.dtype if name in submodule._non_persistent_buffers_set else dtype_of(f"{prefix}.{name}", buffer)
            )
            submodule._buffers[name] = buffer.to(device, cast)


def _fill(name: str, values: torch.Tensor, generator: torch.Generator) -> None:
    """Draw one parameter: about 1 for the scale of a norm, else about 0, never constant, which would hide errors."""
    centre = 1.0 if name == "weight" and values.ndim == 1 else 0.0
    # The narrow layers of a tiny model need larger weights, or its blocks would add next to nothing to their input.
    fan_in = math.prod(values.shape[1:]) if values.ndim > 1 else 0
    std = max(WEIGHT_STD, 1 / math.sqrt(fan_in)) if fan_in else WEIGHT_STD
    values.normal_(centre, std, generator=generator)
