"""Text buckets: padding changes nothing, whatever lies in it, where bcg pads, and few graphs serve all lengths."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.pipelines import TextBuckets, TextInputs, TextStream, family_of, runners_of, wrap_pipeline
from bcg.pipelines.tiny_registry import TINY

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from bucketing import (
    EXACT,
    MORE_TOKENS,
    OTHERS,
    PROMPT,
    Arguments,
    difference,
    length_of,
    padded_with_noise,
    padding_of_a_denoiser,
    padding_of_a_pipeline,
    recorded_call,
    refilled,
    text_of,
)

TOLERANCE = 1e-6  # relative, in float32: another length is another blocking of the same sums


def check_exact(pipeline: str, module: nn.Module, args: Any, kwargs: Arguments) -> None:
    text = text_of(pipeline)
    buckets = [length_of(kwargs, stream) + MORE_TOKENS for stream in text.streams]
    given = {name: id(value) for name, value in kwargs.items()}
    prepare = TextBuckets(text, buckets, module)
    assert difference(module, (args, kwargs), padded_with_noise(text, prepare, args, kwargs)) <= TOLERANCE
    assert {name: id(value) for name, value in kwargs.items()} == given, "the caller's arguments are left alone"
    # The text counts, or padding it would prove nothing.
    first = text.streams[0]
    changed = {**kwargs, **{name: refilled(kwargs[name], first.dim, 0, 2) for name in first.names}}
    assert difference(module, (args, kwargs), (args, changed)) > 100 * TOLERANCE


# -- denoiser calls of real pipelines ----------------------------------------------------------------------------------

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


@pytest.mark.parametrize("make", OTHERS, ids=[make.__name__ for make in OTHERS])
def test_padding_another_family_changes_nothing(make: Callable[[], tuple[str, nn.Module, Arguments]]) -> None:
    pipeline, module, call = make()
    check_exact(pipeline, module, (), call)


@pytest.mark.parametrize("name", EXACT)
def test_in_bfloat16_padding_changes_less_than_bfloat16_itself(tmp_path: Path, name: str) -> None:
    padding = padding_of_a_pipeline(name, tmp_path, "cpu")
    assert padding.from_unpadded <= padding.bfloat16_itself, padding


@pytest.mark.parametrize("make", OTHERS, ids=[make.__name__ for make in OTHERS])
def test_in_bfloat16_padding_another_family_changes_less_than_bfloat16_itself(make: Any) -> None:
    padding = padding_of_a_denoiser(make, "cpu")
    assert padding.from_unpadded <= padding.bfloat16_itself, padding


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


def test_a_pickled_runner_pads_as_well(load: Callable[[str], Any]) -> None:
    runner = wrap_pipeline(load("qwen_image"), text_buckets=BUCKETS).transformer
    twin = pickle.loads(pickle.dumps(runner))
    assert twin._self_prepare.buckets == BUCKETS and twin._self_prepare.text == runner._self_prepare.text


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
