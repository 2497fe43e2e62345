"""Put LoRA adapters on for one request of a plan, and everything back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from bcg.errors import PlanError

from .plan import Adapters


def check_adapters(pipe: Any, wanted: Sequence[Adapters | None]) -> None:
    """Raise where a plan names adapters that are not loaded.

    Raises:
        PlanError: An adapter is missing; the message names those that are there.
    """
    names = {name for adapters in wanted if adapters for name, _ in adapters}
    if not names:
        return
    present = {name for found in _listed(pipe).values() for name in found}
    if names - present:
        raise PlanError(
            f"the plan names adapters that are not loaded: {', '.join(sorted(names - present))}. Call "
            f"pipe.load_lora_weights(..., adapter_name=...) before; loaded are: {', '.join(sorted(present)) or 'none'}."
        )


def has_adapters(pipe: Any) -> bool:
    """Tell whether a pipeline has LoRA adapters loaded, active or not."""
    return bool(_listed(pipe))


def _listed(pipe: Any) -> dict[str, list[str]]:
    return dict(pipe.get_list_adapters()) if hasattr(pipe, "get_list_adapters") else {}


@contextlib.contextmanager
def adapters_active(pipe: Any, adapters: Adapters | None) -> Iterator[None]:
    """Activate a set of adapters as a user does, with ``set_adapters`` or ``disable_lora``, and put back what was.

    Args:
        pipe: The pipeline.
        adapters: Names and weights; empty for none, None to leave everything as it is.

    Yields:
        Nothing.
    """
    if adapters is None or not _listed(pipe):
        yield
        return
    before = [_LayerState(layer) for layer in _adapter_layers(pipe)]
    try:
        if adapters:
            pipe.enable_lora()
            pipe.set_adapters([name for name, _ in adapters], [weight for _, weight in adapters])
        else:
            pipe.disable_lora()
        yield
    finally:
        for state in before:
            state.restore()


def _adapter_layers(pipe: Any) -> Iterator[Any]:
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            for module in component.modules():
                if isinstance(getattr(module, "scaling", None), dict) and hasattr(module, "active_adapters"):
                    yield module


class _LayerState:
    """What activating adapters changes in one of peft's layers."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        # The very object: set_adapters gives all layers one list, and a module that shares is not one that does not.
        self._active = layer._active_adapter
        self._scaling = dict(layer.scaling)
        self._is_disabled = bool(layer._disable_adapters)
        self._gradients = [(parameter, parameter.requires_grad) for parameter in layer.parameters()]

    def restore(self) -> None:
        self._layer._active_adapter = self._active
        self._layer.scaling.update(self._scaling)
        self._layer._disable_adapters = self._is_disabled
        for parameter, requires_grad in self._gradients:
            parameter.requires_grad_(requires_grad)
