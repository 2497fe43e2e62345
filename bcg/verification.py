"""Compare a captured entry with eager on inputs that the capture did not see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bcg import trees
from bcg.layout import extent, without_repeats

# Compiled code rounds otherwise than eager. The limit is on ||got - expected|| / ||expected||; regional compilation of
# published models moves a bf16 result by about 2 %, float32 by far less.
CLOSE_LIMITS = {torch.bfloat16: 0.1, torch.float16: 0.05}
CLOSE_LIMIT_DEFAULT = 0.01
_SEED = 20_231


def fresh_inputs(live: Sequence[Tensor]) -> list[Tensor]:
    """Return inputs with other values that a forward can work with as well.

    Floating-point tensors have their own elements permuted; tensors of one value are scaled by a factor between 0.5 and
    1, and zeros stay zeros. Masks (only zeros and ones), integers and booleans are kept, since they steer shapes:
    values drawn anew gave false guard misses and could index out of range.

    Args:
        live: The tensors of a call.

    Returns:
        New tensors of the same shapes, dtypes, devices and strides.
    """
    generator = torch.Generator().manual_seed(_SEED)
    return [_fresh(tensor, generator) for tensor in live]


def _fresh(tensor: Tensor, generator: torch.Generator) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        result = _empty_alike(tensor)
        own = without_repeats(result)
        source = without_repeats(tensor)
        own.copy_(source)
        if not tensor.is_floating_point() or own.numel() == 0 or _is_mask(own):
            return result
        if bool((own == own.flatten()[0]).all()):
            factor = 0.5 + 0.5 * torch.rand((), generator=generator).item()
            own.mul_(factor)
            return result
        order = torch.randperm(own.numel(), generator=generator).to(own.device)
        own.copy_(own.flatten()[order].reshape(own.shape))
        return result


def _empty_alike(tensor: Tensor) -> Tensor:
    memory = torch.zeros(extent(tensor.shape, tensor.stride()), dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride()) if tensor.numel() else torch.empty_like(tensor)


def _is_mask(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


def difference(expected: Any, got: Any, *, close: bool) -> str | None:
    """Compare two results of a forward, tensor by tensor.

    Args:
        expected: What eager returned.
        got: What the replay returned.
        close: Allow the tolerance of compiled code; bit for bit otherwise (NaN equals NaN).

    Returns:
        None where they agree; else which output differs and by how much.
    """
    one, other = trees.flatten(expected), trees.flatten(got)
    if one.structure != other.structure:
        return f"another structure: expected {one.structure.node}, got {other.structure.node}"
    for path, left, right in zip(one.structure.paths, one.leaves, other.leaves, strict=True):
        text = _leaf_difference(left, right, close)
        if text is not None:
            return f"output{path}: {text}"
    return None


def _leaf_difference(expected: Any, got: Any, close: bool) -> str | None:
    if not isinstance(expected, Tensor):
        same = type(expected) is type(got) and (expected is got or repr(expected) == repr(got))
        return None if same else f"expected {expected!r}, got {got!r}"
    if not isinstance(got, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
        form = f"{got.dtype}{list(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
        return f"expected {expected.dtype}{list(expected.shape)}, got {form}"
    if bool(torch.eq(expected, got).logical_or(expected.isnan().logical_and(got.isnan())).all()):
        return None
    if not expected.is_floating_point():
        return f"{int((expected != got).sum())} of {expected.numel()} elements differ"
    relative = _relative_distance(expected, got)
    if close and relative <= CLOSE_LIMITS.get(expected.dtype, CLOSE_LIMIT_DEFAULT):
        return None
    return f"{int((expected != got).sum())} of {expected.numel()} elements differ, relative distance {relative:.3g}"


def _relative_distance(expected: Tensor, got: Tensor) -> float:
    wide_expected, wide_got = expected.double(), got.double()
    # Equal infinities and NaN in both are no distance; a NaN or an infinity in one of them is one without end.
    agree = (wide_expected == wide_got) | (wide_expected.isnan() & wide_got.isnan())
    error = (wide_got - wide_expected).masked_fill(agree, 0.0).norm()
    scale = wide_expected.nan_to_num(0.0, 0.0, 0.0).norm().clamp_min(1e-30)
    return float((error / scale).nan_to_num(torch.inf, torch.inf))
