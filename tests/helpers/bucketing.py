"""Calls of denoisers whose text can be padded exactly, and what padding does to them, on any device and dtype."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import diffusers
import torch
from torch import Tensor, nn

import bcg
from bcg.pipelines import TextBuckets, TextInputs, family_of
from bcg.pipelines.tiny_registry import TINY

Arguments = dict[str, Any]

EXACT: Final = [name for name in TINY if family_of(type(TINY[name].pipeline_class, (), {})).text_reason is None]
"""The tiny pipelines whose text is padded."""
MORE_TOKENS: Final = 24
"""By how much a bucket is longer than the text."""
PROMPT: Final = "a red fox in the snow"


@dataclass(frozen=True)
class Padding:
    """How far a padded result in bfloat16 is from others; relative distances, the largest of all outputs.

    Attributes:
        pipeline: The pipeline's class.
        text: Tokens of each stream of text.
        buckets: Tokens that it was padded to.
        from_unpadded: From the result without padding, in bfloat16 as well; noise lay in the padding.
        bfloat16_itself: Of the result without padding in bfloat16 from that in float32, of the same weights.
    """

    pipeline: str
    text: tuple[int, ...]
    buckets: tuple[int, ...]
    from_unpadded: float
    bfloat16_itself: float


def padding_of_a_pipeline(name: str, folder: Path, device: str) -> Padding:
    """Measure the first call of a tiny pipeline's denoiser; see `padding_by_graph`.

    Args:
        name: Its key in `TINY`.
        folder: Where its checkpoint is written.
        device: Where it runs.
    """
    TINY[name].build(folder)
    pipe = TINY[name].load(folder, torch_dtype=torch.bfloat16)
    pipe.to(device)
    pipe.set_progress_bar_config(disable=True)
    args, kwargs = recorded_call(pipe, name, device, torch.bfloat16)
    return padding_by_graph(TINY[name].pipeline_class, pipe.transformer, args, kwargs)


def padding_of_a_denoiser(make: Callable[[], tuple[str, nn.Module, Arguments]], device: str) -> Padding:
    """Measure a call of a denoiser without a tiny pipeline; see `padding_by_graph`.

    Args:
        make: One of `OTHERS`.
        device: Where it runs.
    """
    pipeline, module, kwargs = make()
    given = converted(arguments_in_bfloat16(kwargs), lambda tensor: tensor.to(device))
    return padding_by_graph(pipeline, in_bfloat16(module).to(device), (), given)


def padding_by_graph(pipeline: str, module: nn.Module, args: Any, kwargs: Arguments) -> Padding:
    """Pad a call's text by a runner, check that its graph gives what eager gives for the padded call, and measure.

    Args:
        pipeline: The pipeline's class.
        module: Its denoiser, in bfloat16.
        args: Positional arguments of a call, where the module is.
        kwargs: Keyword arguments of it.
    """
    text = text_of(pipeline)
    lengths = tuple(length_of(kwargs, stream) for stream in text.streams)
    buckets = tuple(length + MORE_TOKENS for length in lengths)
    prepare = TextBuckets(text, buckets, module)
    noisy = padded_with_noise(text, prepare, args, kwargs)
    runner = bcg.wrap(module, prepare=prepare)
    with torch.no_grad():
        assert runner.capture(*args, **kwargs), runner.explain(*args, **kwargs)
        for given, padded in (((args, kwargs), prepare(args, kwargs)), (noisy, noisy)):
            before = runner.stats.replays
            got, want = runner(*given[0], **given[1]), module(*padded[0], **padded[1])
            assert runner.stats.replays == before + 1, runner.explain(*given[0], **given[1])
            assert all(map(torch.equal, tensors(got), tensors(want))), "a graph gives something else than eager"
    wide = tuple(as_float32(value) for value in (args, kwargs))
    return Padding(
        pipeline=pipeline,
        text=lengths,
        buckets=buckets,
        from_unpadded=difference(module, (args, kwargs), noisy),
        bfloat16_itself=distance(called(copy.deepcopy(module).float(), *wide), called(module, args, kwargs)),
    )


def text_of(pipeline: str) -> TextInputs:
    """The text inputs of a family that pads."""
    text = family_of(getattr(diffusers, pipeline)).text
    assert text is not None and text.is_exact
    return text


def length_of(kwargs: Arguments, stream: Any) -> int:
    """Tokens of a stream of text."""
    return int(tensors(kwargs[stream.names[0]])[0].shape[stream.dim])


def recorded_call(
    pipe: Any, name: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Any, Arguments]:
    """The arguments of the first call of a tiny pipeline's denoiser."""
    calls: list[tuple[Any, Arguments]] = []
    handle = pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, dict(kwargs))), with_kwargs=True
    )
    pipe(**TINY[name].example_call(prompt=PROMPT, seed=1, device=device, dtype=dtype), return_dict=False)
    handle.remove()
    return calls[0]


def in_bfloat16(module: nn.Module) -> nn.Module:
    """A copy of a diffusers model as it is when it is loaded in bfloat16: some weights stay in float32."""
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)  # type: ignore[operator]
        loaded: nn.Module = type(module).from_pretrained(folder, torch_dtype=torch.bfloat16)  # type: ignore[attr-defined]
    return loaded.requires_grad_(False)


def as_float32(value: Any) -> Any:
    """The same nested arguments with bfloat16 tensors in float32."""
    return converted(value, lambda tensor: tensor.float() if tensor.dtype == torch.bfloat16 else tensor)


def arguments_in_bfloat16(kwargs: Arguments) -> Arguments:
    """Arguments of a denoiser as its pipeline passes them in bfloat16; positions are left as they are."""
    starts = ("hidden_states", "encoder_hidden_states", "timestep")
    chosen = [name for name in kwargs if name.startswith(starts) and kwargs[name].is_floating_point()]
    return {**kwargs, **{name: kwargs[name].bfloat16() for name in chosen}}


def converted(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested arguments with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: converted(item, change) for key, item in value.items()}
    return type(value)(converted(item, change) for item in value) if isinstance(value, (list, tuple)) else value


# -- what padding does to a denoiser -----------------------------------------------------------------------------------


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def called(module: nn.Module, args: Any, kwargs: Arguments) -> list[Tensor]:
    with torch.no_grad():
        return tensors(module(*args, **kwargs))


def distance(results: list[Tensor], others: list[Tensor]) -> float:
    """The largest relative distance of other results, tensor by tensor."""
    pairs = [(one.double(), other.double()) for one, other in zip(results, others, strict=True)]
    return max(float((other - one).norm() / one.norm()) for one, other in pairs)


def difference(module: nn.Module, one: tuple[Any, Arguments], other: tuple[Any, Arguments]) -> float:
    """The largest relative distance between the results of two calls."""
    return distance(called(module, *one), called(module, *other))


def refilled(value: Any, dim: int, start: int, count: int | None = None) -> Any:
    """The same tensors with noise in the rows from ``start``."""
    if isinstance(value, (list, tuple)):
        return type(value)(refilled(item, dim, start, count) for item in value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    result = value.clone()
    result.narrow(dim, start, value.shape[dim] - start if count is None else count).normal_(std=3.0)
    return result


def padded_with_noise(text: TextInputs, prepare: TextBuckets, args: Any, kwargs: Arguments) -> tuple[Any, Arguments]:
    longer_args, longer = prepare(args, kwargs)
    for stream in text.streams:
        length = length_of(kwargs, stream)
        assert length_of(longer, stream) > length, "the test must pad"
        longer.update({name: refilled(longer[name], stream.dim, length) for name in stream.names})
    return longer_args, longer


# -- denoisers without a tiny pipeline ---------------------------------------------------------------------------------


def noise(*shape: int) -> Tensor:
    return torch.randn(shape)


def mask(length: int, valid: int, batch: int = 1, dtype: torch.dtype = torch.int64) -> Tensor:
    return (torch.arange(length) < valid).to(dtype).expand(batch, -1)


def built(kind: str, **config: Any) -> nn.Module:
    module: nn.Module = getattr(diffusers, kind)(**config).eval().requires_grad_(False)
    for parameter in module.parameters():
        if not parameter.any():  # a projection that begins at zero would hide the text
            parameter.normal_(std=0.05)
    return module


def flux2() -> tuple[str, nn.Module, Arguments]:
    module = built(
        "Flux2Transformer2DModel", patch_size=1, in_channels=16, num_layers=1, num_single_layers=1,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16, axes_dims_rope=[4, 4, 4, 4],
    )  # fmt: skip
    ids = torch.randint(0, 9, (1, 11, 4))
    call = {"hidden_states": noise(1, 6, 16), "encoder_hidden_states": noise(1, 5, 16), "img_ids": ids[:, :6]}
    more = {"txt_ids": ids[:, 6:], "timestep": torch.tensor([0.5]), "guidance": torch.tensor([4.0])}
    return "Flux2Pipeline", module, {**call, **more, "joint_attention_kwargs": None}


def ovis() -> tuple[str, nn.Module, Arguments]:
    module = built(
        "OvisImageTransformer2DModel", patch_size=1, in_channels=16, num_layers=1, num_single_layers=1,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    call = {"hidden_states": noise(1, 6, 16), "encoder_hidden_states": noise(1, 5, 32), "timestep": torch.tensor([0.5])}
    return "OvisImagePipeline", module, {**call, "img_ids": noise(6, 3), "txt_ids": torch.zeros(5, 3)}


def krea2() -> tuple[str, nn.Module, Arguments]:
    module = built(
        "Krea2Transformer2DModel", in_channels=16, num_layers=1, attention_head_dim=16, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=32, timestep_embed_dim=16, text_hidden_dim=16, num_text_layers=3,
        text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=32,
        num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    call = {"hidden_states": noise(1, 6, 16), "encoder_hidden_states": noise(1, 5, 3, 16)}
    more = {"timestep": torch.tensor([0.5]), "position_ids": torch.randint(0, 9, (11, 3)).float()}
    return "Krea2Pipeline", module, {**call, **more, "encoder_attention_mask": mask(5, 4, dtype=torch.bool)}


def sana_video() -> tuple[str, nn.Module, Arguments]:
    module = built(
        "SanaVideoTransformer3DModel", in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=12,
        num_layers=1, num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24,
        caption_channels=8, sample_size=8, patch_size=(1, 2, 2), qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    call = {"hidden_states": noise(2, 16, 2, 4, 4), "encoder_hidden_states": noise(2, 12, 8)}
    more = {"timestep": torch.tensor([500, 500]), "encoder_attention_mask": mask(12, 9, 2)}
    return "SanaVideoPipeline", module, {**call, **more}


def hunyuan_image() -> tuple[str, nn.Module, Arguments]:
    module = built(
        "HunyuanImageTransformer2DModel", in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=8,
        num_layers=1, num_single_layers=1, num_refiner_layers=1, patch_size=(1, 1), guidance_embeds=False,
        text_embed_dim=32, text_embed_2_dim=32, rope_axes_dim=(4, 4),
    )  # fmt: skip
    call = {"hidden_states": noise(1, 4, 8, 8), "timestep": torch.tensor([500.0])}
    text = {"encoder_hidden_states": noise(1, 12, 32), "encoder_attention_mask": mask(12, 9)}
    glyphs = {"encoder_hidden_states_2": noise(1, 8, 32), "encoder_attention_mask_2": mask(8, 2)}
    return "HunyuanImagePipeline", module, {**call, **text, **glyphs}


def motif() -> tuple[str, nn.Module, Arguments]:
    module = built(
        "MotifVideoTransformer3DModel", in_channels=33, out_channels=16, num_attention_heads=2, attention_head_dim=12,
        num_layers=1, num_single_layers=1, mlp_ratio=4.0, patch_size=1, patch_size_t=1, qk_norm="rms_norm",
        text_embed_dim=32, rope_axes_dim=(4, 4, 4),
    )  # fmt: skip
    call = {"hidden_states": noise(1, 33, 2, 4, 4), "timestep": torch.tensor([500.0])}
    text = {"encoder_hidden_states": noise(1, 12, 32), "encoder_attention_mask": mask(12, 9, dtype=torch.bool)}
    return "MotifVideoPipeline", module, {**call, **text}


def allegro() -> tuple[str, nn.Module, Arguments]:
    module = built(
        "AllegroTransformer3DModel", num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        num_layers=1, cross_attention_dim=24, sample_width=8, sample_height=8, sample_frames=8, caption_channels=24,
    )  # fmt: skip
    angles = torch.outer(torch.arange(4.0), torch.ones(4))
    positions = torch.cartesian_prod(*[torch.arange(4)] * 3)
    rotary = ((angles.cos(), angles.sin()),) * 3, tuple(positions[None, :, axis] for axis in range(3))
    call = {"hidden_states": noise(2, 4, 4, 8, 8), "timestep": torch.tensor([500.0, 500.0]), "image_rotary_emb": rotary}
    text = {"encoder_hidden_states": noise(2, 1, 12, 24), "encoder_attention_mask": mask(12, 9, 2)}
    return "AllegroPipeline", module, {**call, **text, "return_dict": False}


def prx() -> tuple[str, nn.Module, Arguments]:
    module = built(
        "PRXTransformer2DModel", patch_size=1, in_channels=4, context_in_dim=8, hidden_size=8, mlp_ratio=2.0,
        num_heads=2, depth=2, axes_dim=[2, 2],
    )  # fmt: skip
    call = {"hidden_states": noise(2, 4, 8, 8), "timestep": torch.tensor([0.5, 0.5])}
    text = {"encoder_hidden_states": noise(2, 12, 8), "attention_mask": mask(12, 9, 2, torch.bool)}
    return "PRXPipeline", module, {**call, **text}


def cosmos() -> tuple[str, nn.Module, Arguments]:
    module = built(
        "CosmosTransformer3DModel", in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16,
        num_layers=2, mlp_ratio=2, text_embed_dim=32, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2),
        rope_scale=(2.0, 1.0, 1.0), concat_padding_mask=False, extra_pos_embed_type="learnable",
    )  # fmt: skip
    call = {"hidden_states": noise(1, 4, 2, 4, 4), "timestep": torch.tensor([0.5]), "fps": 30}
    return "CosmosTextToWorldPipeline", module, {**call, "encoder_hidden_states": noise(1, 12, 32)}


OTHERS = [flux2, ovis, krea2, sana_video, hunyuan_image, motif, allegro, prx, cosmos]
