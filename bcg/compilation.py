"""Compile a module's repeated blocks and its other parts, or all of its forward, for captures alone.

The module stays as it is: compiled forwards stand in for the originals on the thread that captures, while it does. An
eager call never compiles, and its result is eager's.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from bcg import _torch, trees
from bcg.artifacts import ArtifactStore
from bcg.config import RunnerConfig
from bcg.errors import CaptureError, ConfigError
from bcg.model_key import device_key, model_key

_log = logging.getLogger("bcg")
_DYNAMIC: Final = {"auto": None, "yes": True, "no": False}

_OPTIONS: Final[Mapping[str, Any]] = {"combo_kernels": True}
"""Inductor's options that differ from its own defaults.

The two streams of a multi-modal block, and the projections and norms of one stream, are small kernels that do not
depend on each other. A graph still pays a launch for each; inductor can put them into one. SD3.5-medium at 512² on an
H200: 11.8 ms a step with, 12.2 without (docs/DESIGN.md).
"""


def repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the submodules that a model is made of, over and over.

    diffusers names their classes in ``_repeated_blocks``. Where that is empty they are the members of every
    ``ModuleList`` that holds several modules of one class. What is inside of one of them is compiled with it.

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
    found: list[str] = []
    for name, child in module.named_modules() if named else ():
        if type(child).__name__ in named and not _is_inside(name, found):
            found.append(name)
    if named:
        return tuple(found)
    for list_name, children in module.named_modules():
        if not isinstance(children, nn.ModuleList) or _is_inside(list_name, found):
            continue
        counts = Counter(type(child) for child in children)
        prefix = list_name + "." if list_name else ""
        found += [f"{prefix}{index}" for index, child in enumerate(children) if counts[type(child)] > 1]
    return tuple(found)


def other_parts(module: nn.Module, blocks: Collection[str]) -> tuple[str, ...]:
    """Return the names of the submodules beside the repeated blocks: embedders, the last norm and projection.

    They are the outermost ones that neither are, hold nor lie in a block. A layer of torch's own is left out: alone it
    is one kernel, compiled or not.

    Args:
        module: The model.
        blocks: What `repeated_blocks` returns for it.

    Returns:
        Names as in ``named_modules``.

    Example:
        >>> model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
        >>> model["embed"] = nn.Sequential(nn.Linear(2, 2), nn.SiLU())
        >>> other_parts(model, repeated_blocks(model))
        ('embed',)
    """
    found: list[str] = []
    for name, child in module.named_modules():
        holds_a_block = any(_is_inside(block, [name]) for block in blocks)
        if holds_a_block or name in blocks or _is_inside(name, [*blocks, *found]) or _is_torch_layer(child):
            continue
        found.append(name)
    return tuple(found)


def _is_torch_layer(module: nn.Module) -> bool:
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))  # they have no forward
    has_children = next(module.children(), None) is not None
    return is_container or (type(module).__module__.startswith("torch.") and not has_children)


def _is_inside(name: str, others: Collection[str]) -> bool:
    return any(name.startswith(other + ".") or not other for other in others)


def compilable(module: nn.Module, names: Collection[str], device: torch.device, broken: Collection[str]) -> list[str]:
    """Leave out what must not be compiled for a graph.

    That is a submodule that is compiled already; one that holds host tensors beside a device, whose values compiled
    code passes to its kernels and a graph would bake, unseen; and one that is, holds or lies in an eager break, which
    would run inside of the compiled code.

    Args:
        module: The model.
        names: Names of its submodules; the model itself is the empty name.
        device: Where it is.
        broken: Names of submodules that are eager breaks.

    Returns:
        The rest of the names.
    """
    return [
        name
        for name in names
        if not any(other == name or _is_inside(other, [name]) or _is_inside(name, [other]) for other in broken)
        and not any(_torch.is_compiled(child) for child in module.get_submodule(name).modules())
        and not any(tensor.device.type != device.type for tensor in _tensors(module.get_submodule(name)))
    ]


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    for child in module.modules():
        yield from (value for value in vars(child).values() if isinstance(value, Tensor))


class Compiler:
    """Makes and keeps the compiled forwards of one module.

    Args:
        module: The module.
        device: Where it is.
        config: Options.

    Raises:
        ConfigError: ``compile_options`` names what inductor does not have.
    """

    def __init__(self, module: nn.Module, device: torch.device, config: RunnerConfig) -> None:
        _check_options(config)
        self._module = module
        self._device = device
        self._config = config
        self._styles: dict[tuple[bool, type[_CompiledForward]], _Style] = {}
        self._forwards: dict[tuple[str, bool], _CompiledForward] = {}
        self._store: ArtifactStore | None = None
        if config.compile_cache is not None:
            # By version and device: torch checks both only in part when it loads artifacts.
            folder = Path(config.compile_cache) / torch.__version__ / device_key(device)
            self._store = ArtifactStore(folder / f"{model_key(module)}.{config.compile}")

    def forwards(
        self, broken: Collection[str] = (), *, static_shapes: bool = False
    ) -> Mapping[str, Callable[..., Any]]:
        """Return the compiled forwards by the names of their modules; the module itself is the empty name.

        Args:
            broken: Names of submodules that are eager breaks; what holds one is left as it is.
            static_shapes: Compile anew for each shape; otherwise as the config says.

        Raises:
            CaptureError: There is nothing to compile.
        """
        names = ("",) if self._config.compile == "model" else repeated_blocks(self._module)
        chosen = compilable(self._module, names, self._device, broken)
        if not chosen:
            raise CaptureError(f"compile={self._config.compile!r} finds nothing in {type(self._module).__name__}.")
        forwards = {name: self._forward(name, static_shapes, _CompiledForward) for name in chosen}
        parts = () if names == ("",) else other_parts(self._module, names)
        for name in compilable(self._module, parts, self._device, broken):
            forwards[name] = self._forward(name, static_shapes, _CompiledPart)
        return forwards

    def _forward(self, name: str, static_shapes: bool, kind: type[_CompiledForward]) -> _CompiledForward:
        # Asked in every capture: a hook, an adapter or another block may have taken the place of what was compiled.
        forward = self._module.get_submodule(name).forward
        known = self._forwards.get((name, static_shapes))
        if known is None or known.forward != forward:
            known = self._forwards[name, static_shapes] = kind(
                forward, self._style(static_shapes, kind), name or type(self._module).__name__, self._device
            )
        return known

    def _style(self, static_shapes: bool, kind: type[_CompiledForward]) -> _Style:
        key = static_shapes, kind
        if key not in self._styles:
            dynamic = False if static_shapes else _DYNAMIC[self._config.compile_dynamic]
            self._styles[key] = _Style(self._config, dynamic)
        return self._styles[key]

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Compile in a block as often as its shapes need; load stored artifacts before, and store new ones after."""
        if self._store is not None:
            self._store.load()
        compiled_before = _torch.compiled_graphs()
        with _torch.raised_recompile_limit():
            yield
        if self._store is not None and _torch.compiled_graphs() != compiled_before:
            self._store.save()


class _Backend:
    """A backend of torch.compile that holds what it made.

    Graphs refer by address to the kernels and constants of compiled code, which dynamo drops when it is reset or when
    a function's last module dies. Compilers of the same options share a backend, and so the code of a class of blocks.
    """

    def __init__(self, name: str, mode: str, options: Mapping[str, Any]) -> None:
        self._compile = _torch.compiler_backend(name, mode, options)
        self.made: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        made = self._compile(graph, inputs)
        self.made.append(made)
        return made


_backends: weakref.WeakValueDictionary[tuple[str, str, str], _Backend] = weakref.WeakValueDictionary()


def _backend(config: RunnerConfig) -> _Backend:
    options = {**_OPTIONS, **config.compile_options}
    key = config.compile_backend, config.compile_mode, repr(sorted(options.items()))
    backend = _backends.get(key)
    if backend is None:
        backend = _backends[key] = _Backend(config.compile_backend, config.compile_mode, options)
    return backend


def _check_options(config: RunnerConfig) -> None:
    if config.compile == "off" or not config.compile_options:
        return
    unknown = _torch.unknown_compiler_options(config.compile_options)
    if unknown:
        raise ConfigError(
            f"compile_options={config.compile_options!r}: inductor of torch {torch.__version__} has no "
            f"{', '.join(unknown)}. Leave it out, or see torch._inductor.list_options()."
        )


class _Style:
    """How forwards are compiled; one forward that needs graph breaks makes all of them allowed."""

    def __init__(self, config: RunnerConfig, dynamic: bool | None) -> None:
        self.fullgraph = True
        self._backend = _backend(config)
        self._dynamic = dynamic

    def compile(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a forward."""
        return torch.compile(forward, fullgraph=self.fullgraph, backend=self._backend, dynamic=self._dynamic)


class _CompiledForward:
    """Runs a compiled forward, and compiles it again with graph breaks where it cannot be one graph."""

    def __init__(self, forward: Callable[..., Any], style: _Style, name: str, device: torch.device) -> None:
        self.forward = forward
        self._style = style
        self._name = name
        self._device_type = device.type
        self._fullgraph = style.fullgraph
        self._compiled = style.compile(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward.

        Raises:
            CaptureError: A host tensor is passed, whose value the kernels would be given, and a graph would bake.
        """
        foreign = self._foreign_tensor(args, kwargs)
        if foreign is not None:
            raise CaptureError(
                f"a tensor on {foreign.device} is passed to compiled {self._name}: its value would be baked into the "
                "graph. Pass a number or a tensor on the module's device."
            )
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

    def _foreign_tensor(self, args: Any, kwargs: Any) -> Tensor | None:
        leaves = trees.flatten((args, kwargs)).leaves
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        return next((tensor for tensor in tensors if tensor.device.type != self._device_type), None)

    def _recompile(self) -> None:
        self._fullgraph = self._style.fullgraph
        self._compiled = self._style.compile(self.forward)


class _CompiledPart(_CompiledForward):
    """Runs a compiled forward that is no repeated block, or the module's own where that cannot be one graph.

    Little is won by it, so nothing is given up for it either: neither one graph for each block nor the capture.
    """

    _is_refused = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        if self._is_refused or self._foreign_tensor(args, kwargs) is not None:
            return self.forward(*args, **kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except _torch.graph_break_errors() as error:  # raised while it compiles: nothing has run yet
            _log.info("%s is not compiled: %s", self._name, str(error).partition("\n")[0])
            self._is_refused = True
            return self.forward(*args, **kwargs)
