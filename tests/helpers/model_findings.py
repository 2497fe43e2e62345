"""What a capture finds in the tiny diffusers models, and the checks of it that every device shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import bcg
import tiny_models
from bcg.interception import Finding

HERE = torch.device("cpu")

# Guards and breaks that a capture meets, on the tape and on CUDA alike, by kind and name.
EXPECTED: dict[str, dict[tuple[str, str], int]] = {
    "cogview4": {},
    "glm_image": {("break", "aten::index"): 1, ("break", "aten::index_put_"): 1},
    "chroma": {},
    "kandinsky5": {},
    "qwen_image_masked": {},
    "qwen_image_edit_2511": {},
    "skyreels_v2": {},
    "lumina2": {("guard", "tolist"): 1},
    "mochi": {("break", "aten::nonzero"): 6},
    "hunyuan_video15": {("break", "aten::index"): 12, ("guard", "aten::_local_scalar_dense"): 1},
    "hunyuan_image": {("break", "aten::index"): 8},
    "hidream": {
        ("module break", "double_stream_blocks.0.block.ff_i"): 1,
        ("module break", "single_stream_blocks.0.block.ff_i"): 1,
        ("guard", "aten::_local_scalar_dense"): 14,
    },
}
# Copies from host to device that are met as well on a device that is not the host, and which no run on the host shows.
HOISTS: dict[str, dict[tuple[str, str], int]] = {
    "cogview4": {("hoist", "aten::_to_copy"): 8},  # cosines and sines for queries and keys of two blocks
    "glm_image": {("hoist", "aten::_to_copy"): 8},
    "chroma": {("hoist", "aten::_to_copy"): 1},
    "kandinsky5": {("hoist", "aten::_to_copy"): 1},
    "qwen_image_masked": {("hoist", "as_tensor"): 1},
    "qwen_image_edit_2511": {("hoist", "tensor"): 1},
    "skyreels_v2": {("hoist", "tensor"): 1},
    "lumina2": {("hoist", "aten::_to_copy"): 3},
    "hidream": {("hoist", "tensor"): 1},
}
# The mask alone tells the prompt's length, and lengths steer shapes there.
STEERED_BY_LENGTH = frozenset({"lumina2", "mochi", "hunyuan_video15", "hunyuan_image"})
# A list of a device tensor is a copy to the host, which the dispatcher sees; of a host tensor it sees nothing.
_SAME_READ = {("guard", "aten::_to_copy"): "tolist"}


def assert_equal(expected: Any, got: Any) -> None:
    """Compare results bit for bit."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def moved(value: Any, device: torch.device) -> Any:
    """Return a nested argument with its tensors on a device; objects of other types are passed as they are."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    return type(value)(moved(item, device) for item in value) if type(value) in (list, tuple) else value


def build(name: str, dtype: torch.dtype, device: torch.device = HERE) -> nn.Module:
    """Return a model on a device."""
    return tiny_models.MODELS[name].build(dtype).to(device)


def arguments(
    name: str, seed: int, dtype: torch.dtype, length: int | None = None, device: torch.device = HERE
) -> dict[str, Any]:
    """Return the keyword arguments of one call on a device; the values are the same on all."""
    return moved(tiny_models.MODELS[name].arguments(seed, dtype, length), device)


def without_hoists(findings: Iterable[Finding]) -> list[Finding]:
    """Return guards and breaks, which are the same on every device."""
    return [finding for finding in findings if finding.kind != "hoist"]


def places(findings: Iterable[Finding]) -> list[tuple[str, str, str, str, int]]:
    """Say of findings in their order what each is, and where."""
    named = [(found.kind, _SAME_READ.get((found.kind, found.name), found.name), found.where) for found in findings]
    return [(kind, called, where.module, where.file, where.line) for kind, called, where in named]


def counted(findings: Iterable[Finding]) -> dict[tuple[str, str], int]:
    """Count findings by kind and name."""
    return dict(Counter((kind, called) for kind, called, *_ in places(findings)))


def check_replays(
    name: str, dtype: torch.dtype, mode: Callable[[], Any], device: torch.device = HERE
) -> tuple[Finding, ...]:
    """Capture a model that nobody prepared, and check that it replays new values exactly and meets what it should.

    Args:
        name: Of the model.
        dtype: Of its weights.
        mode: Makes the context that all calls run under.
        device: Where module and arguments lie.

    Returns:
        What the capture met.
    """
    module = build(name, dtype, device)
    runner = bcg.wrap(module)
    with mode():
        wanted = {seed: module(**arguments(name, seed, dtype, device=device)) for seed in (0, 1, 2)}
        with bcg.warmup():
            assert_equal(wanted[0], runner(**arguments(name, 0, dtype, device=device)))
        assert len(runner.entries) == 1, runner.explain(**arguments(name, 0, dtype, device=device))
        (entry,) = runner.entries.values()
        for seed in (1, 2, 0):
            assert_equal(wanted[seed], runner(**arguments(name, seed, dtype, device=device)))
    assert runner.stats.replays == 3
    assert entry.verified == "exact"
    found = counted(without_hoists(entry.findings))
    assert found == EXPECTED[name]
    breaks = sum(count for (kind, _), count in found.items() if kind.endswith("break"))
    assert (entry.breaks, entry.guards) == (breaks, sum(found.values()) - breaks)
    # A segment of which nothing is to be recorded is dropped.
    assert 1 <= entry.segments <= 1 + entry.breaks + entry.guards
    return tuple(entry.findings)


def check_other_lengths(name: str, dtype: torch.dtype, device: torch.device = HERE) -> None:
    """Check that another prompt length behind one signature is served eagerly, or by a variant of its own.

    Args:
        name: Of a model that is steered by the length.
        dtype: Of its weights.
        device: Where module and arguments lie.
    """
    module = build(name, dtype, device)
    runner = bcg.wrap(module)

    def given(seed: int, length: int | None = None) -> dict[str, Any]:
        return arguments(name, seed, dtype, length, device)

    with torch.no_grad():
        with bcg.warmup():
            runner(**given(0))
        for seed, length in ((1, 5), (2, 12)):
            assert_equal(module(**given(seed, length)), runner(**given(seed, length)))
        assert (runner.stats.guard_misses, runner.stats.replays) == (2, 0)
        with bcg.warmup():
            runner(**given(0, 5))
        for seed, length in ((3, 5), (4, 9), (5, 5)):
            assert_equal(module(**given(seed, length)), runner(**given(seed, length)))
    assert runner.stats.replays == 3
    assert len(runner.entries) == 2
