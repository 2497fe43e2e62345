"""Ask a classifier of the real digits whether the digits model draws what its prompts say.

The classifier is scikit-learn's support vector machine with a radial kernel, trained on all of its real digits. The
samples have fixed seeds: each digit equally often, the prompts of `prompts.TEMPLATES` in turn. The exit status is 1 if
it agrees with fewer than 90 % at any size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.svm import SVC

from bcg.pipelines.digits import checkpoint_path, digit_side
from bcg.pipelines.digits.prompts import TEMPLATES, WORDS, prompt

SAMPLES: Final = 200
LEAST: Final = 0.9
BATCH: Final = 20
SIZES: Final = ("64x64", "128x128", "96x128", "64x128")
"""The size of the model's own data, and those that scripts/demo serves; all are trained."""

Images = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sample:
    """A prompt, the digit that it names, and the seed of its noise."""

    prompt: str
    digit: int
    seed: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Check each size, print how often the classifier agrees, and return the exit status."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    pipe = load(options.model)
    classifier = real_digits_classifier()
    wanted = samples(options.samples)
    good = True
    for size in options.sizes:
        height, width = (int(side) for side in size.split("x"))
        seen = classifier.predict(as_real_digits(draw(pipe, wanted, height, width, options.steps)))
        agreement = float(np.mean(seen == [sample.digit for sample in wanted]))
        good = good and agreement >= LEAST
        wrong = ", ".join(
            f"{one.digit} as {other}" for one, other in zip(wanted, seen, strict=True) if one.digit != other
        )
        print(f"{size}: {agreement:.1%} of {len(wanted)} agree" + (f"; seen {wrong}" if wrong else ""), flush=True)
    return 0 if good else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/check_digits", description=__doc__)
    parser.add_argument("--model", type=Path, default=checkpoint_path(), help="default: the package's own checkpoint")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"per size (default: {SAMPLES})")
    parser.add_argument("--steps", type=int, default=12, help="denoising steps (default: 12)")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="HxW", help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    return parser.parse_args(arguments)


def load(path: Path) -> Any:
    """Read the pipeline, in float32 on the CPU."""
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def real_digits_classifier() -> Any:
    """Train the classifier on all of scikit-learn's digits; held-out ones it gets right in 99 of 100 cases."""
    data = load_digits()
    return SVC(gamma=0.001).fit(data.data, data.target)


def samples(count: int) -> list[Sample]:
    """List what to draw: each digit in turn, and with each turn the next way to ask for it."""
    digits = len(WORDS)
    return [
        Sample(prompt(seed % digits, seed // digits % len(TEMPLATES)), seed % digits, seed) for seed in range(count)
    ]


def draw(pipe: Any, wanted: Sequence[Sample], height: int, width: int, steps: int) -> Images:
    """Draw samples in batches; each has the noise of its own seed, whichever others are in its batch.

    Returns:
        Images ``[N, height, width, 3]`` from 0 to 1.
    """
    batches = [wanted[start : start + BATCH] for start in range(0, len(wanted), BATCH)]
    return np.concatenate([_draw_batch(pipe, batch, height, width, steps) for batch in batches])


def _draw_batch(pipe: Any, batch: Sequence[Sample], height: int, width: int, steps: int) -> Images:
    images: Images = pipe(
        [sample.prompt for sample in batch],
        height=height,
        width=width,
        num_inference_steps=steps,
        max_sequence_length=32,
        generator=[torch.Generator().manual_seed(sample.seed) for sample in batch],
        output_type="np",
    ).images
    return images


def as_real_digits(images: Images) -> Images:
    """Bring images to the form of the real digits: the square that a digit fills, averaged to 8x8 pixels of 0 to 16.

    Args:
        images: ``[N, height, width, 3]`` from 0 to 1.

    Returns:
        Rows of 64 values ``[N, 64]``.
    """
    count, height, width, _ = images.shape
    side = digit_side(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    grey = images[:, top : top + side, left : left + side].mean(axis=-1)
    averaged: Images = grey.reshape(count, 8, side // 8, 8, side // 8).mean(axis=(2, 4))
    return 16 * averaged.reshape(count, 64)


if __name__ == "__main__":
    sys.exit(main())
