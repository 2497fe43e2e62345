"""Captures of compiled code, on the tape with a compiler backend that makes no machine code."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg import _torch
from bcg.compilation import Compiler, compilable, other_parts, repeated_blocks
from bcg.entry import Entry
from bcg.recipe import Recipe

ARGUMENTS = {"compile_backend": "aot_eager"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.nn.functional.gelu(self.linear(x))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = Block, number: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(number)])
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Breaking(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_compiled_captures_replay_close_to_eager(compiled: str, mode: type) -> None:
    runner = bcg.wrap(Model(), compile=compiled, **ARGUMENTS)
    with mode():
        with bcg.warmup():
            runner(torch.randn(4, 8))
        for _ in range(2):
            x = torch.randn(4, 8)
            torch.testing.assert_close(runner(x), runner.transformer(x))
    assert runner.stats.replays == 2
    assert [entry.verified for entry in runner.entries.values()] == ["close"]


def test_eager_calls_stay_uncompiled_and_bit_exact() -> None:
    runner = bcg.wrap(Model(), compile="blocks", **ARGUMENTS)
    with torch.no_grad():
        with bcg.warmup():
            runner(torch.randn(4, 8))
        before = _torch.compiled_graphs()
        for rows in (5, 6):
            x = torch.randn(rows, 8)
            assert torch.equal(runner(x), runner.transformer(x))
    assert _torch.compiled_graphs() == before > 0
    assert runner.stats.eager_calls == 2
    assert all("forward" not in block.__dict__ for block in runner.blocks)


def test_blocks_of_one_class_are_compiled_once() -> None:
    before = _torch.compiled_graphs()
    runner = bcg.wrap(Model(number=6), compile="blocks", **ARGUMENTS)
    with torch.no_grad(), bcg.warmup():
        runner(torch.randn(4, 8))
    assert _torch.compiled_graphs() - before == 1


def test_many_shapes_pass_dynamos_recompile_limit() -> None:
    runner = bcg.wrap(Model(), compile="blocks", compile_dynamic="no", max_entries=64, **ARGUMENTS)
    with torch.no_grad():
        with bcg.warmup():
            for rows in range(1, 13):
                runner(torch.randn(rows, 8))
        for rows in (1, 12):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(runner(x), runner.transformer(x))
    assert (runner.stats.captures, runner.stats.replays) == (12, 2)


def test_blocks_that_cannot_be_one_graph_are_compiled_with_graph_breaks() -> None:
    runner = bcg.wrap(Model(Breaking), compile="blocks", **ARGUMENTS)
    with torch.no_grad():
        with bcg.warmup():
            runner(torch.randn(4, 8))
        for _ in range(2):
            x = torch.randn(4, 8)
            torch.testing.assert_close(runner(x), runner.transformer(x))
    assert runner.stats.replays == 2


def test_diffusers_own_list_of_repeated_blocks_comes_first() -> None:
    model = Model()
    assert repeated_blocks(model) == ("blocks.0", "blocks.1", "blocks.2")
    model._repeated_blocks = ["Linear"]  # type: ignore[assignment]
    assert repeated_blocks(model) == ("blocks.0.linear", "blocks.1.linear", "blocks.2.linear", "out")


def test_what_lies_in_a_repeated_block_is_compiled_with_it() -> None:
    """A patched forward in compiled code would break its graph at every inner block."""
    model = Model()
    model._repeated_blocks = ["Block", "Linear"]  # type: ignore[assignment]
    assert repeated_blocks(model) == ("blocks.0", "blocks.1", "blocks.2", "out")


@pytest.mark.parametrize("how", ["another block", "another forward"])
def test_a_block_that_was_replaced_is_compiled_anew(how: str) -> None:
    """What was compiled for the old one would be close to nothing that eager computes now, or worse: nearly close."""
    runner = bcg.wrap(Model(), compile="blocks", **ARGUMENTS)
    model = runner.transformer
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert runner.capture(x)
        if how == "another block":
            model.blocks[1] = Block()
        else:
            old = model.blocks[1].forward
            model.blocks[1].forward = lambda x: old(x) * 1.001
        assert runner.capture(x)
        torch.testing.assert_close(runner(x), model(x), rtol=1e-5, atol=1e-6)
    assert runner.stats.captures == 2 and runner.stats.replays == 1


@pytest.mark.parametrize(
    ("broken", "left"), [(("blocks.1.linear",), ["blocks.0", "blocks.2"]), (("blocks",), []), (("out",), None)]
)
def test_an_eager_break_is_never_inside_of_compiled_code(broken: tuple[str, ...], left: list[str] | None) -> None:
    model = Model()
    names = repeated_blocks(model)
    assert compilable(model, names, torch.device("cpu"), broken) == (list(names) if left is None else left)
    assert compilable(model, [""], torch.device("cpu"), broken) == []


def test_blocks_around_an_eager_module_are_left_as_they_are() -> None:
    runner = bcg.wrap(Model(), compile="blocks", eager_modules=("blocks.1.linear",), **ARGUMENTS)
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert runner.capture(x)
        torch.testing.assert_close(runner(x), runner.transformer(x))
    [entry] = runner.entries.values()
    assert [finding.name for finding in entry.findings] == ["blocks.0", "blocks.1.linear", "blocks.2"]


def test_a_block_that_the_user_compiled_is_not_compiled_twice() -> None:
    model = Model()
    model.blocks[0].compile(backend="aot_eager")
    assert compilable(model, repeated_blocks(model), torch.device("cpu"), ()) == ["blocks.1", "blocks.2"]


def test_a_block_with_host_tensors_beside_a_device_is_not_compiled() -> None:
    """Compiled code passes the value of a host scalar to its kernels, and a graph would keep it for ever."""
    model = Model().to("meta")
    model.blocks[0].scale = torch.tensor(2.0)
    model.blocks[1].linear.register_buffer("scale", torch.tensor(2.0))
    assert compilable(model, repeated_blocks(model), torch.device("meta"), ()) == ["blocks.2"]


def test_a_host_tensor_given_to_compiled_code_is_refused() -> None:
    compiler = Compiler(Model(), torch.device("cpu"), bcg.RunnerConfig(compile="blocks", **ARGUMENTS))
    forward = compiler.forwards()["blocks.0"]
    forward._device_type = "cuda"  # type: ignore[attr-defined]
    with torch.no_grad(), pytest.raises(bcg.CaptureError, match=r"tensor on cpu is passed to compiled blocks\.0"):
        forward(torch.randn(4, 8))


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(self.linear(x)).sin()


class Reading(Embedder):
    """Cannot be one graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if float(x.isnan().sum()) == 0 else 3)


class Embedded(Model):
    def __init__(self, embedder: type[nn.Module]) -> None:
        super().__init__()
        self.embed = embedder()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.embed(x))


def test_the_other_parts_are_the_outermost_modules_of_the_models_own_around_no_block() -> None:
    model = Embedded(Embedder)
    model.head = nn.Sequential(nn.LayerNorm(8), Embedder())
    model.lists = nn.ModuleList([Embedder(), nn.Linear(2, 2)])
    model.around = Model()
    model.around.embed = Embedder()
    model._repeated_blocks = ["Block"]  # type: ignore[assignment]
    assert other_parts(model, repeated_blocks(model)) == ("embed", "head", "lists.0", "around.embed")


@pytest.mark.parametrize(("embedder", "graphs"), [(Embedder, 2), (Reading, 1)])
def test_parts_beside_the_blocks_are_compiled_where_they_can_be_one_graph(
    embedder: type[nn.Module], graphs: int
) -> None:
    runner = bcg.wrap(Embedded(embedder), compile="blocks", **ARGUMENTS)
    before = _torch.compiled_graphs()
    with torch.no_grad():
        assert runner.capture(torch.randn(4, 8))
        assert _torch.compiled_graphs() - before == graphs
        for _ in range(2):
            x = torch.randn(4, 8)
            torch.testing.assert_close(runner(x), runner.transformer(x))
    assert runner.stats.replays == 2
    assert [entry.verified for entry in runner.entries.values()] == ["close"]


def test_a_part_that_is_given_a_host_tensor_runs_as_it_is() -> None:
    model = Embedded(Embedder)
    compiler = Compiler(model, torch.device("cpu"), bcg.RunnerConfig(compile="blocks", **ARGUMENTS))
    forward = compiler.forwards()["embed"]
    forward._device_type = "cuda"  # type: ignore[attr-defined]
    before = _torch.compiled_graphs()
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(forward(x), model.embed(x))
    assert _torch.compiled_graphs() == before


def noted(x: Tensor) -> Tensor:
    CALLS.append(1)
    return x * 2


CALLS: list[int] = []


class Noting(Block):
    def forward(self, x: Tensor) -> Tensor:
        return noted(super().forward(x))


@pytest.mark.parametrize("by_user", [False, True])
def test_a_function_that_is_to_run_eagerly_is_not_captured_in_compiled_code(
    by_user: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(Noting)
    if by_user:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    options = {} if by_user else {"compile": "blocks"}
    runner = bcg.wrap(model, eager_functions=(f"{__name__}:noted",), **options, **ARGUMENTS)
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert runner.capture(x) == (not by_user)
        assert "is called by compiled code" in caplog.text
        before = len(CALLS)
        torch.testing.assert_close(runner(x), runner.transformer(x))
    assert by_user or len(CALLS) - before == 2 * len(model.blocks)  # in the replay and in the eager call


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"compile": "blocks"}, "finds nothing in Odd"),
        ({"compile": "model", "compile_backend": "no such compiler"}, "no such compiler"),
    ],
)
def test_what_cannot_be_compiled_is_captured_as_it_is_and_exact(
    options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = bcg.wrap(Odd(), **options)
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert runner.capture(x)
        assert torch.equal(runner(x), x * 2)
    assert [entry.verified for entry in runner.entries.values()] == ["exact"]
    assert why in caplog.text and "captured without compiled code" in caplog.text


def test_a_result_that_compiled_code_moves_too_far_is_captured_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(name: str, mode: str, options: Any) -> Callable[[Any, Any], Any]:
        return lambda graph, inputs: lambda *args: tuple(tensor + 1 for tensor in graph(*args))

    monkeypatch.setattr(_torch, "compiler_backend", wrong)
    runner = bcg.wrap(Model(), compile="blocks", compile_backend="wrong")
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert runner.capture(x)
        assert torch.equal(runner(x), runner.transformer(x))


def test_memory_that_is_missing_is_no_property_of_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, mode: str, options: Any) -> Callable[[Any, Any], Any]:
        raise torch.OutOfMemoryError("no room (simulated)")

    monkeypatch.setattr(_torch, "compiler_backend", full)
    runner = bcg.wrap(Model(), compile="blocks", compile_backend="full")
    with torch.no_grad():
        assert not runner.capture(torch.randn(4, 8))
        assert not runner.rejections  # the next warm-up tries again


def kept_code(runner: Any) -> list[Any]:
    [backend] = {id(style._backend): style._backend for style in runner._capturer()._compiler._styles.values()}.values()
    made: list[Any] = backend.made
    return made


def test_compiled_code_lives_as_long_as_graphs_may_refer_to_it() -> None:
    """Dynamo drops it in a reset, and a graph launches its kernels by address."""
    # No other test's runner compiles with this backend, and shares it.
    runner = bcg.wrap(Model(), compile="blocks", compile_backend="aot_eager_decomp_partition")
    with torch.no_grad():
        assert runner.capture(torch.randn(4, 8))
    made = weakref.ref(kept_code(runner)[0])
    torch._dynamo.reset()
    gc.collect()
    is_held = made() is not None  # an assertion of pytest's would hold it, too
    runner.reset()
    del runner
    torch._dynamo.reset()
    gc.collect()
    assert (is_held, made() is None) == (True, True)


def test_two_runners_of_one_class_share_compiled_code() -> None:
    first, second = (bcg.wrap(Model(), compile="blocks", **ARGUMENTS) for _ in range(2))
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert first.capture(x)
        before = _torch.compiled_graphs()
        assert second.capture(x)
    assert _torch.compiled_graphs() == before
    assert kept_code(first) is kept_code(second)


def shapes_compiled(dynamic: str, static: bool, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return for each compilation that three shapes need whether it is for all shapes."""
    seen: list[bool] = []

    def observing(name: str, mode: str, options: Any) -> Callable[[Any, Any], Any]:
        def compile_graph(graph: Any, inputs: Any) -> Any:
            seen.append(any(isinstance(one, torch.SymInt) for one in inputs))
            return graph

        return compile_graph

    monkeypatch.setattr(_torch, "compiler_backend", observing)
    backend = f"observing {dynamic} {static}"
    runner = bcg.wrap(Model(), compile="blocks", compile_backend=backend, compile_dynamic=dynamic)
    entries: list[Entry] = []
    with torch.no_grad():
        for rows in (3, 5, 6):
            call = runner._bind((torch.randn(rows, 8),), {})
            entries.append(runner._capturer().capture(call, Recipe(compiled=True, static_shapes=static)))
    return seen


@pytest.mark.parametrize(
    ("dynamic", "static", "compiled"),
    [
        ("auto", False, [False, True]),
        ("auto", True, [False, False, False]),
        ("yes", False, [True]),
        ("no", False, [False, False, False]),
    ],
)
def test_shapes_are_compiled_as_the_config_and_the_recipe_say(
    dynamic: str, static: bool, compiled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shapes_compiled(dynamic, static, monkeypatch) == compiled


def options_seen(monkeypatch: pytest.MonkeyPatch, **config: Any) -> dict[str, Any]:
    """Return the options that the compiler is given for a capture."""
    seen: list[dict[str, Any]] = []

    def observing(name: str, mode: str, options: dict[str, Any]) -> Callable[[Any, Any], Any]:
        seen.append(options)
        return lambda graph, inputs: graph

    monkeypatch.setattr(_torch, "compiler_backend", observing)
    runner = bcg.wrap(Model(), compile="blocks", compile_backend=f"observing {config}", **config)
    with torch.no_grad():
        assert runner.capture(torch.randn(4, 8))
    return seen[0]


def test_small_kernels_are_compiled_into_one_unless_the_config_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_seen(monkeypatch) == {"combo_kernels": True}
    given = {"combo_kernels": False, "triton.multi_kernel": 1}
    assert options_seen(monkeypatch, compile_options=given) == given


def test_an_option_that_the_compiler_lacks_is_refused_before_anything_runs() -> None:
    with pytest.raises(bcg.ConfigError, match=r"no_such_option.*list_options"):
        bcg.wrap(Model(), compile="blocks", compile_options={"no_such_option": 1})


def test_runners_of_other_options_do_not_share_compiled_code() -> None:
    first, second = (
        bcg.wrap(Model(), compile="blocks", compile_options={"combo_kernels": on}, **ARGUMENTS) for on in (False, True)
    )
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert first.capture(x)
        assert second.capture(x)
    assert kept_code(first) is not kept_code(second)
