"""Unmodified diffusers transformers on the GPU in bfloat16: guards and breaks are those that the tape finds.

That is what lets a machine without a GPU tell what a capture on one will meet.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")

from model_findings import (
    EXPECTED,
    HOISTING,
    STEERED_BY_LENGTH,
    check_other_lengths,
    check_replays,
    places,
    without_hoists,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", EXPECTED)
def test_guards_and_breaks_are_those_of_the_tape(name, mode):
    # First: what a capture learns about a class of modules, the next one knows.
    there = check_replays(name, DTYPE, mode, DEVICE)
    here = check_replays(name, DTYPE, mode)
    assert places(there) == places(here)
    assert without_hoists(here) == list(here)
    if name in HOISTING:
        assert without_hoists(there) != list(there), "nothing was copied from the host"


@pytest.mark.parametrize("name", sorted(STEERED_BY_LENGTH))
def test_another_prompt_length_behind_one_signature_is_never_a_wrong_image(name):
    check_other_lengths(name, DTYPE, DEVICE)
