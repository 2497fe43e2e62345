"""Learning from traffic: what missed is in the next plan under its real arguments, and replays after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import bcg
from bcg.misses import MAX_CALLERS, caller_arguments
from bcg.pipelines import WarmupPlan, runners_of, warm, wrap_pipeline
from bcg.pipelines.tiny_registry import TINY

PROMPT = "a secret fox"
Loader = Callable[[str], Any]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """Reads a tiny checkpoint, which is written once, as a new wrapped pipeline."""
    folders: dict[str, Path] = {}

    def from_disk(name: str) -> Any:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            TINY[name].build(folders[name])
        pipe = TINY[name].load(folders[name])
        pipe.set_progress_bar_config(disable=True)
        return wrap_pipeline(pipe)

    return from_disk


def example(name: str, **more: Any) -> dict[str, Any]:
    return TINY[name].example_call(prompt=PROMPT, seed=0) | more


def all_replay(pipe: Any, call: dict[str, Any]) -> bool:
    before = {name: runner.stats for name, runner in runners_of(pipe).items()}
    pipe(**call)
    after = {name: runner.stats for name, runner in runners_of(pipe).items()}
    called = sum(after[name].calls - before[name].calls for name in before)
    replayed = sum(after[name].replays - before[name].replays for name in before)
    captured = sum(after[name].captures - before[name].captures for name in before)
    return called > 0 and called == replayed and not captured


@pytest.mark.parametrize(
    "name", ["flux", "stable_diffusion_3", "qwen_image", "z_image", "lumina2", "wan22", "mochi", "ernie_image"]
)
def test_what_missed_replays_after_the_plan_that_was_made_of_it(name: str, load: Loader, tmp_path: Path) -> None:
    pipe = load(name)
    assert not all_replay(pipe, example(name))
    bcg.plan_from_misses(pipe).save(tmp_path / "next.json")
    plan = WarmupPlan.load(tmp_path / "next.json")
    assert plan == bcg.plan_from_misses(pipe), "JSON keeps it whole"
    assert warm(pipe, plan, strict=True, progress=False).complete
    assert all_replay(pipe, example(name))
    assert bcg.plan_from_misses(pipe).expand() == (), "nothing is left to learn"


def test_real_arguments_are_in_the_plan(load: Loader) -> None:
    pipe = load("wan22")
    pipe(**example("wan22", height=48, width=32, num_frames=9, prompt=[PROMPT] * 2, negative_prompt=["bad"] * 2))
    (request,) = bcg.plan_from_misses(pipe).expand()
    assert (request.height, request.width, request.num_frames, request.batch_size) == (48, 32, 9, 2)
    assert request.arguments == {"guidance_scale_2": 3.0}


def test_guidance_lengths_and_further_arguments_are_in_the_plan(load: Loader) -> None:
    pipe = load("qwen_image")
    pipe(**example("qwen_image", true_cfg_scale=2.5, max_sequence_length=99))
    (request,) = bcg.plan_from_misses(pipe).expand()
    assert request.guidance == 2.5
    assert request.arguments == {"max_sequence_length": 99}
    (miss, other) = runners_of(pipe)["transformer"].misses
    assert f"float32[1,{request.text_length},32]" in miss.summary
    assert f"float32[1,{request.negative_prompt},32]" in other.summary


def test_several_images_of_one_prompt_are_no_batch_of_prompts(load: Loader) -> None:
    pipe = load("flux")
    call = example("flux", num_images_per_prompt=2)
    pipe(**call)
    (request,) = bcg.plan_from_misses(pipe).expand()
    assert request.batch_size == 1 and request.arguments == {"num_images_per_prompt": 2}
    warm(pipe, bcg.plan_from_misses(pipe), strict=True, progress=False)
    assert all_replay(pipe, call)


def test_active_adapters_are_in_the_plan(load: Loader) -> None:
    peft = pytest.importorskip("peft")
    pipe = load("flux")
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["to_q"], init_lora_weights=False)
    pipe.transformer.add_adapter(config, adapter_name="ink")
    call = {"height": 32, "width": 32, "num_inference_steps": 1, "output_type": "latent", "prompt": PROMPT}
    pipe.set_adapters("ink", 0.3)
    pipe(**call)
    pipe.disable_lora()
    pipe(**call)
    plan = bcg.plan_from_misses(pipe)
    assert [request.adapters for request in plan.expand()] == [(("ink", 0.3),), ()]
    warm(pipe, plan, strict=True, progress=False)
    assert all_replay(pipe, call)
    pipe.enable_lora()
    pipe.set_adapters("ink", 0.3)
    assert all_replay(pipe, call)


def test_a_miss_after_a_warm_up_is_all_that_the_next_plan_has(load: Loader) -> None:
    pipe = load("flux")
    pipe(**example("flux"))
    warm(pipe, WarmupPlan(resolutions=["32x32"], steps=1), progress=False)
    pipe(**example("flux", height=64))
    (request,) = bcg.plan_from_misses(pipe).expand()
    assert (request.height, request.width) == (64, 48)
    (miss,) = runners_of(pipe)["transformer"].misses
    assert miss.count == 4 and "not captured" in miss.reason and "hidden_states" in miss.reason


def test_prompts_are_not_kept(load: Loader) -> None:
    pipe = load("flux")
    pipe(**example("flux"))
    (miss,) = runners_of(pipe)["transformer"].misses
    assert "prompt" in next(iter(miss.callers)).given
    assert PROMPT not in repr(miss) and PROMPT not in repr(bcg.plan_from_misses(pipe))


# --- without diffusers -----------------------------------------------------------------------------------------------


class Pipeline:
    """A pipeline of the least kind."""

    def __init__(self, **options: Any) -> None:
        self.transformer = bcg.wrap(nn.Linear(2, 2).requires_grad_(False), **options)

    @torch.no_grad()
    def __call__(
        self, prompt: str, height: int | None = None, scale: float = 1.0, noise: Tensor | None = None
    ) -> Tensor:
        height = height or 3
        result: Tensor = self.transformer(torch.ones(height, 2))
        return result * scale


def test_arguments_are_those_of_the_nearest_call_that_is_no_modules() -> None:
    pipe = Pipeline()
    pipe("a fox", noise=torch.ones(2, 5))
    (miss,) = pipe.transformer.misses
    (caller,) = miss.callers
    assert dict(caller.values) == {"height": 3, "scale": 1.0}
    assert dict(caller.shapes) == {"noise": (2, 5)} and caller.given == ("prompt",)


def test_calls_from_no_pipeline_are_counted_without_arguments() -> None:
    runner = bcg.wrap(nn.Linear(2, 2).requires_grad_(False))
    for _ in range(3):
        runner(torch.ones(1, 2))
    (miss,) = runner.misses
    assert miss.count == 3 and not miss.callers
    assert caller_arguments(module=nn.Linear(2, 2)) is None


def test_callers_are_bounded_and_calls_are_counted_on() -> None:
    pipe = Pipeline()
    for scale in range(50):
        pipe("a fox", scale=float(scale))
    (miss,) = pipe.transformer.misses
    assert miss.count == 50 and len(miss.callers) == MAX_CALLERS


def test_calls_in_a_window_and_replays_are_no_misses() -> None:
    pipe = Pipeline()
    with bcg.warmup():
        pipe("a fox")
    pipe("a cat")
    assert pipe.transformer.misses == ()
    pipe("a fox", height=4)
    assert len(pipe.transformer.misses) == 1
    pipe.transformer.forget_misses()
    assert pipe.transformer.misses == ()


def test_no_tensor_is_kept_alive() -> None:
    import gc
    import weakref

    pipe = Pipeline()
    noise = torch.ones(2, 5)
    gone = weakref.ref(noise)
    pipe("a fox", noise=noise)
    del noise
    gc.collect()
    assert gone() is None
