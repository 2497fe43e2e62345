"""Compile a module's repeated blocks, or all of its forward, for captures alone.

The module stays as it is: compiled forwards stand in for the originals on the thread that captures, while it does. An
eager call never compiles, and its result is eager's.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bcg import _torch
from bcg.config import RunnerConfig
from bcg.model_key import device_key, model_key

_log = logging.getLogger("bcg")


def repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the submodules that a model is made of, over and over.

    diffusers names their classes in ``_repeated_blocks``. Where that is empty they are the members of every
    ``ModuleList`` that holds several modules of one class, unless inside of such a member.

    Args:
        module: The model.

    Returns:
        Names as in ``named_modules``.

    Example:
        >>> model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
        >>> repeated_blocks(model)
        ('blocks.0', 'blocks.1')
    """
    named = getattr(module, "_repeated_blocks", None) or ()
    if named:
        return tuple(name for name, child in module.named_modules() if type(child).__name__ in named)
    found: list[str] = []
    for list_name, children in module.named_modules():
        if not isinstance(children, nn.ModuleList) or any(list_name.startswith(name + ".") for name in found):
            continue
        counts = Counter(type(child) for child in children)
        prefix = list_name + "." if list_name else ""
        found += [f"{prefix}{index}" for index, child in enumerate(children) if counts[type(child)] > 1]
    return tuple(found)


class Compiler:
    """Makes and keeps the compiled forwards of one module.

    Args:
        module: The module.
        device: Where it is.
        config: Options.
    """

    def __init__(self, module: nn.Module, device: torch.device, config: RunnerConfig) -> None:
        self._module = module
        self._device = device
        self._config = config
        self._forwards: dict[str, _CompiledForward] = {}
        self._loaded = False

    def forwards(self) -> Mapping[str, Callable[..., Any]]:
        """Return the compiled forwards by the names of their modules; the module itself is the empty name."""
        if not self._forwards:
            names = ("",) if self._config.compile == "model" else repeated_blocks(self._module)
            style = _Style(self._config)
            for name in names:
                self._forwards[name] = _CompiledForward(self._module.get_submodule(name).forward, style)
        return self._forwards

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Compile in a block as often as its shapes need; load stored artifacts before, and store new ones after."""
        self._load()
        compiled_before = _torch.compiled_graphs()
        with _torch.raised_recompile_limit():
            yield
        if _torch.compiled_graphs() != compiled_before:
            self._save()

    # -- artifacts ---------------------------------------------------------------------------------------------------

    def _artifacts(self) -> Path | None:
        if self._config.compile_cache is None:
            return None
        folder = Path(self._config.compile_cache) / torch.__version__ / device_key(self._device)
        return folder / f"{model_key(self._module)}.{self._config.compile}.bin"

    def _load(self) -> None:
        path = self._artifacts()
        if self._loaded or path is None:
            return
        self._loaded = True
        if not path.exists():
            return
        try:
            torch.compiler.load_cache_artifacts(path.read_bytes())
        except Exception as error:
            _log.warning("compile cache %s is ignored: %s: %s", path, type(error).__name__, error)

    def _save(self) -> None:
        path = self._artifacts()
        artifacts = torch.compiler.save_cache_artifacts() if path is not None else None
        if path is None or artifacts is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_bytes(artifacts[0])
            partial.replace(path)
        except OSError as error:
            _log.warning("compile cache %s is not written: %s", path, error)


class _Style:
    """How forwards are compiled; one forward that needs graph breaks makes all of them allowed."""

    def __init__(self, config: RunnerConfig) -> None:
        self.fullgraph = True
        self._options: dict[str, Any] = {
            "backend": config.compile_backend,
            "dynamic": {"auto": None, "yes": True, "no": False}[config.compile_dynamic],
        }
        if config.compile_mode != "default":
            self._options["mode"] = config.compile_mode

    def compile(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a forward."""
        return torch.compile(forward, fullgraph=self.fullgraph, **self._options)


class _CompiledForward:
    """Runs a compiled forward, and compiles it again with graph breaks where it cannot be one graph."""

    def __init__(self, forward: Callable[..., Any], style: _Style) -> None:
        self._forward = forward
        self._style = style
        self._fullgraph = style.fullgraph
        self._compiled = style.compile(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        if self._fullgraph != self._style.fullgraph:
            self._recompile()
        try:
            return self._compiled(*args, **kwargs)
        except _torch.graph_break_errors() as error:
            if not self._fullgraph:
                raise
            _log.info("compiled with graph breaks: %s", str(error).partition("\n")[0])
            self._style.fullgraph = False
            self._recompile()
            return self._compiled(*args, **kwargs)

    def _recompile(self) -> None:
        self._fullgraph = self._style.fullgraph
        self._compiled = self._style.compile(self._forward)
