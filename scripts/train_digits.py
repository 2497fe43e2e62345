"""Train the digits model and write its checkpoint, in about 20 minutes of one CPU core.

The recipe: scikit-learn's 1797 digits of 8x8 pixels, enlarged and put into images of four sizes, with a random prompt
each time; rectified flow matching; the transformer and both text encoders are trained together with AdamW, and the
moving average of their weights is what is written. The same seed, versions and number of threads give the same
checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from bcg.pipelines.digits import _parts, checkpoint_path, digit_side
from bcg.pipelines.digits.prompts import random_prompt, vocabulary

SIZES: Final = {(64, 64): 0.3, (64, 128): 0.2, (96, 128): 0.2, (128, 128): 0.3}
"""How often each (height, width) is trained, in pixels."""
PROMPTS_PER_DIGIT: Final = 800
TEXT_LENGTHS: Final = {16: 0.7, 32: 0.25, 128: 0.03, 512: 0.02}
"""How often each padded length is trained: FLUX has no mask over the text, so padding is seen and must be familiar."""
TOKENS_PER_BATCH: Final = 5000
"""At most; long texts come in smaller batches, or a few of them would take most of the time."""
LONGEST_PROMPT: Final = 77
WARMUP_STEPS: Final = 200
AVERAGING: Final = 0.998
_PATCH: Final = 2 * _parts.VAE_SCALE
TRAINED: Final = ("transformer", "text_encoder", "text_encoder_2")

Latents = dict[tuple[int, int], torch.Tensor]
_Choice = TypeVar("_Choice")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the checkpoint depends on, besides the versions of the libraries."""

    steps: int
    batch: int
    learning_rate: float
    seed: int
    threads: int


@dataclass(frozen=True)
class Texts:
    """Tokenized prompts: rows of both tokenizers' ids, and where the rows of each digit are."""

    clip: torch.Tensor
    t5: torch.Tensor
    per_digit: int

    def pick(self, digits: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pick a random prompt for each digit; T5's ids are cut or padded to `length`."""
        rows = digits * self.per_digit + torch.randint(self.per_digit, digits.shape)
        t5 = functional.pad(self.t5[rows], (0, max(0, length - self.t5.shape[1])))
        return self.clip[rows], t5[:, :length]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and save."""
    options = _parse(arguments)
    recipe = Recipe(
        steps=options.steps,
        batch=options.batch,
        learning_rate=options.learning_rate,
        seed=options.seed,
        threads=options.threads,
    )
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    start = time.perf_counter()
    pipe = _parts.untrained(vocabulary(), recipe.seed)
    loss = train(pipe, recipe)
    save(pipe, recipe, options.output)
    minutes = (time.perf_counter() - start) / 60
    print(f"{recipe.steps} steps in {minutes:.1f} minutes, loss {loss:.4f}, checkpoint in {options.output}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/train_digits", description=__doc__)
    parser.add_argument("--steps", type=int, default=3300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch; the result depends on it in the last bits")
    parser.add_argument("--output", type=Path, default=checkpoint_path(), help="default: the package's own checkpoint")
    return parser.parse_args(arguments)


# ------------------------------------------------------------------------------------------------------------- data
def canvases(images: torch.Tensor) -> Latents:
    """Enlarge digits, and put them into the middle of images of each of `SIZES`.

    Args:
        images: Ink ``[N, 8, 8]`` from 0 to 1.

    Returns:
        For each size in pixels, what the transformer is to draw: packed latents ``[N, tokens, 4]``.
    """
    return {size: _canvas(images, *size) for size in SIZES}


def _canvas(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    from diffusers import FluxPipeline

    height, width, side = (pixels // _parts.VAE_SCALE for pixels in (height, width, digit_side(height, width)))
    ink = functional.interpolate(images[:, None], size=(side, side), mode="bicubic").clamp(0, 1)
    left, top = (width - side) // 2, (height - side) // 2
    ink = functional.pad(ink, (left, width - side - left, top, height - side - top))
    latents = (ink - _parts.INK_MEAN) * _parts.INK_SCALE
    packed: torch.Tensor = FluxPipeline._pack_latents(latents, len(latents), 1, height, width)
    return packed


def tokenize(pipe: Any, seed: int) -> Texts:
    """Draw prompts for each digit and tokenize them."""
    source = random.Random(seed)
    texts = [random_prompt(digit, source) for digit in range(10) for _ in range(PROMPTS_PER_DIGIT)]
    clip, t5 = (
        tokenizer(texts, padding="longest", truncation=True, max_length=LONGEST_PROMPT, return_tensors="pt").input_ids
        for tokenizer in (pipe.tokenizer, pipe.tokenizer_2)
    )
    return Texts(clip, t5, PROMPTS_PER_DIGIT)


# --------------------------------------------------------------------------------------------------------- training
def train(pipe: Any, recipe: Recipe) -> float:
    """Train the pipeline's parts and leave their averaged weights in them.

    Args:
        pipe: An untrained pipeline.
        recipe: How.

    Returns:
        The mean loss of the last hundred steps.
    """
    data = load_digits()
    digits = torch.as_tensor(data.target)
    latents = canvases(torch.as_tensor(data.images, dtype=torch.float32) / 16)
    texts = tokenize(pipe, recipe.seed)
    _start_at_zero(pipe.transformer)
    parameters = [parameter for name in TRAINED for parameter in getattr(pipe, name).parameters()]
    averages = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    losses: list[float] = []
    source = random.Random(recipe.seed)
    for step, batch in enumerate(_batches(len(digits), recipe)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, recipe.steps)
        size, length = _choose(SIZES, source), _choose(TEXT_LENGTHS, source)
        rows = batch[: max(1, TOKENS_PER_BATCH // (length + latents[size].shape[1]))]
        loss = flow_loss(pipe, latents[size][rows], size, *texts.pick(digits[rows], length))
        optimizer.zero_grad()
        (loss * len(rows) / len(batch)).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        _average(averages, parameters, step)
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {_mean(losses[-100:]):.4f}", flush=True)
    with torch.no_grad():
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.copy_(average)
    return _mean(losses[-100:])


def flow_loss(
    pipe: Any, clean: torch.Tensor, size: tuple[int, int], clip_ids: torch.Tensor, t5_ids: torch.Tensor
) -> torch.Tensor:
    """Compare the velocity that the transformer predicts between digit and noise with the true one."""
    time_ = torch.sigmoid(torch.randn(len(clean)) * 1.2 + 0.2)
    noise = torch.randn_like(clean)
    mixed = clean + time_[:, None, None] * (noise - clean)
    predicted = pipe.transformer(
        hidden_states=mixed,
        timestep=time_,
        pooled_projections=pipe.text_encoder(clip_ids).pooler_output,
        encoder_hidden_states=pipe.text_encoder_2(t5_ids)[0],
        txt_ids=torch.zeros(t5_ids.shape[1], 3),
        img_ids=pipe._prepare_latent_image_ids(1, *(side // _PATCH for side in size), "cpu", torch.float32),
        return_dict=False,
    )[0]
    return functional.mse_loss(predicted, noise - clean)


def _start_at_zero(transformer: nn.Module) -> None:
    """Let every block start as the identity, which trains faster and more surely."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and (name.endswith("norm.linear") or "norm1" in name or name == "proj_out"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)


def _batches(count: int, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Give the rows of each step's batch, each row once before any comes again."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(recipe.steps):
        if len(order) < recipe.batch:
            order = torch.randperm(count)
        yield order[: recipe.batch]
        order = order[recipe.batch :]


def _choose(weights: Mapping[_Choice, float], source: random.Random) -> _Choice:
    return source.choices(list(weights), list(weights.values()))[0]


def _schedule(step: int, steps: int) -> float:
    """Rise over the first steps, then fall along a cosine to zero."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1 + math.cos(math.pi * step / steps)) / 2


@torch.no_grad()
def _average(averages: list[torch.Tensor], parameters: list[nn.Parameter], step: int) -> None:
    # Shorter at first, or the random start would be part of the average for long.
    weight = 1 - min(AVERAGING, (step + 1) / (step + 10))
    torch._foreach_lerp_(averages, [parameter.detach() for parameter in parameters], weight)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def save(pipe: Any, recipe: Recipe, path: Path) -> None:
    """Write the checkpoint, and beside its index the recipe."""
    pipe.save_pretrained(path, safe_serialization=True)
    notes: Mapping[str, Any] = {**vars(recipe), "torch": torch.__version__}
    (path / "recipe.json").write_text(json.dumps(notes, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
