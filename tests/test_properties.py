"""Random small modules, eager against replay on the tape: a guard with a new value is never a wrong result.

The programs are in ``tests/support/random_programs.py``; ``tests/gpu/test_cuda_properties.py`` runs them on CUDA.
"""

from __future__ import annotations

import os

import pytest
import torch

from random_programs import HERE, assert_telling, check_random_examples, failing_instructions

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "160"))  # of each mode; more find rarer faults
MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


@MODES
@pytest.mark.timeout(max(300, 2 * EXAMPLES))
def test_a_random_module_gives_what_eager_gives(mode):
    assert_telling(check_random_examples(mode, HERE, EXAMPLES))


@MODES
def test_each_instruction_gives_what_eager_gives(mode):
    assert not failing_instructions(mode, HERE)
