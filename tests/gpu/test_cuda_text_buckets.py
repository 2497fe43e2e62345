"""Text buckets in bfloat16 on the GPU: what masks and other kernels change, beside what bfloat16 itself does.

Each measurement is printed, and appended as a line of JSON to the file that BCG_BUCKET_REPORT names.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from bucketing import EXACT, OTHERS, Padding, padding_of_a_denoiser, padding_of_a_pipeline

pytestmark = pytest.mark.gpu

REPORT = os.environ.get("BCG_BUCKET_REPORT")  # read here, since tests do not see the caller's BCG_ variables
LIMIT = 2.0
"""A mask takes other kernels, which round anew: two results that are each as far from exact as bfloat16 takes them."""


def note(name: str, padding: Padding) -> None:
    line = json.dumps({"name": name, **asdict(padding)})
    print(line)
    if REPORT:
        with Path(REPORT).open("a") as file:
            file.write(line + "\n")


@pytest.mark.parametrize("name", EXACT)
def test_a_padded_call_by_graph_is_eagers_and_as_far_from_unpadded_as_bfloat16_takes_it(
    tmp_path: Path, name: str
) -> None:
    padding = padding_of_a_pipeline(name, tmp_path, "cuda")
    note(name, padding)
    assert padding.from_unpadded <= LIMIT * padding.bfloat16_itself


@pytest.mark.parametrize("make", OTHERS, ids=[make.__name__ for make in OTHERS])
def test_a_padded_call_of_another_family_by_graph_is_eagers_and_as_far_from_unpadded(make: Any) -> None:
    padding = padding_of_a_denoiser(make, "cuda")
    note(make.__name__, padding)
    assert padding.from_unpadded <= LIMIT * padding.bfloat16_itself
