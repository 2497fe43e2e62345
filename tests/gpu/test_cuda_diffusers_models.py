"""Unmodified diffusers transformers on the GPU in bfloat16: guards and breaks are those that the tape finds.

That is what lets a machine without a GPU tell what a capture on one will meet.
"""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("diffusers")

import bcg
from model_findings import (
    EXPECTED,
    HOISTS,
    STEERED_BY_LENGTH,
    arguments,
    build,
    check_other_lengths,
    check_replays,
    counted,
    places,
    without_hoists,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16


@functools.cache  # two tests look at one capture
def found_there(name, mode):
    return check_replays(name, DTYPE, mode, DEVICE)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", EXPECTED)
def test_guards_and_breaks_are_those_of_the_tape(name, mode):
    # First: what a capture learns about a class of modules, the next one knows.
    there = found_there(name, mode)
    here = check_replays(name, DTYPE, mode)
    assert places(without_hoists(there)) == places(here)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", EXPECTED)
def test_hoists_are_those_that_are_foretold_without_a_gpu(name, mode):
    hoists = [finding for finding in found_there(name, mode) if finding.kind == "hoist"]
    with mode():
        report = bcg.inspect(build(name, DTYPE), **arguments(name, 0, DTYPE))
    assert places(report.on_gpu) == places(hoists)
    assert counted(hoists) == HOISTS.get(name, {})


@pytest.mark.parametrize("name", sorted(STEERED_BY_LENGTH))
def test_another_prompt_length_behind_one_signature_is_never_a_wrong_image(name):
    check_other_lengths(name, DTYPE, DEVICE)
