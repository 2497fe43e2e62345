"""Everything that bcg knows of diffusers, peft and accelerate.

Objects of these libraries are recognised by class names and attributes; none of the libraries is imported, and a name
that is missing in some version finds nothing. General rules come first (a hook that says it is stateful), names second.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from torch import nn

_DIFFUSERS_DISPATCH: Final = "diffusers.models.attention_dispatch"
_DISPATCH_FUNCTION: Final = "dispatch_attention_fn"
_MISSING: Final = object()
# They hold all scores at once, or need to be compiled to be of use: never chosen, and costly to try.
_NEVER_FASTER: Final = frozenset({"_native_math", "flex"})

_ACCELERATE_OFFLOAD: Final = frozenset({"AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook"})
_GROUP_OFFLOAD: Final = frozenset(
    {"GroupOffloadingHook", "LazyPrefetchGroupOffloadingHook", "LayerExecutionTrackerHook"}
)
_LAYERWISE_CASTING: Final = frozenset({"LayerwiseCastingHook"})
_STEP_CACHES: Final = frozenset(
    {
        "FBCHeadBlockHook",
        "FBCBlockHook",
        "FasterCacheBlockHook",
        "FasterCacheDenoiserHook",
        "MagCacheBlockHook",
        "MagCacheHeadHook",
        "PyramidAttentionBroadcastHook",
        "SeaCacheBlockHook",
        "SeaCacheLeaderBlockHook",
        "SeaCachePostNormHook",
        "SeaCacheRootHook",
        "TaylorSeerCacheHook",
        "TextKVCacheBlockHook",
        "TextKVCacheTransformerHook",
    }
)

# Whether adapters were ever loaded: unloading leaves it behind.
_MODULE_BOOKKEEPING: Final = frozenset({"_hf_peft_config_loaded"})

_OFFLOAD_REASON: Final = (
    "moves weights between devices around a forward, and a graph would read the addresses they left. "
    "Remove the offload hooks (keep the module on its device), or leave this module unwrapped."
)
_CASTING_REASON: Final = (
    "replaces the weights by casted copies in every forward, and a graph would read the addresses they left. "
    "Load the module in its compute dtype, or leave it unwrapped."
)
_CACHE_REASON: Final = (
    "keeps state between steps and decides in Python what to compute, and a graph would repeat one step's decision "
    "for all. Call disable_cache() (remove the hook), or leave this module unwrapped."
)


def refusal(module: nn.Module) -> str | None:
    """Tell why no graph may be used for a module as it stands.

    Args:
        module: The module that is to be captured; its submodules are looked at too.

    Returns:
        A sentence that says what was seen and where, why it is refused and what to do instead; None where nothing
        speaks against graphs. Context-parallel and layer-skip hooks are not refused.

    Example:
        >>> refusal(nn.Linear(2, 2)) is None
        True
    """
    for path, submodule in module.named_modules():
        for found in (_accelerate_hooks(submodule), _diffusers_hooks(submodule)):
            for hook in found:
                reason = _hook_reason(hook)
                if reason is not None:
                    return f"The hook {type(hook).__name__} on {_place(path)} {reason}"
    return _device_map_reason(module) or _device_reason(module)


def ambient_probes() -> tuple[Any, ...]:
    """Return the process-wide state of libraries that chooses kernels.

    Returns:
        The attention backend that diffusers uses where a processor names none; empty without diffusers.

    Example:
        >>> isinstance(ambient_probes(), tuple)
        True
    """
    dispatch = sys.modules.get(_DIFFUSERS_DISPATCH)
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    return () if registry is None else (getattr(registry, "_active_backend", None),)


def attention_backends(module: nn.Module) -> tuple[str, ...]:
    """Return the attention backends of diffusers that a module may be run with here.

    Args:
        module: A module.

    Returns:
        Names of installed backends other than the present one, without those that must be downloaded first; empty for a
        module none of whose attention processors can be given a backend.

    Example:
        >>> attention_backends(nn.Linear(2, 2))
        ()
    """
    dispatch = sys.modules.get(_DIFFUSERS_DISPATCH)
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    present = _present_backends(module)
    if registry is None or not present or not hasattr(dispatch, _DISPATCH_FUNCTION):
        return ()
    active = getattr(registry, "_active_backend", None)
    in_use = {_text(active if backend is None else backend) for backend in present}
    names = [_text(backend) for backend in getattr(registry, "_backends", {}) if _is_installed(dispatch, backend)]
    return tuple(name for name in names if in_use != {name} and name not in _NEVER_FASTER)


def attention_redirection(backend: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return diffusers' attention function, and one that does the same with another backend.

    Args:
        backend: One of `attention_backends`.

    Returns:
        The function and its substitute, which raises ValueError where the backend cannot take a call's arguments:
        diffusers would leave out what the backend does not know, such as a mask.
    """
    dispatch = sys.modules[_DIFFUSERS_DISPATCH]
    function = getattr(dispatch, _DISPATCH_FUNCTION)
    registry = dispatch._AttentionBackendRegistry
    name = dispatch.AttentionBackendName(backend)
    known, checks = registry._supported_arg_names[name], registry._constraints[name]
    signature = inspect.signature(function)
    optional = {key: one.default for key, one in signature.parameters.items() if one.default is not one.empty}

    def substitute(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        for key in optional.keys() - known - {"attention_kwargs", "backend", "parallel_config"}:
            if key in given and given[key] is not optional[key] and given[key] != optional[key]:
                raise ValueError(f"attention backend {backend} does not take {key}")
        if given.get("parallel_config") is not None:
            raise ValueError("attention backends are not changed under context parallelism")
        for check in checks:
            check(**{"attn_mask": None, "is_causal": False, **given})
        return function(*args, **{**kwargs, "backend": name})

    return function, substitute


def _text(backend: Any) -> str:
    return str(getattr(backend, "value", backend))


def _present_backends(module: nn.Module) -> list[Any]:
    """Return what the processors of a module's attentions are told to use, of those that can be told."""
    processors = [getattr(child, "processor", None) for child in module.modules()]
    told = [getattr(processor, "_attention_backend", _MISSING) for processor in processors]
    return [backend for backend in told if backend is not _MISSING]


def _is_installed(dispatch: Any, backend: Any) -> bool:
    kernel = getattr(dispatch, "_HUB_KERNELS_REGISTRY", {}).get(backend)
    if kernel is not None and getattr(kernel, "kernel_fn", None) is None:
        return False
    try:
        dispatch._check_attention_backend_requirements(backend)
    except Exception:  # whatever a missing package raises
        return False
    return True


def active_adapters(module: nn.Module) -> tuple[tuple[str, float], ...]:
    """Return the LoRA adapters that take part in a forward.

    Args:
        module: A module, into whose submodules peft may have put adapters.

    Returns:
        Names and weights, as given to ``set_adapters``; empty without adapters and where they are disabled.

    Example:
        >>> active_adapters(nn.Linear(2, 2))
        ()
    """
    found: dict[str, float] = {}
    for submodule in module.modules():
        scaling = getattr(submodule, "scaling", None)
        active = getattr(submodule, "active_adapters", None)
        if not isinstance(scaling, dict) or not isinstance(active, list):
            continue
        if not getattr(submodule, "_disable_adapters", False):
            found.update((name, _adapter_weight(submodule, name)) for name in active if name in scaling)
    return tuple(found.items())


def _adapter_weight(layer: Any, name: str) -> float:
    """Undo peft's scale: the weight is multiplied by alpha and divided by the rank, or by its root."""
    try:
        rank = layer.r[name] ** 0.5 if layer.use_rslora.get(name, False) else layer.r[name]
        return round(float(layer.scaling[name] * rank / layer.lora_alpha[name]), 6)
    except (AttributeError, KeyError, TypeError, ZeroDivisionError):
        return 1.0


def is_inert(value: Any) -> bool:
    """Tell whether an attribute's value changes nothing: diffusers' hook registry while it holds no hook.

    ``cache_context`` leaves one on the module in the first pipeline call, and removed hooks leave one behind.
    """
    return is_hook_registry(value) and not value.hooks


def is_hook_registry(value: Any) -> bool:
    """Tell whether a value is diffusers' HookRegistry."""
    return type(value).__name__ == "HookRegistry" and isinstance(getattr(value, "hooks", None), dict)


def bookkeeping_attributes(value: Any) -> frozenset[str]:
    """Return the names of an object's attributes that no forward depends on."""
    if isinstance(value, nn.Module):
        return _MODULE_BOOKKEEPING
    return frozenset({"_child_registries_cache"}) if is_hook_registry(value) else frozenset()


def unread_adapters(layer: Any) -> frozenset[str]:
    """Return the LoRA adapters of a layer whose scale its forward does not read: those that are not active.

    ``set_adapters`` leaves the scale of an adapter that it switches off as it last was; the graphs of the one that it
    switches on must be found all the same.

    Args:
        layer: Any module. A layer with merged adapters, or one that may unmerge in its forward, reads all scales.

    Returns:
        Their names.
    """
    scaling, active = getattr(layer, "scaling", None), getattr(layer, "active_adapters", None)
    if type(scaling) is not dict or not isinstance(active, list) or getattr(layer, "merged_adapters", None) != []:
        return frozenset()
    return frozenset(scaling) - frozenset(active)


@functools.lru_cache(maxsize=4096)
def chooses_adapters_in_calls(kind: type) -> bool:
    """Tell whether a class of modules can be told in a call which adapters to use: peft's PeftModel."""
    return any(base.__name__ == "PeftModel" for base in kind.__mro__)


def _place(path: str) -> str:
    return f"submodule {path!r}" if path else "the module itself"


def _accelerate_hooks(module: nn.Module) -> Iterator[Any]:
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        yield from _flatten_sequential(hook)


def _flatten_sequential(hook: Any) -> Iterator[Any]:
    inner = getattr(hook, "hooks", None)
    if isinstance(inner, (list, tuple)):
        for part in inner:
            yield from _flatten_sequential(part)
    else:
        yield hook


def _diffusers_hooks(module: nn.Module) -> Iterable[Any]:
    registry: Any = module.__dict__.get("_diffusers_hook")
    return list(registry.hooks.values()) if is_hook_registry(registry) else ()


def _hook_reason(hook: Any) -> str | None:
    names = {base.__name__ for base in type(hook).__mro__}
    if _is_stateful(hook) or names & _STEP_CACHES:
        return _CACHE_REASON
    if getattr(hook, "offload", None) is True or names & (_ACCELERATE_OFFLOAD | _GROUP_OFFLOAD):
        return _OFFLOAD_REASON
    if names & _LAYERWISE_CASTING:
        return _CASTING_REASON
    return None


def _is_stateful(hook: Any) -> bool:
    held = getattr(hook, "__dict__", {}).values()
    return getattr(hook, "_is_stateful", False) is True or any(type(value).__name__ == "StateManager" for value in held)


def _device_map_reason(module: nn.Module) -> str | None:
    device_map = module.__dict__.get("hf_device_map")
    devices = sorted({str(device) for device in device_map.values()}) if isinstance(device_map, dict) else []
    return _spread(devices, "its device map") if len(devices) > 1 else None


def _device_reason(module: nn.Module) -> str | None:
    devices = sorted({str(parameter.device) for parameter in module.parameters()})
    if "meta" in devices:
        return (
            "The module has weights on the meta device, which hold no numbers (offloaded, or not loaded yet). "
            "Load it onto its device before a capture."
        )
    return _spread(devices, "its weights") if len(devices) > 1 else None


def _spread(devices: list[str], source: str) -> str:
    return (
        f"The module is spread over {', '.join(devices)} by {source}, and a graph runs on one device. "
        "Put the module on one device, or leave it unwrapped."
    )
