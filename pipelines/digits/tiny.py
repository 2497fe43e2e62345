"""The digits checkpoint as one of the tiny checkpoints: nothing is built, the trained one is copied."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from .. import _tiny_calls
from . import checkpoint_path

TEXT_LENGTH = 32
"""Tokens that a prompt is padded to in the example call; with FLUX's default of 512 the text would take most of it."""


def build_tiny(path: Path) -> None:
    """Copy the digits checkpoint, to be read with ``FluxPipeline.from_pretrained(path)``.

    Args:
        path: The folder to write to; made if it is not there.
    """
    shutil.copytree(checkpoint_path(), path, dirs_exist_ok=True)


def example_call(*, prompt: str, seed: int, height: int = 64, width: int = 64, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call; from about a dozen steps on, it draws the digit that the prompt names.

    Args:
        prompt: What to draw; always padded to `TEXT_LENGTH` tokens.
        seed: Seed of the noise.
        height: In pixels, a multiple of 16; the model card lists the sizes that were trained.
        width: In pixels, as the height.
        steps: Denoising steps.

    Returns:
        Keyword arguments of ``pipe(...)``.
    """
    return _tiny_calls.call(
        prompt=prompt, seed=seed, height=height, width=width, steps=steps, max_sequence_length=TEXT_LENGTH
    )
