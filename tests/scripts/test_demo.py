"""The demo: it passes on the real thing, and fails when an image differs or something is captured while serving."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

import bcg

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "demo.py"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module of its own, so that a test may patch it."""
    spec = importlib.util.spec_from_file_location("bcg_demo_under_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TIMING_ROUNDS", 1)
    return module


@pytest.fixture
def sheet(tmp_path: Path) -> Path:
    return tmp_path / "sheet.png"


def run(demo: ModuleType, sheet: Path, *options: str) -> int:
    status = demo.main(["--steps", "2", "--output", str(sheet), *options])
    assert isinstance(status, int)
    return status


def test_all_images_are_equal_and_nothing_is_captured_while_serving(
    demo: ModuleType, sheet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(demo, sheet) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "11 of 11 images equal, 0 captures while serving"
    assert "While serving: 20 denoiser calls replayed, 2 run eagerly, 0 guard misses." in printed
    assert Image.open(sheet).width > 1000


def test_one_flipped_bit_in_one_image_fails(
    demo: ModuleType, sheet: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = demo.Demo.run

    def flip(self: Any, pipe: Any, request: Any) -> Any:
        images = honest(self, pipe, request)
        if pipe is self.wrapped and request.seed == 3:
            images[0].view(np.uint32)[0, 0, 0] ^= 1
        return images

    monkeypatch.setattr(demo.Demo, "run", flip)
    assert run(demo, sheet) == 1
    printed = capsys.readouterr().out
    assert "10 of 11 images equal, 0 captures while serving" in printed
    assert printed.count("DIFFERS") == 1


def test_a_capture_while_serving_fails(
    demo: ModuleType, sheet: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = demo._serve

    def serve_in_a_window(*args: Any) -> Any:
        with bcg.warmup():
            return honest(*args)

    monkeypatch.setattr(demo, "_serve", serve_in_a_window)
    assert run(demo, sheet) == 1
    assert "11 of 11 images equal, 1 captures while serving" in capsys.readouterr().out


def test_a_demo_that_replays_nothing_fails_and_says_why(
    demo: ModuleType, sheet: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_warm", lambda *_: None)
    assert run(demo, sheet) == 1
    assert "transformer was never replayed: " in capsys.readouterr().out


def test_a_given_prompt_is_served_first_and_sizes_follow_the_options(
    demo: ModuleType, sheet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    honest = demo.Demo.serve

    def serve(self: Any, request: Any) -> Any:
        served.append(request)
        return honest(self, request)

    monkeypatch.setattr(demo.Demo, "serve", serve)
    assert run(demo, sheet, "--prompt", "my own", "--height", "128", "--width", "64") == 0
    assert served[0].prompt == "my own"
    assert len({request.prompt for request in served}) == len(served) == 11
    assert {(request.height, request.width) for request in served} == {(128, 64), (96, 64), (64, 64)}


def test_the_digits_model_is_asked_for_each_digit(demo: ModuleType) -> None:
    words = ("zero", "1", "two", "3", "four", "5", "six", "7", "eight", "9")
    assert [prompt.split()[-1] for prompt in demo.DIGIT_PROMPTS] == list(words)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--height", "100"], "--height must be a multiple of 128"),
        (["--width", "7"], "--width of 32"),
        (["--height", "-128"], "--height must be a multiple"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--dtype", "nn"], "--dtype nn is not a torch dtype"),
        (["--dtype", "float99"], "--dtype float99 is not a torch dtype"),
        (["--pipeline", "FluxPipeline"], "--pipeline says how to read --model"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(
    demo: ModuleType, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.main(options)
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def test_equal_means_the_same_bits(demo: ModuleType) -> None:
    def served(eager: list[float], replay: list[float]) -> bool:
        images = [[np.array(values, dtype=np.float32)] for values in (eager, replay)]
        return bool(demo.Served(None, *images).equal)

    assert served([float("nan"), 1.0], [float("nan"), 1.0])
    assert not served([0.0], [-0.0])
    assert not served([1.0], [1.0, 1.0])
    assert not demo.Served(None, [np.zeros(1, np.float32)], []).equal
    assert not demo.Served(None, [np.zeros(1, np.float32)], [np.zeros(1, np.int32)]).equal


def test_a_checkpoint_of_ones_own_is_served_by_the_class_that_is_named(
    demo: ModuleType, sheet: Path, tmp_path: Path
) -> None:
    from bcg.pipelines.flux.tiny import build_tiny

    build_tiny(tmp_path / "mine")
    options = ["--model", str(tmp_path / "mine"), "--height", "128", "--dtype", "bfloat16"]
    assert run(demo, sheet, *options, "--pipeline", "FluxPipeline") == 0
    with pytest.raises(SystemExit, match="has no class NoSuchPipeline"):
        run(demo, sheet, *options, "--pipeline", "NoSuchPipeline")
