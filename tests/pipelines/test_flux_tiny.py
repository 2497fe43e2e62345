"""The tiny FLUX checkpoint: all components, loaded by the real code, the same each time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bcg.pipelines.flux.tiny import build_tiny

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flux") / "deep" / "checkpoint"
    build_tiny(path)
    return path


@pytest.fixture(scope="module")
def pipe(checkpoint: Path) -> Any:
    pipe = diffusers.FluxPipeline.from_pretrained(checkpoint, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe: Any, prompt: str, height: int = 64, width: int = 64) -> np.ndarray[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    result = pipe(
        prompt, height=height, width=width, num_inference_steps=2, generator=generator, output_type="np"
    ).images[0]
    assert isinstance(result, np.ndarray)
    return result


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_every_component_is_there_in_the_published_class(checkpoint: Path) -> None:
    index = json.loads((checkpoint / "model_index.json").read_text())
    classes = {name: value[1] for name, value in index.items() if isinstance(value, list) and value[0]}
    assert classes == {
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
        "tokenizer": "CLIPTokenizer",
        "tokenizer_2": "T5Tokenizer",
        "transformer": "FluxTransformer2DModel",
        "vae": "AutoencoderKL",
    }


def test_weights_are_safetensors_and_small(checkpoint: Path) -> None:
    written = files(checkpoint)
    assert sum(name.endswith(".safetensors") for name in written) == 4
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in written)
    assert sum(map(len, written.values())) < 2**21


def test_two_builds_are_the_same_and_leave_the_random_numbers_alone(checkpoint: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    build_tiny(tmp_path)
    assert files(tmp_path) == files(checkpoint)
    assert torch.equal(torch.get_rng_state(), before)


def test_image_has_the_asked_size_and_repeats(pipe: Any) -> None:
    first = image(pipe, "a fox in the snow", height=96)
    assert first.shape == (96, 64, 3)
    assert np.isfinite(first).all() and first.std() > 0
    assert np.array_equal(first, image(pipe, "a fox in the snow", height=96))


def test_the_prompt_counts(pipe: Any) -> None:
    """Both encoders must reach the image, or a graph that baked the first prompt would go unnoticed."""
    assert not np.array_equal(image(pipe, "a fox"), image(pipe, "a cat"))


@pytest.mark.parametrize("prompt", ["", "a", "naïve 東京 🦊", "many words " * 200])
def test_any_text_is_a_prompt(pipe: Any, prompt: str) -> None:
    assert np.isfinite(image(pipe, prompt)).all()


def test_tokenizers_tell_texts_apart_and_pad(pipe: Any) -> None:
    for tokenizer in (pipe.tokenizer, pipe.tokenizer_2):
        fox, cat = tokenizer(["a fox", "a cat"], padding="max_length", max_length=20).input_ids
        assert len(fox) == len(cat) == 20
        assert fox != cat
        assert tokenizer.decode(fox, skip_special_tokens=True).strip() == "a fox"
