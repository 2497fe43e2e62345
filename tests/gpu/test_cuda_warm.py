"""Warmed by a plan on the GPU, in bfloat16: new prompts replay where the report said so, and draw what eager draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from bcg.pipelines.tiny_registry import TINY
from warming import check_warmed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", list(TINY))
def test_ten_new_prompts_replay_as_the_report_said(tmp_path: Path, name: str) -> None:
    TINY[name].build(tmp_path)
    pipe: Any = TINY[name].load(tmp_path, torch_dtype=torch.bfloat16)
    pipe.to("cuda")
    pipe.set_progress_bar_config(disable=True)
    report = check_warmed(pipe, TINY[name], "cuda")
    assert {row.verified for row in report.rows} == {"exact"}, report
