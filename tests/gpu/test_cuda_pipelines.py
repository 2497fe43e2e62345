"""Real pipelines on the GPU, read from disk in bfloat16: they draw what they draw unwrapped, and new prompts replay."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

import bcg
from bcg.pipelines import runners_of, wrap_pipeline
from bcg.pipelines.stable_diffusion_3.tiny import SKIP_LAYERS
from bcg.pipelines.tiny_registry import TINY

pytestmark = pytest.mark.gpu

# The same words in another order: another text of as many tokens, whatever the tokenizer (the first word has no space
# before it, and stays the first).
ORDERS = itertools.islice(itertools.permutations(["red", "fox", "in", "the", "snow"]), 0, 120, 11)
PROMPTS = [" ".join(("a", *words)) for words in ORDERS]


def draw(pipe: Any, name: str, prompt: str, **more: Any) -> torch.Tensor:
    call = TINY[name].example_call(prompt=prompt, seed=1, device="cuda", dtype=torch.bfloat16)
    return torch.as_tensor(pipe(**{**call, **more}, return_dict=False)[0])


def check(path: Path, name: str, **more: Any) -> None:
    TINY[name].build(path)
    pipe: Any = TINY[name].load(path, torch_dtype=torch.bfloat16)
    pipe.to("cuda")
    pipe.set_progress_bar_config(disable=True)
    want = [draw(pipe, name, prompt, **more) for prompt in PROMPTS]
    wrap_pipeline(pipe)
    with bcg.warmup():
        draw(pipe, name, PROMPTS[0], **more)
    before = {key: runner.stats for key, runner in runners_of(pipe).items()}
    assert set(before) == set(TINY[name].denoisers)
    for prompt, expected in zip(PROMPTS[1:], want[1:], strict=True):
        assert torch.equal(draw(pipe, name, prompt, **more), expected)
    for key, runner in runners_of(pipe).items():
        now, then = runner.stats, before[key]
        assert now.captures == then.captures
        assert now.calls > then.calls
        assert now.replays - then.replays == now.calls - then.calls, runner.misses


@pytest.mark.parametrize("name", list(TINY))
def test_ten_new_prompts_replay_and_draw_what_eager_draws(tmp_path: Path, name: str) -> None:
    assert len(PROMPTS) == 11
    check(tmp_path, name)


def test_skip_layer_guidance_replays_too(tmp_path: Path) -> None:
    skipping = {"skip_guidance_layers": SKIP_LAYERS, "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
    check(tmp_path, "stable_diffusion_3", **skipping)
