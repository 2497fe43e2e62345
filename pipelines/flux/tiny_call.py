"""An example call of the tiny FLUX.1 checkpoint."""

from __future__ import annotations

from typing import Any

from .. import _tiny_calls
from .tiny import build_tiny as build_tiny


def example_call(*, prompt: str, seed: int, height: int = 32, width: int = 48, steps: int = 2) -> dict[str, Any]:
    """Give the keyword arguments of a call with both guidances: the embedded one, and true guidance in two passes.

    Args:
        prompt: What to draw; always padded to 512 tokens.
        seed: Seed of the noise.
        height: In pixels, a multiple of 16.
        width: In pixels, a multiple of 16.
        steps: Denoising steps.

    Returns:
        Keyword arguments of ``pipe(...)``.
    """
    return _tiny_calls.call(
        prompt=prompt,
        seed=seed,
        height=height,
        width=width,
        steps=steps,
        negative_prompt=_tiny_calls.NEGATIVE_PROMPT,
        true_cfg_scale=2.0,
    )
