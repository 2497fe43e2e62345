"""Every private torch API that bcg uses, on the torch that is installed."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from bcg import _torch

# --- ambient state


def test_modes_are_listed_innermost_last() -> None:
    assert _torch.function_modes() == []
    assert _torch.dispatch_modes() == []
    with torch.device("meta"), FakeTensorMode() as outer, FlopCounterMode(display=False):
        assert len(_torch.function_modes()) == 1
        first, last = _torch.dispatch_modes()
        assert first is outer
        assert last is not outer


def test_transforms_are_seen() -> None:
    assert not _torch.in_functorch_transform()
    seen: list[bool] = []
    torch.func.vmap(lambda x: seen.append(_torch.in_functorch_transform()) or x)(torch.ones(2))  # type: ignore[func-returns-value]
    assert seen == [True]
    assert _torch.forward_ad_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert _torch.forward_ad_level() == 0
    assert not _torch.is_jit_tracing()


def test_saved_tensor_hooks_are_seen() -> None:
    assert not _torch.saved_tensor_hooks_active()
    with torch.autograd.graph.save_on_cpu():
        assert _torch.saved_tensor_hooks_active()


def test_autocast_is_seen_on_any_device_type() -> None:
    assert {"cpu", "cuda"} <= set(_torch.autocast_device_types())
    assert not _torch.any_autocast()
    with torch.autocast("cpu", torch.bfloat16):
        assert _torch.any_autocast()


def test_float32_precision_and_flags_can_be_read() -> None:
    for backend in ("cuda", "mkldnn"):
        for operation in ("matmul", "conv", "rnn"):
            assert _torch.fp32_precision(backend, operation) in {"ieee", "tf32", "bf16"}
    assert {"flash SDPA", "cuDNN", "bf16 reduced-precision reduction"} <= set(_torch.flag_getters())
    for getter in _torch.flag_getters().values():
        hash(getter())
    assert all(isinstance(backend, int) for backend in _torch.sdpa_priority_order())
