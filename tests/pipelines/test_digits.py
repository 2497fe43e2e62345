"""The digits model: it draws the digit that the prompt names, replayed or not, and can be trained anew."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import bcg
from bcg.pipelines.digits import checkpoint_path, prompts
from bcg.pipelines.digits.tiny import TEXT_LENGTH

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
MAX_CHECKPOINT_BYTES = 4 * 2**20


def script(name: str) -> ModuleType:
    """Import a file of scripts/, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"bcg_{name}_under_test", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


check = script("check_digits")
train = script("train_digits")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return check.load(checkpoint_path())


@pytest.fixture(scope="module")
def classifier() -> Any:
    return check.real_digits_classifier()


def draw(pipe: Any, prompt: str | list[str], seed: int = 0, **more: Any) -> np.ndarray[Any, Any]:
    options = {"height": 64, "width": 64, "num_inference_steps": STEPS, "max_sequence_length": TEXT_LENGTH, **more}
    images = pipe(prompt, generator=torch.Generator().manual_seed(seed), output_type="np", **options).images
    assert isinstance(images, np.ndarray)
    return images


@pytest.mark.parametrize(("size", "count"), [((64, 64), 60), ((128, 128), 20), ((96, 128), 20), ((64, 128), 20)])
def test_a_classifier_of_real_digits_sees_what_the_prompt_names(
    pipe: Any, classifier: Any, size: tuple[int, int], count: int
) -> None:
    wanted = check.samples(count)
    seen = classifier.predict(check.as_real_digits(check.draw(pipe, wanted, *size, STEPS)))
    assert np.mean(seen == [sample.digit for sample in wanted]) >= 0.9


def test_the_padding_of_published_flux_makes_no_difference_to_the_digit(pipe: Any, classifier: Any) -> None:
    """FLUX pads to 512 tokens by default, and does not mask them."""
    images = draw(pipe, [prompts.prompt(digit) for digit in range(10)], max_sequence_length=512, num_inference_steps=8)
    assert np.mean(classifier.predict(check.as_real_digits(images)) == np.arange(10)) >= 0.9


def test_another_seed_gives_another_drawing(pipe: Any) -> None:
    first, second = (draw(pipe, "the digit 8", seed) for seed in (0, 1))
    assert np.abs(first - second).max() > 0.1


def test_replayed_images_are_the_eager_ones_bit_for_bit() -> None:
    pipe = check.load(checkpoint_path())
    asked = [(prompts.prompt(digit, digit), digit) for digit in range(10)]
    eager = [draw(pipe, *one) for one in asked]
    pipe.transformer = bcg.wrap(pipe.transformer)
    with bcg.warmup():
        draw(pipe, "a prompt")
    captures, replays = pipe.transformer.stats.captures, pipe.transformer.stats.replays
    replayed = [draw(pipe, *one) for one in asked]
    assert pipe.transformer.stats.captures == captures
    assert pipe.transformer.stats.replays == replays + STEPS * len(asked)
    assert [image.tobytes() for image in replayed] == [image.tobytes() for image in eager]


def test_each_word_is_one_token_and_other_words_are_spelled(pipe: Any) -> None:
    for word in prompts.vocabulary():
        assert pipe.tokenizer.tokenize(word) == [word + "</w>"]
        assert pipe.tokenizer_2.tokenize(word) == ["▁" + word]
    assert len(pipe.tokenizer.tokenize("zebra")) == len("zebra")


def test_tokenizers_made_anew_are_those_of_the_checkpoint(pipe: Any) -> None:
    from bcg.pipelines.digits import _parts

    anew = _parts.untrained(prompts.vocabulary(), seed=0)
    for ours, theirs in ((anew.tokenizer, pipe.tokenizer), (anew.tokenizer_2, pipe.tokenizer_2)):
        assert ours.get_vocab() == theirs.get_vocab()
    assert all(character in _parts._FINAL_LETTERS for character in {word[-1] for word in prompts.vocabulary()})


@pytest.mark.parametrize("prompt", ["", "naïve 東京 🦊", "many words " * 200])
def test_any_text_is_a_prompt(pipe: Any, prompt: str) -> None:
    assert np.isfinite(draw(pipe, prompt, num_inference_steps=2)).all()


def test_vae_gives_back_what_it_drew(pipe: Any) -> None:
    """It blurs a little, most where ink ends at once, as it does not in any digit."""
    ink = torch.zeros(1, 1, 16, 16)
    ink[..., 4:12, 6:10] = 1.0
    with torch.no_grad():
        drawn = pipe.vae.decode(ink).sample
        again = pipe.vae.encode(drawn.clamp(-1, 1)).latent_dist
    assert drawn.shape == (1, 3, 128, 128)
    assert (again.mode() - ink).square().mean().sqrt() < 0.08
    assert again.std.max() < 1e-4


def test_checkpoint_is_small_and_safe_and_in_the_wheel() -> None:
    folder = checkpoint_path()
    files = {path for path in folder.rglob("*") if path.is_file()}
    assert sum(path.stat().st_size for path in files) <= MAX_CHECKPOINT_BYTES
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {path for pattern in data["bcg.pipelines.digits"] for path in folder.parent.glob(pattern)}
    assert files <= shipped


def test_training_writes_a_checkpoint_that_depends_on_its_seed_alone(tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> bytes:
        options = ["--steps", "2", "--batch", "2", "--seed", str(seed), "--output", str(tmp_path / name)]
        assert train.main(options) == 0
        return (tmp_path / name / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes()

    first = weights("first", seed=1)
    assert first == weights("again", seed=1)
    assert first != weights("other", seed=2)


def test_the_check_fails_a_model_that_was_not_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bcg.pipelines.digits import _parts

    _parts.untrained(prompts.vocabulary(), seed=0).save_pretrained(tmp_path)
    assert check.main(["--model", str(tmp_path), "--samples", "10", "--steps", "1", "--sizes", "64x64"]) == 1
    assert "% of 10 agree; seen " in capsys.readouterr().out


def test_canvas_holds_the_digit_in_its_middle() -> None:
    packed = train.canvases(torch.ones(1, 8, 8))
    assert all(latents.shape == (1, height * width // 16**2, 4) for (height, width), latents in packed.items())
    wide = packed[64, 128].unflatten(1, (4, 8))  # tokens of 2x2 latents
    low, high = wide.min(), wide.max()
    assert torch.equal(wide[0, :, 2:6], torch.full((4, 4, 4), high.item()))
    assert torch.equal(wide[0, :, [0, 1, 6, 7]], torch.full((4, 4, 4), low.item()))


def test_prompts_name_each_digit_and_nothing_else() -> None:
    import random

    source = random.Random(0)
    for digit, word in enumerate(prompts.WORDS):
        for _ in range(50):
            named = set(prompts.random_prompt(digit, source).lower().replace(",", " ").replace(".", " ").split())
            named = {token.strip("!") for token in named} & {*prompts.WORDS, *"0123456789"}
            assert named <= {word, str(digit)} and named
