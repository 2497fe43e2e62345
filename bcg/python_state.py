"""Put a module's Python state back as it was before a forward that was not the user's.

Warm-up forwards and captures run the module's Python. Where that counts, caches or appends, the next real call would
find a state that eager alone would not have led to.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_MAX_OBJECTS = 200_000  # far above the largest transformer; a bound against state without end
_NOT_STATE = (Tensor, nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, str, bytes)


class PythonState:
    """Remember what every submodule's attributes refer to, and what the containers among them hold.

    Args:
        module: The module; tensors are not copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self._saved: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        for child in module.modules():
            self._save(child.__dict__)

    def _save(self, root: Any) -> None:
        pending = [root]
        while pending and len(self._seen) < _MAX_OBJECTS:
            value = pending.pop()
            if id(value) in self._seen or isinstance(value, _NOT_STATE):
                continue
            self._seen.add(id(value))
            if isinstance(value, dict):
                self._saved.append((value, dict(value)))
                pending.extend(value.values())
            elif isinstance(value, (list, deque, set)):
                self._saved.append((value, list(value)))
                pending.extend(value)
            elif isinstance(value, tuple):
                pending.extend(value)
            elif isinstance(getattr(value, "__dict__", None), dict):
                pending.append(value.__dict__)

    def restore(self) -> None:
        """Put back every attribute and container that is not as it was."""
        for target, content in self._saved:
            if isinstance(target, dict):
                if not _same_items(target, content):
                    _refill(target, content)
            elif not _same_elements(list(target), content):
                target.clear()
                (target.update if isinstance(target, set) else target.extend)(content)


def _refill(target: dict[Any, Any], content: dict[Any, Any]) -> None:
    # The base's methods, past subclasses that refuse writes (diffusers' FrozenDict).
    base = OrderedDict if isinstance(target, OrderedDict) else dict
    base.clear(target)
    for key, value in content.items():
        base.__setitem__(target, key, value)


def _same_items(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return len(now) == len(before) and list(now) == list(before) and all(now[key] is before[key] for key in before)


def _same_elements(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(left is right for left, right in zip(now, before, strict=True))
