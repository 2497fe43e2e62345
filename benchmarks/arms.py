"""The ways to run one transformer step that `benchmarks.step` compares.

Every arm works on the same module object and holds its captures or compiled code for all shapes at once, so that arms
can take turns. What an arm changes in the module (compiled blocks) is there only inside `Arm.active`.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from benchmarks.harness import keep
from benchmarks.models import Call


class Arm:
    """Run steps eagerly: the reference, and the base of the other arms.

    Attributes:
        name: What the arm is called on the command line and in tables.
        exact: Whether results must equal eager's bit for bit.
        needs_cuda: Whether the arm is left out on CPU.
        settling: Calls after the first until the arm is in its steady state.
    """

    name: ClassVar[str] = "eager"
    exact: ClassVar[bool] = True
    needs_cuda: ClassVar[bool] = False
    settling: ClassVar[int] = 1

    def __init__(self, module: nn.Module, dynamic: bool | None) -> None:
        self.module = module
        self.dynamic = dynamic

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Put the module into the state that this arm needs; not part of any timing."""
        return contextlib.nullcontext()

    def start(self, shape: str, call: Call) -> Any:
        """Make the first call for a shape, with all that has to be prepared: this is the cold start."""
        return self.run(shape, call)

    def run(self, shape: str, call: Call) -> Any:
        """Make one call for a shape that was started."""
        return call(self.module)

    def variants(self, shape: str, call: Call) -> dict[str, Callable[[], Any]]:
        """Return the calls to time, by the name of their row."""
        return {self.name: lambda: self.run(shape, call)}

    def replays(self) -> int | None:
        """Return how many calls were replayed so far; None where the arm does not count them."""
        return None

    def why(self, call: Call) -> str:
        """Return why a call would not replay."""
        return ""

    def facts(self) -> dict[str, Any]:
        """Return facts for the row of the shape last started."""
        return {}

    def close(self) -> None:
        """Drop captures and compiled code."""


class CompiledBlocks:
    """Compile the repeated blocks of a module, and put the compiled code in and out of place.

    Args:
        module: The transformer.
        dynamic: As ``torch.compile`` takes it.
        backend: As ``torch.compile`` takes it. Inductor by default, by a function of this object's own: dynamo shares
            code between equal backends, and what one arm compiled would not count in the cold start of another.
    """

    def __init__(
        self, module: nn.Module, dynamic: bool | None = None, backend: str | Callable[..., Any] | None = None
    ) -> None:
        self._module = module
        self._options = {"dynamic": dynamic, "backend": backend or _own_inductor()}
        self._code: dict[nn.Module, Any] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Run the blocks compiled; outside of this the module is as if nothing had been compiled."""
        self._code = self._code or {block: self._compile(block) for block in repeated_blocks(self._module)}
        for block, code in self._code.items():
            block.__dict__["_compiled_call_impl"] = code
        try:
            yield
        finally:
            for block in self._code:
                block.__dict__.pop("_compiled_call_impl", None)

    def _compile(self, block: nn.Module) -> Any:
        block.compile(**self._options)
        return block.__dict__.pop("_compiled_call_impl")

    def close(self) -> None:
        """Drop the compiled code."""
        self._code = {}


def _own_inductor() -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    def inductor(graph: Any, inputs: Any) -> Any:
        return compile_fx(graph, inputs)

    return inductor


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks that regional compilation compiles.

    Those of the classes named in diffusers' ``_repeated_blocks``; where it is empty (SANA, SD3), the members of every
    ModuleList that has several modules of one class, outermost lists first.
    """
    names = getattr(module, "_repeated_blocks", None)
    if names:
        return [block for block in module.modules() if type(block).__name__ in names]
    blocks: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList) and max(Counter(map(type, child)).values(), default=0) > 1:
            blocks.extend(child)
        else:
            blocks.extend(repeated_blocks(child))
    return blocks


@dataclass
class _Graph:
    """Hold one hand-written capture: static inputs, what replays, and the output in the graph's memory."""

    inputs: list[torch.Tensor]
    replay: Callable[[], None]
    output: Any


class GraphArm(Arm):
    """Capture the whole forward by hand with ``torch.cuda.graph``, as torch's documentation shows."""

    name = "graph"
    needs_cuda = True

    def __init__(self, module: nn.Module, dynamic: bool | None) -> None:
        super().__init__(module, dynamic)
        self._graphs: dict[str, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def start(self, shape: str, call: Call) -> Any:
        """Warm up on a side stream, capture, replay."""
        leaves, spec = tree_flatten((call.args, call.kwargs))
        static = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(static, spec)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.module(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(stream)
        inputs = [leaf for leaf in static if isinstance(leaf, torch.Tensor)]
        replay, output = self._capture(lambda: self.module(*args, **kwargs))
        self._graphs[shape] = _Graph(inputs, replay, output)
        return self.run(shape, call)

    def _capture(self, forward: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = forward()
        return graph.replay, output

    def run(self, shape: str, call: Call) -> Any:
        """Copy the inputs in, replay, clone the output."""
        graph = self._graphs[shape]
        leaves, _ = tree_flatten((call.args, call.kwargs))
        torch._foreach_copy_(graph.inputs, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        graph.replay()
        return keep(graph.output)

    def variants(self, shape: str, call: Call) -> dict[str, Callable[[], Any]]:
        """Return the whole call, and the bare replay without copies in and clones out."""
        return {**super().variants(shape, call), f"{self.name}_replay": self._graphs[shape].replay}

    def close(self) -> None:
        """Drop the graphs."""
        self._graphs.clear()


class PypiArm(GraphArm):
    """Capture the whole forward with the PyPI package ``breakable-cuda-graphs``, without any break."""

    name = "pypi"

    def _capture(self, forward: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        package = importlib.import_module("breakable_cuda_graphs")
        graph = package.BreakableCUDAGraph(pool=self._pool)
        with package.breakable_graph(graph):
            output = forward()
        return graph.replay, output


class BcgArm(Arm):
    """Wrap the module with bcg."""

    name = "bcg"
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, module: nn.Module, dynamic: bool | None) -> None:
        super().__init__(module, dynamic)
        self._bcg: Any = importlib.import_module("bcg")
        shapes = {None: "auto", True: "yes", False: "no"}[dynamic]
        self._runner: Any = self._bcg.wrap(module, compile_dynamic=shapes, **self.options)

    def start(self, shape: str, call: Call) -> Any:
        """Make the first call inside the warmup window."""
        with self._bcg.warmup():
            return call(self._runner)

    def run(self, shape: str, call: Call) -> Any:
        """Call the runner."""
        return call(self._runner)

    def replays(self) -> int | None:
        """Return the runner's count of replays."""
        return int(self._runner.stats.replays)

    def why(self, call: Call) -> str:
        """Return the runner's explanation."""
        return " ".join(str(self._runner.explain(*call.args, **call.kwargs)).split())

    def facts(self) -> dict[str, Any]:
        """Return what the entry captured last says of itself."""
        entries = list(self._runner.entries.values())
        if not entries:
            return {}
        return {name: getattr(entries[-1], name) for name in ("segments", "breaks", "capture_s")} | {
            "entry_bytes": entries[-1].bytes
        }

    def close(self) -> None:
        """Drop the runner's entries."""
        self._runner.reset()


class BlocksArm(Arm):
    """Run eagerly with compiled blocks (diffusers' regional compilation)."""

    name = "blocks"
    exact = False
    settling = 2

    def __init__(self, module: nn.Module, dynamic: bool | None) -> None:
        super().__init__(module, dynamic)
        self._blocks = CompiledBlocks(module, dynamic)

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Run with the compiled blocks in place."""
        return self._blocks.active()

    def close(self) -> None:
        """Drop the compiled code."""
        self._blocks.close()


class BcgBlocksArm(BcgArm):
    """Wrap the module with bcg, which compiles its blocks for captures alone."""

    name = "bcg_blocks"
    exact = False
    settling = 2
    options: ClassVar[dict[str, Any]] = {"compile": "blocks"}


class BcgBlocksAloneArm(BcgBlocksArm):
    """Likewise, without bcg's own options of the compiler: what `bcg_blocks` gains by them."""

    name = "bcg_blocks_inductor"
    options: ClassVar[dict[str, Any]] = {"compile": "blocks", "compile_options": {"combo_kernels": False}}


class BcgModelArm(BcgBlocksArm):
    """Wrap the module with bcg, which compiles all of its forward for captures alone."""

    name = "bcg_model"
    options: ClassVar[dict[str, Any]] = {"compile": "model"}


class BcgAutotunedArm(BcgBlocksArm):
    """Wrap the module with bcg, which measures all that it may choose among and keeps the fastest."""

    name = "bcg_autotuned"
    options: ClassVar[dict[str, Any]] = {
        "compile": "blocks",
        "autotune": True,
        "autotune_cache": False,
        "attention_backends": ("installed",),
    }


class CompileArm(Arm):
    """Compile the whole model with ``torch.compile``."""

    name = "compile"
    exact = False
    settling = 2
    mode: ClassVar[str | None] = None

    def __init__(self, module: nn.Module, dynamic: bool | None) -> None:
        super().__init__(module, dynamic)
        self._compiled: Any = torch.compile(module, mode=self.mode, dynamic=dynamic)

    def run(self, shape: str, call: Call) -> Any:
        """Call the compiled module."""
        return call(self._compiled)

    def close(self) -> None:
        """Drop the compiled module."""
        self._compiled = None


class ReduceOverheadArm(CompileArm):
    """Compile the whole model in the mode ``reduce-overhead``, which replays CUDA graphs of its own."""

    name = "reduce_overhead"
    needs_cuda = True
    settling = 3  # the second call records, the third replays
    mode = "reduce-overhead"

    def run(self, shape: str, call: Call) -> Any:
        """Call the compiled module; the result is good until the next call."""
        torch.compiler.cudagraph_mark_step_begin()
        return call(self._compiled)


ARMS: dict[str, type[Arm]] = {
    arm.name: arm
    for arm in (
        Arm,
        GraphArm,
        PypiArm,
        BcgArm,
        BlocksArm,
        BcgBlocksArm,
        BcgBlocksAloneArm,
        BcgModelArm,
        BcgAutotunedArm,
        CompileArm,
        ReduceOverheadArm,
    )
}
DEFAULT_ARMS = ("eager", "graph", "bcg")


class Arms:
    """Make the arms of one module, and take them down.

    Args:
        module: The transformer.
        dynamic: Given to ``torch.compile``: None for its own default, False for one compilation a shape.
        keep_caches: Compile with the compiler's caches as the environment has them; nothing is a cold start then.
    """

    def __init__(self, module: nn.Module, dynamic: bool | None = None, *, keep_caches: bool = False) -> None:
        self._module = module
        self._dynamic = dynamic
        self._keep_caches = keep_caches
        self._open: list[Arm] = []
        self._caches: list[tempfile.TemporaryDirectory[str]] = []

    def open(self, name: str) -> Arm:
        """Make an arm."""
        arm = ARMS[name](self._module, self._dynamic)
        self._open.append(arm)
        return arm

    @contextlib.contextmanager
    def cold(self, arm: Arm) -> Iterator[None]:
        """Let what an arm compiles inside miss the compiler's caches on disk, so that a cold start is one."""
        if arm.exact or self._keep_caches:
            yield
            return
        from torch._inductor import utils

        # Kept until the arms are closed: compiled code may load from it later.
        directory = tempfile.TemporaryDirectory(prefix="bcg-benchmark-", ignore_cleanup_errors=True)
        self._caches.append(directory)
        with utils.fresh_cache(dir=directory.name, delete=False):
            yield

    def close(self) -> None:
        """Take all arms down; the compiler's caches too, which hold on to the module."""
        for arm in self._open:
            arm.close()
        self._open.clear()
        if self._caches:
            torch.compiler.reset()
        for directory in self._caches:
            directory.cleanup()
        self._caches.clear()


def start_compiler(device: torch.device) -> None:
    """Compile a trifle, so that the first arm that compiles does not pay for starting the compiler itself."""
    from torch._dynamo import config

    # The limit counts the versions of one code object, and all arms share those of the blocks. Beyond it dynamo would
    # run eagerly without a word, and eager would be timed under the name of a compiled arm.
    config.recompile_limit = 64
    config.fail_on_recompile_limit_hit = True
    torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    torch.compiler.reset()
