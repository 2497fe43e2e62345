"""Every private torch API that bcg uses, and nothing else.

These move between releases, so each stands in one function with the reason it is needed; tests/test_torch_private.py
calls every one on the installed torch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator as HigherOrderOperator  # the class of `torch.cond` and its like
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._device import DeviceContext as DeviceContext  # what `with torch.device(...)` is; nothing public
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A mode that sees every operation, higher-order operators such as `torch.cond` among them.

    Enter `uncompiled` with it. Dynamo gives up on a frame that it meets beside an ordinary mode, and for good: the
    function is never compiled again in the process, and one that must be compiled whole (`torch.cond`, `flex_attention`
    compile themselves) raises from then on, also in eager calls. A mode that ignores what is compiled is no reason.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its modes untyped

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell dynamo not to give up a function for this mode."""
        return True


class _Uncompiled(threading.local):
    """Where on this thread functions that were compiled run as they are written."""

    def __init__(self) -> None:
        self.applies: list[Callable[[], bool]] = []


_uncompiled = _Uncompiled()
_uncompiled_lock = threading.Lock()
_uncompiled_users = 0


@contextlib.contextmanager
def uncompiled(applies: Callable[[], bool]) -> Iterator[None]:
    """Let functions that were compiled run as they are written, on this thread alone, while a block runs.

    Kernels of compiled code do not dispatch, so nothing in them is seen: neither what they write nor what they read.
    `torch.compiler.set_stance("force_eager")` is for all threads; this answers for one in the place that asks for it.

    Args:
        applies: Asked at each call of a compiled function.
    """
    global _uncompiled_users
    from torch._dynamo import eval_frame

    with _uncompiled_lock:
        if _uncompiled_users == 0:
            eval_frame._callback_from_stance = _uncompiled_callback(eval_frame._callback_from_stance)
        _uncompiled_users += 1
    _uncompiled.applies.append(applies)
    try:
        yield
    finally:
        _uncompiled.applies.remove(applies)
        with _uncompiled_lock:
            _uncompiled_users -= 1
            if _uncompiled_users == 0:
                eval_frame._callback_from_stance = eval_frame._callback_from_stance.__wrapped__  # type: ignore[attr-defined]


def _uncompiled_callback(original: Callable[..., Any]) -> Any:
    @wraps(original)
    def callback_from_stance(*args: Any, **kwargs: Any) -> Any:
        if not any(applies() for applies in _uncompiled.applies):
            return original(*args, **kwargs)
        _count_no_graphs()
        return None  # as in the stance "force_eager"

    return callback_from_stance


def _count_no_graphs() -> None:
    """Let ``fullgraph=True`` pass without a graph: torch 2.13 counts them, and raises at none but in its own stance."""
    count_from = getattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    if count_from is not None:
        count_from(-1)  # off, until the next function that is to be one graph


class WrittenArgument(NamedTuple):
    """Where an operator takes an argument that it writes to."""

    position: int
    name: str


@cache
def written_arguments(operator: Any) -> tuple[WrittenArgument, ...]:
    """Return the arguments that an operator writes to, from its schema (no public accessor exists)."""
    arguments = operator._schema.arguments
    return tuple(
        WrittenArgument(position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def argument_position(operator: Any, name: str) -> int | None:
    """Return the position of an operator's argument, or None where it has no such argument."""
    names = [argument.name for argument in operator._schema.arguments]
    return names.index(name) if name in names else None


@cache
def can_decompose(operator: Any, device_type: str) -> bool:
    """Tell whether an operator is made of others on a device; under inference mode such ones reach a dispatch mode
    whole.

    An operator with a kernel of its own there (``_fused_rms_norm`` on CUDA) must not be taken apart: eager runs the
    kernel.
    """
    key = {"cpu": "CPU", "cuda": "CUDA"}[device_type]
    own_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
    return bool(operator._can_decompose()) and not own_kernel


def operator_name(operator: Any) -> str:
    """Return ``aten::index.Tensor`` for an operator overload."""
    return str(operator.name())


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others in as few kernels as torch can; there is no public batched copy."""
    torch._foreach_copy_(list(targets), list(sources))


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share a storage, while one of them lives."""
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Run a block with no TorchDispatchMode on this thread (torch has no public way to step out of them)."""
    with python_dispatch._disable_current_modes():
        yield


@contextlib.contextmanager
def without_function_mode(mode: Any) -> Iterator[None]:
    """Run a block with one TorchFunctionMode taken off this thread's stack and the others left on.

    ``torch._C.DisableTorchFunction`` would also switch off ``with torch.device(...)``, which is a function mode.
    """
    stack = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    others = [entry for entry in stack if entry is not mode]
    for entry in reversed(others):
        torch._C._push_on_torch_function_stack(entry)
    try:
        yield
    finally:
        for _ in others:
            torch._C._pop_torch_function_stack()
        for entry in reversed(stack):
            torch._C._push_on_torch_function_stack(entry)


def wrapper_of(kind: type[Tensor], content: Tensor, device: str) -> Any:
    """Return a tensor of a subclass with another tensor's form on another device, and no memory.

    torch documents ``_make_wrapper_subclass`` by examples alone.
    """
    return Tensor._make_wrapper_subclass(
        kind, content.size(), strides=content.stride(), storage_offset=int(content.storage_offset()),
        dtype=content.dtype, layout=content.layout, device=torch.device(device), requires_grad=False,
    )  # fmt: skip


# What a tensor subclass sets as ``__torch_function__`` where functions treat it as any tensor; public in name only.
without_torch_function = torch._C._disabled_torch_function_impl


def end_allocate_to_pool(device: torch.device, pool_handle: Any) -> bool:
    """Stop allocations from going to a graph pool after a capture that CUDA invalidated.

    ``CUDAGraph.capture_end`` of torch 2.11 raises before it does so itself (pytorch#180395), and the pool then keeps
    what is allocated later.

    Returns:
        Whether there was anything to stop. Then torch's allocator of pinned host memory, which no call stops, still
        records for the handle, too: no capture may use the handle again, and the graph must live on, since the
        allocator asks it (``beginAllocateToPool: already recording``).
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool_handle)
    except RuntimeError:  # not currently recording: torch has stopped by itself
        return False
    return True


def release_pool(device: torch.device, pool_handle: Any) -> None:
    """Give back the use count that a begun capture took on a graph pool (pytorch#190348).

    From 2.14 on it is left to ``CUDAGraph.reset``: a count that is given back twice ends the process.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        torch._C._cuda_releasePool(device.index, pool_handle)


def pool_segments(pool_handles: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the first and past-the-end addresses of the memory of graph pools.

    Taken from the snapshot of all memory, asked for without arguments: ``torch.cuda.memory_snapshot`` passes a tuple,
    and gives away references to its elements that it does not own (seen in 2.11 and 2.13). Where these are no immortal
    objects, which are integers from 257 on and before Python 3.12 all of them, the process dies of it later.
    """
    segments = torch._C._cuda_memorySnapshot(None)["segments"]
    return [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in segments
        if segment["segment_pool_id"] in pool_handles
    ]


# --- ambient state ----------------------------------------------------------------------------------------------------


def function_modes() -> list[Any]:
    """Return the active `TorchFunctionMode`s of this thread, innermost last; no public call lists them."""
    if not torch._C._len_torch_function_stack():
        return []
    return list(torch.overrides._get_current_function_mode_stack())


def dispatch_modes() -> list[Any]:
    """Return the active `TorchDispatchMode`s of this thread, innermost last; no public call lists them."""
    if not torch._C._len_torch_dispatch_stack():
        return []
    return list(python_dispatch._get_current_dispatch_mode_stack())


def in_functorch_transform() -> bool:
    """Tell whether vmap, grad, jvp or functionalize is active; there is no public question for it."""
    return torch._C._functorch.maybe_current_level() is not None


def is_jit_tracing() -> bool:
    """Tell whether `torch.jit.trace` is at work; ``torch.jit.is_tracing`` is no typed export and is to be removed."""
    return torch._C._get_tracing_state() is not None


def forward_ad_level() -> int:
    """Return the depth of forward-mode differentiation, -1 outside; `torch.autograd.forward_ad` keeps it private."""
    return int(torch.autograd.forward_ad._current_level)


def saved_tensor_hooks_active() -> bool:
    """Tell whether default saved-tensor hooks are set; the public context managers only set and unset them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def any_autocast() -> bool:
    """Tell whether autocast is on for any device type, without asking about each."""
    return torch._C._is_any_autocast_enabled()


def autocast_device_types() -> tuple[str, ...]:
    """Return the device types that autocast knows; the public list is a copy made at import."""
    return tuple(torch._C._autocast_supported_devices())


def fp32_precision(backend: str, operation: str) -> str:
    """Return how float32 operations of a backend are computed.

    The public ``allow_tf32`` and `torch.get_float32_matmul_precision` raise once a user has set ``fp32_precision``
    (pytorch 2.9 and newer); this getter sees what either of them set and never raises. Nothing set ("none") computes as
    "ieee" does, which is what setting the default by hand leaves behind.
    """
    precision = torch._C._get_fp32_precision_getter(backend, operation)
    return "ieee" if precision == "none" else str(precision)


def flag_getters() -> dict[str, Callable[[], Any]]:
    """Return getters of process-wide flags that choose kernels, by name.

    The public ones are module properties and functions in Python, ten times as slow, and are read in every call. A
    getter that this version of torch lacks is left out.
    """
    names = {
        "flash SDPA": "_get_flash_sdp_enabled",
        "memory-efficient SDPA": "_get_mem_efficient_sdp_enabled",
        "math SDPA": "_get_math_sdp_enabled",
        "cuDNN SDPA": "_get_cudnn_sdp_enabled",
        "FA3 SDPA": "_get_fa3_sdp_enabled",
        "math SDPA reduced-precision reduction": "_get_math_sdp_allow_fp16_bf16_reduction",
        "fp16 reduced-precision reduction": "_get_cublas_allow_fp16_reduced_precision_reduction",
        "bf16 reduced-precision reduction": "_get_cublas_allow_bf16_reduced_precision_reduction",
        "fp16 accumulation": "_get_cublas_allow_fp16_accumulation",
        "cuDNN": "_get_cudnn_enabled",
        "cuDNN benchmark": "_get_cudnn_benchmark",
        "cuDNN deterministic": "_get_cudnn_deterministic",
        "MKL-DNN": "_get_mkldnn_enabled",
        "filling of uninitialized memory": "_get_deterministic_fill_uninitialized_memory",
    }
    return {name: getattr(torch._C, getter) for name, getter in names.items() if hasattr(torch._C, getter)}


def sdpa_priority_order() -> tuple[int, ...]:
    """Return in which order SDPA tries its backends; `torch.nn.attention` only sets it."""
    return tuple(torch._C._get_sdp_priority_order())


# --- module state -----------------------------------------------------------------------------------------------------


def dict_version_function() -> Callable[[Any], int] | None:
    """Return a function that gives a dict's version, or None where this torch has none.

    A version is a number that only grows and changes with every write to the dict, so one addition proves that a
    thousand dicts are as they were. CPython keeps it (a tag up to 3.11, watchers from 3.12) and shows it to C only.
    """
    try:
        from torch._C._dynamo.guards import dict_version

        probe: dict[str, int] = {"a": 1}
        before = dict_version(probe)
        probe["a"] = 2
        return dict_version if dict_version(probe) > before else None
    except Exception:
        return None


def tensor_guard(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """Return a function of the same tensors that tells whether types, dtypes, devices, shapes and strides are kept.

    None where this torch has none. Five times as fast as the public getters. It is also False where only autograd or a
    thread-local mode differs.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(tensor.size()) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        guard: Any = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return guard.check if guard.check(*tensors) else None
    except Exception:
        return None


def global_forward_hooks() -> dict[str, Any]:
    """Return by name the dicts of hooks that run in every module's forward; in public they can only be registered."""
    names = ("_global_forward_hooks", "_global_forward_pre_hooks")
    return {name: getattr(torch.nn.modules.module, name, {}) for name in names}


def compiled_attribute(module: torch.nn.Module) -> str | None:
    """Return the attribute through which a compiled module is called, or None for a module that is not compiled.

    ``module.compile()`` sets ``_compiled_call_impl``; ``torch.compile(module)`` and ``torch.compile(module.forward)``
    leave a ``forward`` that carries ``_torchdynamo_orig_callable``. torch has no public test for either.
    """
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "_compiled_call_impl"
    forward = module.__dict__.get("forward")
    return "forward" if hasattr(forward, "_torchdynamo_orig_callable") else None


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether torch.compile stands between a call of a module and its forward."""
    return compiled_attribute(module) is not None


# --- torch.compile ----------------------------------------------------------------------------------------------------


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process; no public counter tells."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compiler_backend(name: str, mode: str, options: Mapping[str, Any]) -> Callable[[Any, Any], Any]:
    """Return what compiles one graph: a backend of torch.compile by name, and inductor with a mode and options.

    `torch.compile` takes either a name with a mode or a callable. Only a callable lets its caller hold what was made,
    and inductor must not make CUDA graphs of its own, whatever the process has set in its config.
    """
    from torch._dynamo.backends.registry import lookup_backend

    compile_graph: Callable[..., Any] = lookup_backend(name)
    if name != "inductor":
        return compile_graph
    from torch._inductor import list_mode_options

    return partial(compile_graph, config_patches={**list_mode_options(mode), **options, "triton.cudagraphs": False})


def unknown_compiler_options(names: Iterable[str]) -> list[str]:
    """Return which names are none of inductor's options."""
    from torch._inductor import list_options

    return sorted(set(names) - set(list_options()))


@contextlib.contextmanager
def raised_recompile_limit(limit: int = 256) -> Iterator[None]:
    """Let one function be compiled for many shapes; at torch's limit of 8 a fullgraph function raises."""
    import torch._dynamo.config as dynamo_config

    names = [name for name in ("recompile_limit", "accumulated_recompile_limit") if hasattr(dynamo_config, name)]
    changes = {name: max(limit, getattr(dynamo_config, name)) for name in names}
    with dynamo_config.patch(**changes):
        yield


def graph_break_errors() -> tuple[type[Exception], ...]:
    """Return what torch.compile raises where ``fullgraph=True`` meets code that it cannot compile in one graph."""
    from torch._dynamo import exc

    return (exc.Unsupported, exc.UserError)
