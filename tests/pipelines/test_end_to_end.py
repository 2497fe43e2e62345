"""Real pipelines, read from disk: wrapped, they draw what they draw unwrapped, and after a warm-up all calls replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

import bcg
from bcg.pipelines import runners_of, wrap_pipeline
from bcg.pipelines.stable_diffusion_3.tiny import SKIP_LAYERS
from bcg.pipelines.tiny_registry import TINY, TinyPipeline

# The same words in another order: another text of as many tokens, whatever the tokenizer.
PROMPTS = ("a red fox in the snow", "a the fox in red snow", "a fox red the in snow", "a in fox the red snow")

Load = Callable[..., Any]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Read a tiny pipeline from disk; its checkpoint is written once."""
    folders: dict[str, Path] = {}

    def load(name: str, **options: Any) -> Any:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            TINY[name].build(folders[name])
        pipe = TINY[name].load(folders[name], **options)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return load


def draw(pipe: Any, tiny: TinyPipeline, prompt: str, **more: Any) -> torch.Tensor:
    call = {**tiny.example_call(prompt=prompt, seed=1, dtype=pipe.dtype), **more}
    return torch.as_tensor(pipe(**call, return_dict=False)[0])


def served(pipe: Any, before: Mapping[str, bcg.RunnerStats]) -> Iterator[tuple[int, int, int]]:
    """Calls, replays and captures of each runner since then."""
    for name, runner in runners_of(pipe).items():
        now, then = runner.stats, before[name]
        yield now.calls - then.calls, now.replays - then.replays, now.captures - then.captures


def stats(pipe: Any) -> dict[str, bcg.RunnerStats]:
    return {name: runner.stats for name, runner in runners_of(pipe).items()}


def check(pipe: Any, tiny: TinyPipeline, requests: list[dict[str, Any]]) -> None:
    """Warm up with the first prompt under each request, and serve the others under each."""
    want = {
        (prompt, index): draw(pipe, tiny, prompt, **request)
        for prompt in PROMPTS
        for index, request in enumerate(requests)
    }
    wrap_pipeline(pipe)
    with bcg.warmup():
        for index, request in enumerate(requests):
            assert torch.equal(draw(pipe, tiny, PROMPTS[0], **request), want[PROMPTS[0], index])
    before = stats(pipe)
    assert set(before) == set(tiny.denoisers)
    for (prompt, index), result in want.items():
        assert torch.equal(draw(pipe, tiny, prompt, **requests[index]), result)
    for calls, replays, captures in served(pipe, before):
        assert calls > 0
        assert (replays, captures) == (calls, 0)


@pytest.mark.parametrize("name", list(TINY))
def test_the_result_is_the_same_and_every_call_replays(load: Load, name: str) -> None:
    check(load(name), TINY[name], [{}])


@pytest.mark.parametrize("name", ["hunyuan_video", "stable_diffusion_3", "z_image", "wan22", "kandinsky5"])
def test_the_same_in_bfloat16(load: Load, name: str) -> None:
    """Where a first step may pass other dtypes than the next ones, and some weights stay in float32."""
    check(load(name, torch_dtype=torch.bfloat16), TINY[name], [{}])


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("flux", {"true_cfg_scale": 1.0}),
        ("flux2_klein", {"guidance_scale": 1.0}),
        ("qwen_image", {"true_cfg_scale": 1.0}),
        ("stable_diffusion_3", {"guidance_scale": 0.0}),
        ("sana", {"guidance_scale": 1.0}),
        ("lumina2", {"guidance_scale": 1.0}),
        ("z_image", {"guidance_scale": 0.0}),
        ("wan", {"guidance_scale": 1.0}),
        ("wan22", {"guidance_scale": 1.0, "guidance_scale_2": 1.0}),
        ("ltx", {"guidance_scale": 1.0}),
    ],
)
def test_guidance_on_and_off_in_turn(load: Load, name: str, off: dict[str, Any]) -> None:
    check(load(name), TINY[name], [{}, off])


def test_skip_layer_guidance_on_and_off_in_turn(load: Load) -> None:
    """A third call in each step, of half the batch and with layers skipped."""
    skipping = {
        "skip_guidance_layers": SKIP_LAYERS,
        "skip_layer_guidance_start": 0.0,
        "skip_layer_guidance_stop": 1.0,
    }
    pipe, tiny = load("stable_diffusion_3"), TINY["stable_diffusion_3"]
    assert not torch.equal(draw(pipe, tiny, PROMPTS[0]), draw(pipe, tiny, PROMPTS[0], **skipping))
    check(pipe, tiny, [{}, skipping])


def test_two_transformers_share_their_scratch_memory(load: Load) -> None:
    pipe = wrap_pipeline(load("wan22"))
    first, second = runners_of(pipe).values()
    assert first.pool is second.pool


def test_several_images_of_one_prompt_are_another_signature(load: Load) -> None:
    check(load("flux"), TINY["flux"], [{"num_images_per_prompt": 2}, {}])


def test_sizes_that_were_not_warmed_run_eagerly_and_are_right(load: Load) -> None:
    pipe, tiny = load("flux"), TINY["flux"]
    want = draw(pipe, tiny, PROMPTS[0], height=64)
    wrap_pipeline(pipe)
    with bcg.warmup():
        draw(pipe, tiny, PROMPTS[0])
    before = stats(pipe)
    assert torch.equal(draw(pipe, tiny, PROMPTS[0], height=64), want)
    assert list(served(pipe, before)) == [(4, 0, 0)]


@pytest.mark.parametrize("name", ["flux", "sana", "hunyuan_video", "ltx", "cogvideox", "mochi"])
def test_decoder_and_text_encoder_can_be_captured_too(load: Load, name: str) -> None:
    pipe, tiny = load(name), TINY[name]
    want = [draw(pipe, tiny, prompt, output_type="pt") for prompt in PROMPTS]
    wrap_pipeline(pipe, components=("transformer", "vae.decode", "text_encoder"))
    with bcg.warmup():
        draw(pipe, tiny, PROMPTS[0], output_type="pt")
    before = stats(pipe)
    assert set(before) == {"transformer", "vae.decode", "text_encoder"}
    for prompt, pixels in zip(PROMPTS, want, strict=True):
        assert torch.equal(draw(pipe, tiny, prompt, output_type="pt"), pixels)
    assert all(calls == replays > 0 for calls, replays, _ in served(pipe, before))


@pytest.mark.parametrize("name", ["wan", "qwen_image"])
def test_a_decoder_that_writes_to_its_arguments_runs_eagerly_and_is_right(load: Load, name: str) -> None:
    """These decode frame by frame, with a list of cached features that each call changes."""
    pipe, tiny = load(name), TINY[name]
    want = draw(pipe, tiny, PROMPTS[1], output_type="pt")
    wrap_pipeline(pipe, components=("vae.decode",))
    with bcg.warmup():
        draw(pipe, tiny, PROMPTS[0], output_type="pt")
    assert torch.equal(draw(pipe, tiny, PROMPTS[1], output_type="pt"), want)
    runner = runners_of(pipe)["vae.decode"]
    assert runner.stats.captures == 0
    assert all("feat_cache" in reason for reason in runner.rejections.values())


def test_a_unet_pipeline_is_wrapped_as_well() -> None:
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    from bcg.pipelines import _tiny

    tokenizer = _tiny.clip_tokenizer()
    with _tiny.seeded(0):
        unet = UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=_tiny.HIDDEN_SIZE,
            attention_head_dim=4,
        )
        pipe: Any = StableDiffusionPipeline(
            vae=_tiny.image_vae(),
            text_encoder=_tiny.clip_text_model(tokenizer),
            tokenizer=tokenizer,
            unet=unet.eval(),
            scheduler=DDIMScheduler(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipe.set_progress_bar_config(disable=True)

    def image(prompt: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        call = {"height": 64, "width": 64, "num_inference_steps": 2, "generator": generator, "output_type": "pt"}
        return torch.as_tensor(pipe(prompt, **call, return_dict=False)[0])

    want = [image(prompt) for prompt in PROMPTS]
    wrap_pipeline(pipe)
    with bcg.warmup():
        image(PROMPTS[0])
    before = stats(pipe)
    assert all(torch.equal(image(prompt), pixels) for prompt, pixels in zip(PROMPTS, want, strict=True))
    assert list(served(pipe, before)) == [(8, 8, 0)]
