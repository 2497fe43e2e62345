"""Where in the user's code something happens: the submodule and the source line."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from types import FrameType

import torch
from torch import nn

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_INTERNAL = (_HERE, _TORCH)


@dataclass(frozen=True)
class Where:
    """Name a place in a module's forward.

    Attributes:
        file: Path of the source file.
        line: Line number.
        modules: Submodules whose methods are on the stack, innermost first, by their names in the captured module.
    """

    file: str
    line: int
    modules: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Name of the innermost submodule; empty for the captured module itself."""
        return self.modules[0] if self.modules else ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        return f"{self.module} ({place})" if self.module else place


class _Names(threading.local):
    by_id: dict[int, str] | None = None


_names = _Names()


class naming:
    """Let `where` name the submodules of a module while a block runs on this thread."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._outer = _names.by_id
        _names.by_id = {id(child): name for name, child in self._module.named_modules()}

    def __exit__(self, *exception: object) -> None:
        _names.by_id = self._outer


def where() -> Where:
    """Return the innermost place outside torch and bcg that led here."""
    frame: FrameType | None = sys._getframe(1)
    place: tuple[str, int] | None = None
    modules: list[str] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_INTERNAL):
            place = place or (file, frame.f_lineno)
            _note_module(frame, modules)
        elif place is not None and file.startswith(_HERE):
            break  # back in bcg: below is the caller of the captured module
        frame = frame.f_back
    file, line = place or ("<unknown>", 0)
    return Where(file, line, tuple(modules))


def _note_module(frame: FrameType, modules: list[str]) -> None:
    if _names.by_id is None:
        return  # reading `f_locals` makes a copy that lives as long as the frame, with every tensor in it
    owner = frame.f_locals.get("self")
    if not isinstance(owner, nn.Module):
        return
    name = _names.by_id.get(id(owner))
    if name is not None and name not in modules:
        modules.append(name)
