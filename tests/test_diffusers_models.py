"""Unmodified diffusers transformers that do what a CUDA graph cannot: what a capture finds, and exact replays.

The table of what is found is in ``tests/helpers/model_findings.py``; CUDA is held to the same one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bcg
from model_findings import (
    EXPECTED,
    HOISTS,
    STEERED_BY_LENGTH,
    arguments,
    assert_equal,
    build,
    check_other_lengths,
    check_replays,
    counted,
)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_that_nobody_prepared_replays_exactly(name, dtype, mode):
    check_replays(name, dtype, mode)


@pytest.mark.parametrize("name", sorted(STEERED_BY_LENGTH))
def test_another_prompt_length_behind_one_signature_is_never_a_wrong_image(name):
    check_other_lengths(name, torch.float32)


def test_an_image_where_there_was_none_is_a_miss():
    name, dtype = "hunyuan_video15", torch.float32
    module = build(name, dtype)
    runner = bcg.wrap(module)
    with torch.no_grad():
        with bcg.warmup():
            runner(**arguments(name, 0, dtype))
        for seed in (1, 2):
            given = arguments(name, seed, dtype)
            given["image_embeds"] = torch.randn(1, 5, 12)
            assert_equal(module(**given), runner(**given))
    assert (runner.stats.guard_misses, runner.stats.replays) == (2, 0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", EXPECTED)
def test_the_copies_that_a_gpu_meets_are_told_without_one(name, mode):
    with mode():
        report = bcg.inspect(build(name, torch.bfloat16), **arguments(name, 0, torch.bfloat16))
    assert report.on_gpu_unknown is None
    assert counted(report.findings) == EXPECTED[name]
    assert counted(report.on_gpu) == HOISTS.get(name, {})


def test_a_guard_of_a_model_names_its_line():
    report = bcg.inspect(build("lumina2", torch.float32), **arguments("lumina2", 0, torch.float32))
    (guard,) = report.of_kind("guard")
    assert guard.where.module == "rope_embedder"
    source = Path(guard.where.file).read_text().splitlines()
    assert "tolist()" in source[guard.where.line - 1]
