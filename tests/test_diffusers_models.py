"""Unmodified diffusers transformers that do what a CUDA graph cannot: what a capture finds, and exact replays."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import bcg

_spec = importlib.util.spec_from_file_location("bcg_tiny_models", Path(__file__).with_name("tiny_models.py"))
tiny_models = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = tiny_models  # dataclasses look their module up
_spec.loader.exec_module(tiny_models)

# What a capture meets, as on CUDA but for hoists: where the device is the host, there is nothing to copy.
EXPECTED: dict[str, dict[tuple[str, str], int]] = {
    "cogview4": {},
    "glm_image": {("break", "aten::index"): 1, ("break", "aten::index_put_"): 1},
    "chroma": {},
    "kandinsky5": {},
    "qwen_image_masked": {},
    "qwen_image_edit_2511": {},
    "skyreels_v2": {},
    "lumina2": {("guard", "tolist"): 1},
    "mochi": {("break", "aten::nonzero"): 6},
    "hunyuan_video15": {("break", "aten::index"): 12, ("guard", "aten::_local_scalar_dense"): 1},
    "hunyuan_image": {("break", "aten::index"): 8},
    "hidream": {
        ("module break", "double_stream_blocks.0.block.ff_i"): 1,
        ("module break", "single_stream_blocks.0.block.ff_i"): 1,
        ("guard", "aten::_local_scalar_dense"): 14,
    },
}
# The mask alone tells the prompt's length, and lengths steer shapes there.
STEERED_BY_LENGTH = {"lumina2", "mochi", "hunyuan_video15", "hunyuan_image"}


def _equal(expected: Any, got: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_that_nobody_prepared_replays_exactly(name, dtype, mode):
    model = tiny_models.MODELS[name]
    module = model.build(dtype)
    runner = bcg.wrap(module)
    with mode():
        wanted = {seed: module(**model.arguments(seed, dtype)) for seed in (0, 1, 2)}
        with bcg.warmup():
            _equal(wanted[0], runner(**model.arguments(0, dtype)))
        (entry,) = runner.entries.values()
        for seed in (1, 2, 0):
            _equal(wanted[seed], runner(**model.arguments(seed, dtype)))
    assert runner.stats.replays == 3
    assert entry.verified == "exact"
    found = Counter((finding.kind, finding.name) for finding in entry.findings)
    assert dict(found) == EXPECTED[name]
    breaks = sum(count for (kind, _), count in found.items() if kind.endswith("break"))
    assert (entry.breaks, entry.guards) == (breaks, sum(found.values()) - breaks)
    # A segment of which nothing is to be recorded is dropped.
    assert 1 <= entry.segments <= 1 + entry.breaks + entry.guards


@pytest.mark.parametrize("name", sorted(STEERED_BY_LENGTH))
def test_another_prompt_length_behind_one_signature_is_never_a_wrong_image(name):
    model = tiny_models.MODELS[name]
    dtype = torch.float32
    module = model.build(dtype)
    runner = bcg.wrap(module)
    with torch.no_grad():
        with bcg.warmup():
            runner(**model.arguments(0, dtype))
        for seed, length in ((1, 5), (2, 12)):
            _equal(module(**model.arguments(seed, dtype, length)), runner(**model.arguments(seed, dtype, length)))
        assert (runner.stats.guard_misses, runner.stats.replays) == (2, 0)
        with bcg.warmup():
            runner(**model.arguments(0, dtype, 5))
        for seed, length in ((3, 5), (4, 9), (5, 5)):
            _equal(module(**model.arguments(seed, dtype, length)), runner(**model.arguments(seed, dtype, length)))
    assert runner.stats.replays == 3
    assert len(runner.entries) == 2


def test_an_image_where_there_was_none_is_a_miss():
    model = tiny_models.MODELS["hunyuan_video15"]
    dtype = torch.float32
    module = model.build(dtype)
    runner = bcg.wrap(module)
    with torch.no_grad():
        with bcg.warmup():
            runner(**model.arguments(0, dtype))
        for seed in (1, 2):
            arguments = model.arguments(seed, dtype)
            arguments["image_embeds"] = torch.randn(1, 5, 12)
            _equal(module(**arguments), runner(**arguments))
    assert (runner.stats.guard_misses, runner.stats.replays) == (2, 0)


def test_a_guard_of_a_model_names_its_line():
    model = tiny_models.MODELS["lumina2"]
    report = bcg.inspect(model.build(torch.float32), **model.arguments(0, torch.float32))
    (guard,) = report.of_kind("guard")
    assert guard.where.module == "rope_embedder"
    source = Path(guard.where.file).read_text().splitlines()
    assert "tolist()" in source[guard.where.line - 1]
