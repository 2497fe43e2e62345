"""A module's stand-in: everything but the call is the module's own."""

from __future__ import annotations

import copy
import functools
from typing import Any

import wrapt
from torch import nn

from bcg.errors import NotAModuleError

# Methods of nn.Module that return the module: through the stand-in they return the stand-in, so that
# `bcg.wrap(module).to("cuda")` stays wrapped.
_RETURN_SELF = (
    "apply", "bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "requires_grad_", "share_memory", "to",
    "to_empty", "train", "type",
)  # fmt: skip


class ModuleProxy(wrapt.ObjectProxy):  # type: ignore[type-arg]  # generic in wrapt's stubs alone
    """Stand in for a module wherever diffusers, accelerate or peft looks at it.

    ``isinstance`` and ``x.__class__`` say the module's class; attribute reads and writes go to the module. What a
    subclass keeps for itself is named ``_self_…``.

    Args:
        module: The module.

    Raises:
        NotAModuleError: It is not an ``nn.Module``, or has no forward.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise NotAModuleError(
                f"got {type(module).__name__}, which is not a torch.nn.Module: wrap the denoiser itself, for example "
                "pipe.transformer, and not the pipeline or a function."
            )
        if _has_no_forward(module):
            raise NotAModuleError(
                f"{type(module).__name__} has no forward and so cannot be called: wrap the module that the pipeline "
                "calls."
            )
        super().__init__(module)

    @property
    def transformer(self) -> nn.Module:
        """The module itself."""
        module: nn.Module = self.__wrapped__
        return module

    def _rewrap(self, module: nn.Module) -> ModuleProxy:
        """Return a stand-in of the same kind and options for another module."""
        return type(self)(module)

    def __copy__(self) -> ModuleProxy:
        return self._rewrap(copy.copy(self.__wrapped__))

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleProxy:
        # No graphs come along: they would read the original's weights.
        twin = self._rewrap(copy.deepcopy(self.__wrapped__, memo))
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.__wrapped__,)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return self.__reduce__()


def _has_no_forward(module: nn.Module) -> bool:
    return "forward" not in module.__dict__ and type(module).forward is nn.Module.forward


def _returning_self(name: str) -> Any:
    original = getattr(nn.Module, name)

    @functools.wraps(original)
    def method(self: ModuleProxy, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.__wrapped__, name)(*args, **kwargs)
        return self if result is self.__wrapped__ else result

    return method


for _name in _RETURN_SELF:
    setattr(ModuleProxy, _name, _returning_self(_name))
