"""The command that says, without a GPU, what a capture of a pipeline's calls meets."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "inspect_pipeline.py"


def load_script() -> Any:
    specification = importlib.util.spec_from_file_location("inspect_pipeline", SCRIPT)
    assert specification is not None and specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    # Dataclasses look their module up while they are made.
    import sys

    sys.modules[specification.name] = script
    specification.loader.exec_module(script)
    return script


def test_a_guard_is_named_with_its_submodule_and_source_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_script().main(["--pipeline", "lumina2"]) == 0
    text = capsys.readouterr().out
    assert "guard tolist at rope_embedder" in text
    assert "transformer_lumina2.py:" in text
    assert text.count("on a GPU also hoist aten::_to_copy at rope_embedder") == 3
    assert "1 of 1 signatures can be captured." in text


def test_each_signature_of_a_pipeline_call_is_inspected(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_script().main(["--pipeline", "wan22"]) == 0
    text = capsys.readouterr().out
    assert "transformer_2" in text
    assert "2 of 2 signatures can be captured." in text


def test_an_unknown_pipeline_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_script().main(["--pipeline", "nonsense"])
    assert "lumina2" in capsys.readouterr().err
