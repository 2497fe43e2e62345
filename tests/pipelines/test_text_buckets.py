"""Text buckets: padding changes nothing, whatever lies in it, where bcg pads, and few graphs serve all lengths."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.pipelines import TextBuckets, TextInputs, TextStream, family_of, runners_of, wrap_pipeline
from bcg.pipelines.tiny_registry import TINY

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

TOLERANCE = 1e-6  # relative, in float32: another length is another blocking of the same sums
PROMPT = "a red fox in the snow"
Arguments = dict[str, Any]

# -- what padding does to a denoiser -----------------------------------------------------------------------------------


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def difference(module: nn.Module, one: tuple[Any, Arguments], other: tuple[Any, Arguments]) -> float:
    """The largest relative distance between the results of two calls."""
    with torch.no_grad():
        results, others = (tensors(module(*args, **kwargs)) for args, kwargs in (one, other))
    return max(float((b - a).norm() / a.norm()) for a, b in zip(results, others, strict=True))


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
        length = tensors(kwargs[stream.names[0]])[0].shape[stream.dim]
        assert tensors(longer[stream.names[0]])[0].shape[stream.dim] > length, "the test must pad"
        longer.update({name: refilled(longer[name], stream.dim, length) for name in stream.names})
    return longer_args, longer


def check_exact(pipeline: str, module: nn.Module, args: Any, kwargs: Arguments) -> None:
    text = family_of(getattr(diffusers, pipeline)).text
    assert text is not None
    buckets = [tensors(kwargs[stream.names[0]])[0].shape[stream.dim] + 24 for stream in text.streams]
    given = {name: id(value) for name, value in kwargs.items()}
    prepare = TextBuckets(text, buckets, module)
    assert difference(module, (args, kwargs), padded_with_noise(text, prepare, args, kwargs)) <= TOLERANCE
    assert {name: id(value) for name, value in kwargs.items()} == given, "the caller's arguments are left alone"
    # The text counts, or padding it would prove nothing.
    first = text.streams[0]
    changed = {**kwargs, **{name: refilled(kwargs[name], first.dim, 0, 2) for name in first.names}}
    assert difference(module, (args, kwargs), (args, changed)) > 100 * TOLERANCE


# -- denoiser calls of real pipelines ----------------------------------------------------------------------------------

EXACT = [name for name in TINY if family_of(type(TINY[name].pipeline_class, (), {})).text_reason is None]
INEXACT = [name for name in TINY if name not in EXACT]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    folders: dict[str, Path] = {}

    def load(name: str) -> Any:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            TINY[name].build(folders[name])
        pipe = TINY[name].load(folders[name])
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return load


def draw(pipe: Any, name: str, prompt: str, **more: Any) -> Tensor:
    call = {**TINY[name].example_call(prompt=prompt, seed=1), **more}
    return torch.as_tensor(pipe(**call, return_dict=False)[0])


def recorded_call(pipe: Any, name: str, prompt: str = PROMPT) -> tuple[Any, Arguments]:
    """The arguments of the first call of the denoiser."""
    calls: list[tuple[Any, Arguments]] = []
    handle = pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, dict(kwargs))), with_kwargs=True
    )
    draw(pipe, name, prompt)
    handle.remove()
    return calls[0]


def test_recipes_and_reasons_are_those_that_were_measured() -> None:
    assert set(INEXACT) >= {"stable_diffusion_3", "z_image", "chroma", "cogview4", "wan", "cogvideox", "kandinsky5"}
    assert set(EXACT) >= {"flux", "flux2_klein", "qwen_image", "bria_fibo", "ernie_image", "lumina2", "ltx2", "mochi"}


@pytest.mark.parametrize("name", EXACT)
def test_padding_a_real_call_changes_nothing(load: Callable[[str], Any], name: str) -> None:
    pipe = load(name)
    args, kwargs = recorded_call(pipe, name)
    check_exact(TINY[name].pipeline_class, pipe.transformer, args, kwargs)


@pytest.mark.parametrize("name", ["stable_diffusion_3", "z_image", "wan", "cogview4", "kandinsky5"])
def test_where_bcg_does_not_pad_padding_would_change_the_result(load: Callable[[str], Any], name: str) -> None:
    pipe = load(name)
    args, kwargs = recorded_call(pipe, name)
    if name == "z_image":  # (latents, timestep, captions)
        longer = [torch.cat([caption, caption.new_zeros(32, caption.shape[1])]) for caption in args[2]]
        changed = ((*args[:2], longer), kwargs)
    else:
        text = kwargs["encoder_hidden_states"]
        changed = (args, {**kwargs, "encoder_hidden_states": nn.functional.pad(text, (0, 0, 0, 16))})
        if "text_rope_pos" in kwargs:
            changed[1]["text_rope_pos"] = torch.arange(text.shape[1] + 16)
    assert difference(pipe.transformer, (args, kwargs), changed) > 10 * TOLERANCE


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


@pytest.mark.parametrize("make", OTHERS, ids=[make.__name__ for make in OTHERS])
def test_padding_another_family_changes_nothing(make: Callable[[], tuple[str, nn.Module, Arguments]]) -> None:
    pipeline, module, call = make()
    check_exact(pipeline, module, (), call)


# -- few graphs for all lengths ----------------------------------------------------------------------------------------

BUCKETS = (32, 64, 160)
SHORT, MIDDLE, LONG = "a fox", "a red fox in the snow, drawn in ink on old paper", "a red fox in the snow " * 4
NEW_PROMPTS = (
    "a cat",
    "an owl",
    "one ripe fig",
    "a small blue boat on a lake at dawn, in the fog",
    "a green car " * 6,
    "x",
)


@pytest.mark.parametrize("name", ["qwen_image", "qwen_image_edit", "bria_fibo", "ernie_image"])
def test_prompts_of_new_lengths_replay_as_eager_with_padded_arguments(load: Callable[[str], Any], name: str) -> None:
    plain, eager, pipe = load(name), load(name), load(name)
    wrap_pipeline(eager, text_buckets=BUCKETS)
    wrap_pipeline(pipe, text_buckets=BUCKETS)
    with bcg.warmup():
        for prompt in (SHORT, MIDDLE, LONG):
            draw(pipe, name, prompt)
    before = pipe.transformer.stats
    assert before.captures <= len(BUCKETS)
    for prompt in NEW_PROMPTS[: 3 if name == "qwen_image_edit" else None]:  # it encodes a picture each time
        result = draw(pipe, name, prompt)
        assert torch.equal(result, draw(eager, name, prompt)), prompt
        without = draw(plain, name, prompt)
        assert float((result - without).norm() / without.norm()) < 10 * TOLERANCE, prompt  # guidance and steps add up
    now = pipe.transformer.stats
    assert now.replays - before.replays == now.calls - before.calls
    assert now.captures == before.captures
    assert eager.transformer.stats.replays == 0


def test_short_embeddings_of_a_fixed_length_family_replay_too(load: Callable[[str], Any]) -> None:
    pipe = wrap_pipeline(load("flux"), text_buckets=BUCKETS)
    eager = wrap_pipeline(load("flux"), text_buckets=BUCKETS)
    with bcg.warmup():
        draw(pipe, "flux", PROMPT, max_sequence_length=32)
    before = pipe.transformer.stats
    for length in (20, 30, 32):
        result = draw(pipe, "flux", PROMPT, max_sequence_length=length)
        assert torch.equal(result, draw(eager, "flux", PROMPT, max_sequence_length=length))
    now = pipe.transformer.stats
    assert now.replays - before.replays == now.calls - before.calls == 12


@pytest.mark.parametrize("name", ["sana", "pixart_sigma", "ltx", "hunyuan_video"])
def test_a_fixed_length_with_a_mask_goes_to_a_bucket_too(load: Callable[[str], Any], name: str) -> None:
    pipe, eager = (wrap_pipeline(load(name), text_buckets=(320,)) for _ in range(2))
    with bcg.warmup():
        draw(pipe, name, SHORT)
    before = pipe.transformer.stats
    for prompt in (MIDDLE, LONG):
        result = draw(pipe, name, prompt)
        assert torch.equal(result, draw(eager, name, prompt))
        without = draw(load(name), name, prompt)
        assert float((result - without).norm() / without.norm()) < 10 * TOLERANCE
    now = pipe.transformer.stats
    assert now.replays - before.replays == now.calls - before.calls


def test_no_mask_and_masks_of_ones_are_one_signature(load: Callable[[str], Any]) -> None:
    pipe = load("qwen_image")
    _, call = recorded_call(pipe, "qwen_image")
    ones = torch.ones(call["encoder_hidden_states"].shape[:2])
    runner = wrap_pipeline(pipe, text_buckets=BUCKETS).transformer
    with torch.no_grad(), bcg.warmup():
        first = runner(**{**call, "encoder_hidden_states_mask": None})[0]
    for given in (ones, ones.bool(), ones.long()):
        with torch.no_grad():
            assert torch.equal(runner(**{**call, "encoder_hidden_states_mask": given})[0], first)
    assert (runner.stats.captures, runner.stats.replays) == (1, 3)


def test_buckets_are_off_by_default(load: Callable[[str], Any]) -> None:
    pipe = wrap_pipeline(load("qwen_image"))
    with bcg.warmup():
        draw(pipe, "qwen_image", SHORT)
    assert torch.equal(draw(pipe, "qwen_image", MIDDLE), draw(load("qwen_image"), "qwen_image", MIDDLE))


@pytest.mark.parametrize("name", INEXACT)
def test_without_a_recipe_buckets_are_ignored_with_the_reason(
    load: Callable[[str], Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = load(name)
    with caplog.at_level(logging.WARNING, "bcg"):
        wrap_pipeline(pipe, text_buckets=BUCKETS)
    reason = family_of(pipe).text_reason
    assert reason is not None and reason in caplog.text
    assert all(runner._self_prepare is None for runner in runners_of(pipe).values())


def test_only_denoisers_are_padded(load: Callable[[str], Any]) -> None:
    pipe = wrap_pipeline(load("qwen_image"), components=("transformer", "text_encoder"), text_buckets=BUCKETS)
    runners = runners_of(pipe)
    assert isinstance(runners["transformer"]._self_prepare, TextBuckets)
    assert runners["text_encoder"]._self_prepare is None


@pytest.mark.parametrize("buckets", [(), (0, 64), (64.0,), (True,), ("64",)])
def test_bad_buckets_are_clear_errors(load: Callable[[str], Any], buckets: Any) -> None:
    with pytest.raises(bcg.ConfigError, match=r"text_buckets=.*lengths in tokens"):
        wrap_pipeline(load("qwen_image"), text_buckets=buckets)


# -- the layer alone ---------------------------------------------------------------------------------------------------


class Denoiser(nn.Module):
    """Takes whatever the tests below pass."""

    def forward(
        self, hidden_states: Any, text: Any = None, more: Any = None, mask: Any = None, extra: Any = None
    ) -> Any:
        return hidden_states


def prepare(*names: str, buckets: tuple[int, ...] = (8, 16), **stream: Any) -> TextBuckets:
    text = TextInputs(streams=(TextStream(names=names or ("text",), **stream),))
    return TextBuckets(text, buckets, Denoiser())


LATENTS = torch.ones(2, 4, 3)


@pytest.mark.parametrize(("length", "bucket"), [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 17)])
def test_text_goes_to_the_next_bucket_and_stays_beyond_the_last(length: int, bucket: int) -> None:
    args, kwargs = prepare(mask="mask", buckets=(16, 8, 8))((LATENTS,), {"text": torch.ones(2, length, 5)})
    assert kwargs["text"].shape == (2, bucket, 5)
    assert kwargs["mask"].dtype == torch.bool
    assert kwargs["mask"].sum(1).tolist() == [length, length]
    assert args[0] is LATENTS


def test_what_is_given_by_position_is_padded_in_its_place() -> None:
    args, kwargs = prepare(mask="mask")((LATENTS, torch.ones(2, 5, 3)), {"extra": 1})
    assert args[1].shape == (2, 8, 3)
    assert set(kwargs) == {"extra", "mask"}


def test_a_given_mask_keeps_its_content() -> None:
    given = torch.tensor([[1, 1, 0], [1, 0, 1]])
    _, kwargs = prepare(mask="mask")((), {"hidden_states": LATENTS, "text": torch.ones(2, 3, 5), "mask": given})
    assert kwargs["mask"].tolist() == [[True, True, False] + [False] * 5, [True, False, True] + [False] * 5]


def test_a_mask_over_the_image_gets_its_zeros_between_text_and_image() -> None:
    layer = prepare(mask="extra.attention_mask", covers_image=True)
    call = {"hidden_states": LATENTS, "text": torch.ones(2, 6, 5)}
    _, kwargs = layer((), {**call, "extra": {"scale": 0.5}})
    assert kwargs["extra"]["scale"] == 0.5
    assert kwargs["extra"]["attention_mask"].shape == (2, 1, 1, 12)
    assert kwargs["extra"]["attention_mask"][0, 0, 0].tolist() == [True] * 6 + [False] * 2 + [True] * 4
    again = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    _, kwargs = layer((), {**call, "extra": {"attention_mask": again}})
    assert kwargs["extra"]["attention_mask"][1, 0, 0].tolist() == [True] * 6 + [False] * 2 + [True] * 4


def test_lists_are_padded_item_by_item() -> None:
    _, kwargs = prepare("text", "more")((LATENTS,), {"text": torch.ones(2, 6, 5), "more": [torch.ones(2, 6, 1)] * 3})
    assert [tensor.shape for tensor in kwargs["more"]] == [(2, 8, 1)] * 3


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"text": None},
        {"text": "a fox"},
        {"text": torch.ones(5)},
        {"text": torch.ones(2, 5, 3), "more": torch.ones(6, 3)},
        {"text": torch.ones(2, 5, 3), "mask": torch.ones(2, 1, 9)},
    ],
    ids=["no text", "none", "a string", "one dimension", "other lengths", "a mask of another form"],
)
def test_a_call_of_another_form_is_left_as_it_is(call: Arguments) -> None:
    _, kwargs = prepare("text", "more", mask="mask")((), {"hidden_states": LATENTS, **call})
    assert kwargs.keys() == {"hidden_states", *call}
    assert all(kwargs[name] is value for name, value in call.items())
