"""Every private torch API that bcg uses, on the torch that is installed."""

from __future__ import annotations

import sys
from typing import Any

import pytest
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


# --- tensors


def test_a_wrapper_has_the_form_of_its_content_on_another_device_and_no_memory() -> None:
    class Wrapper(torch.Tensor):
        __torch_function__ = _torch.without_torch_function

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return operators.append(func) or content

    operators: list[Any] = []
    content = torch.zeros(4, 3, dtype=torch.bfloat16).t()[1:]
    wrapper = _torch.wrapper_of(Wrapper, content, "meta")
    assert type(wrapper) is Wrapper
    assert (wrapper.shape, wrapper.stride(), wrapper.dtype) == (content.shape, content.stride(), content.dtype)
    assert (wrapper.device.type, wrapper.requires_grad) == ("meta", False)
    assert type(wrapper + 1) is torch.Tensor
    assert operators == [torch.ops.aten.add.Tensor]


# --- torch.compile


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_inductor_makes_no_graphs_of_its_own_whatever_the_process_has_set(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import compile_fx, config

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(compile_fx, "compile_fx", lambda *args, config_patches: seen.append(config_patches))
    with config.patch({"triton.cudagraphs": True}):
        options = {"combo_kernels": True, "triton.cudagraphs": True}
        _torch.compiler_backend("inductor", mode, options)(None, None)
    assert seen[0]["combo_kernels"] is True
    assert seen[0]["triton.cudagraphs"] is False
    assert seen[0].keys() <= config.get_config_copy().keys()
    assert bool(seen[0].get("max_autotune")) == (mode != "default")


def test_other_compilers_are_found_by_name() -> None:
    assert callable(_torch.compiler_backend("aot_eager", "default", {}))
    with pytest.raises(Exception, match="no such compiler"):
        _torch.compiler_backend("no such compiler", "default", {})


def test_options_that_inductor_lacks_are_told() -> None:
    assert _torch.unknown_compiler_options(["combo_kernels", "no_such_thing", "triton.cudagraphs"]) == ["no_such_thing"]


def test_compiled_graphs_are_counted_and_the_recompile_limit_is_raised_for_a_while() -> None:
    import torch._dynamo.config as dynamo_config

    before, limit = _torch.compiled_graphs(), dynamo_config.recompile_limit
    with _torch.raised_recompile_limit():
        assert dynamo_config.recompile_limit >= 256
        torch.compile(lambda x: x + 1, backend="aot_eager", fullgraph=True)(torch.ones(2))
    assert _torch.compiled_graphs() == before + 1
    assert dynamo_config.recompile_limit == limit


def test_a_graph_break_under_fullgraph_raises_one_of_the_named_errors() -> None:
    def breaking(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(_torch.graph_break_errors()):
        torch.compile(breaking, backend="aot_eager", fullgraph=True)(torch.ones(2))


@pytest.mark.skipif(not hasattr(torch._C, "_cuda_memorySnapshot"), reason="this torch is built without CUDA")
def test_a_look_at_graph_pools_gives_no_reference_to_their_handles_away() -> None:
    handle = (0, int("123456789"))
    before = sys.getrefcount(handle[1])
    for _ in range(3):
        assert _torch.pool_segments([handle]) == []
    after = sys.getrefcount(handle[1])  # outside of the assertion, which pytest rewrites to hold on to its parts
    assert after == before
