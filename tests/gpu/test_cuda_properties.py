"""Random small modules on the GPU, eager against replay: a guard with a new value is never a wrong result."""

from __future__ import annotations

import os

import pytest
import torch

from random_programs import assert_telling, check_random_examples, failing_instructions

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "100"))  # of each mode; more find rarer faults
MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


@MODES
def test_each_instruction_gives_what_eager_gives(mode):
    assert not failing_instructions(mode, DEVICE)


@MODES
@pytest.mark.timeout(max(300, 4 * EXAMPLES))
def test_a_random_module_gives_what_eager_gives(mode):
    assert_telling(check_random_examples(mode, DEVICE, EXAMPLES))
