"""The state around a call: every flag changes it, and nothing that reads it raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from bcg.ambient import ambient_refusal, ambient_state, describe


@contextmanager
def changed(getter: Callable[[], Any], setter: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = getter()
    setter(value)
    try:
        yield
    finally:
        setter(before)


def attribute(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    return changed(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)


@contextmanager
def deterministic(warn_only: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
FLAGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    # Not the context manager: without a GPU it switches itself off.
    "autocast cuda": lambda: changed(
        lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on), True
    ),
    "autocast cuda dtype": lambda: changed(
        lambda: torch.get_autocast_dtype("cuda"), lambda new: torch.set_autocast_dtype("cuda", new), torch.bfloat16
    ),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "default dtype": lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": lambda: torch.device("meta"),
    "deterministic": lambda: deterministic(False),
    "deterministic, warn only": lambda: deterministic(True),
    "float32 matmul precision": lambda: changed(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
    ),
    "cudnn TF32": lambda: attribute(cudnn, "allow_tf32", False),
    "cudnn": lambda: attribute(cudnn, "enabled", False),
    "cudnn benchmark": lambda: attribute(cudnn, "benchmark", True),
    "cudnn deterministic": lambda: attribute(cudnn, "deterministic", True),
    "flash SDPA": lambda: changed(cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
    "memory-efficient SDPA": lambda: changed(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False),
    "math SDPA": lambda: changed(cuda.math_sdp_enabled, cuda.enable_math_sdp, False),
    "cuDNN SDPA": lambda: changed(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
    "SDPA priority": lambda: torch.nn.attention.sdpa_kernel(
        [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION], set_priority=True
    ),
    "bf16 reduction": lambda: attribute(cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "fp16 reduction": lambda: attribute(cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_changes_the_state_and_is_named(flag: str) -> None:
    before = ambient_state()
    with FLAGS[flag]():
        inside = ambient_state()
    assert inside != before
    assert describe(before, inside)
    assert ambient_state() == before
    assert hash(ambient_state()) == hash(before)


def test_all_these_states_differ_from_each_other() -> None:
    states = []
    for flag in FLAGS.values():
        with flag():
            states.append(ambient_state())
    assert len(set(states)) == len(states)


def test_the_difference_says_expected_and_got() -> None:
    before = ambient_state()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        lines = describe(before, ambient_state())
    assert "gradients: expected True, got False" in lines
    assert "autocast: expected off, got cpu torch.bfloat16, with cache" in lines


def test_the_new_precision_setting_does_not_make_reading_raise() -> None:
    before = ambient_state()
    with attribute(cuda.matmul, "fp32_precision", "tf32"):
        with pytest.raises(RuntimeError):
            _ = cuda.matmul.allow_tf32
        assert "float32 precision of cuda matmul: expected ieee, got tf32" in describe(before, ambient_state())


class UserFunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class UserDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("around", "word"),
    [
        (lambda: FlopCounterMode(display=False), "FlopCounterMode"),
        (UserFunctionMode, "UserFunctionMode"),
        (UserDispatchMode, "UserDispatchMode"),
        (torch.autograd.graph.save_on_cpu, "saved-tensor"),
        (torch.autograd.forward_ad.dual_level, "forward-mode"),
    ],
    ids=["flop counter", "function mode", "dispatch mode", "saved-tensor hooks", "forward AD"],
)
def test_what_a_replay_would_bypass_is_a_reason(around: Callable[[], Any], word: str) -> None:
    with around():
        assert word in (ambient_refusal() or "")
    assert ambient_refusal() is None


def test_a_default_device_is_no_reason() -> None:
    with ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))
        assert ambient_refusal() is None


def test_a_functorch_transform_is_a_reason() -> None:
    reasons = []
    torch.func.vmap(lambda x: reasons.append(ambient_refusal()) or x)(torch.ones(2))  # type: ignore[func-returns-value]
    assert "torch.func" in str(reasons[0])


@pytest.mark.filterwarnings("ignore")
def test_tracing_is_a_reason() -> None:
    reasons = []

    def function(x: torch.Tensor) -> torch.Tensor:
        reasons.append(ambient_refusal())
        return x + 1

    torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert "torch.jit.trace" in str(reasons[0])
