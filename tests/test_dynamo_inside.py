"""Forwards that enter dynamo by themselves: higher-order operators, and functions that a user compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.nn.attention.flex_attention import flex_attention

import bcg
from bcg import _torch


class Model(nn.Module):
    """A linear layer before and after a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def choose(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, (x,))


def count(x: Tensor) -> Tensor:
    return torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))[1]


def attend(x: Tensor) -> Tensor:
    heads = x[None, None]
    return flex_attention(heads, heads, heads)[0, 0]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", [choose, count, attend])
def test_a_higher_order_operator_is_an_eager_break_and_eager_works_on(
    function: Callable[[Tensor], Tensor], mode: type
) -> None:
    model = Model(function)
    runner = bcg.wrap(model)
    with mode():
        with bcg.warmup():
            runner(torch.randn(8, 16))
        for sign in (1, -1, 1, -1):  # both branches
            x = sign * torch.rand(8, 16) + model.first.bias.sum()
            assert torch.equal(runner(x), model(x))
        assert runner.stats.replays == 4
        assert [entry.breaks for entry in runner.entries.values()] == [1]
        # Another module, compiled for the first time now.
        other, x = Model(function), torch.randn(4, 16)
        assert other(x).shape == (4, 16)


@pytest.mark.parametrize("function", [choose, attend])
def test_a_report_names_the_operator_and_leaves_eager_as_it_was(function: Callable[[Tensor], Tensor]) -> None:
    model, x = Model(function), torch.randn(8, 16)
    with torch.no_grad():
        want = model(x)
        report = bcg.inspect(model, x)
        assert torch.equal(model(x), want)
    name = {choose: "cond", attend: "flex_attention"}[function]
    assert [finding.name for finding in report.findings if finding.kind == "break"] == [name]


def test_a_function_that_the_user_compiled_stays_compiled() -> None:
    graphs: list[Any] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Model(torch.compile(lambda x: x * 2 + 1, backend=compiler))
    runner = bcg.wrap(model)
    with torch.no_grad():
        with bcg.warmup():
            runner(torch.randn(8, 16))
        for _ in range(2):
            x = torch.randn(8, 16)
            assert torch.equal(runner(x), model(x))
        compiled = len(graphs)
        assert compiled, "the eager call was not compiled any more"
        model(torch.randn(8, 16)), runner(torch.randn(8, 16))
    assert (runner.stats.replays, len(graphs)) == (3, compiled)
    assert not hasattr(eval_frame._callback_from_stance, "__wrapped__")


class Counting(nn.Module):
    """Counts its calls in a buffer, in a function that the user compiled."""

    def __init__(self, bump: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.bump = bump
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.bump(self.count, x)


@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_what_a_compiled_function_writes_is_seen(compiler: str) -> None:
    def bump(count: Tensor, x: Tensor) -> Tensor:
        count.add_(1)
        return x + count

    models = [Counting(torch.compile(bump, backend=compiler)) for _ in range(2)]
    runner = bcg.wrap(models[0])
    with torch.no_grad():
        with bcg.warmup():
            calls = [torch.randn(4)]
            assert torch.equal(runner(calls[0]), models[1](calls[0]))
        for _ in range(3):
            x = torch.randn(4)
            assert torch.equal(runner(x), models[1](x))
            assert torch.equal(models[0].count, models[1].count)


def test_what_a_compiled_function_reads_is_read_in_every_replay() -> None:
    model = Model(torch.compile(lambda x: x))
    table = torch.randn(32, 16)
    model.forward = lambda ids: look_up(table, ids)  # type: ignore[method-assign]
    look_up = torch.compile(lambda table, ids: table[ids] * 2 + 1)
    runner = bcg.wrap(model)
    with torch.no_grad():
        with bcg.warmup():
            runner(torch.arange(8))
        for start in (0, 3, 7):
            ids = torch.arange(start, start + 8)
            assert torch.equal(runner(ids), model(ids))


def test_a_function_that_must_be_one_graph_runs_as_it_is_written_meanwhile() -> None:
    function = torch.compile(lambda x: x * 3, backend="eager", fullgraph=True)
    with _torch.uncompiled(lambda: True):
        assert function(torch.ones(2)).tolist() == [3, 3]
    assert function(torch.ones(2)).tolist() == [3, 3]


def test_other_threads_run_compiled_code_while_this_one_captures() -> None:
    graphs: list[Any] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x * 3, backend=compiler)
    with _torch.uncompiled(lambda: True):
        function(torch.ones(2))
        assert graphs == []
        thread = threading.Thread(target=function, args=(torch.ones(2),))
        thread.start()
        thread.join()
        assert len(graphs) == 1


def test_a_random_number_drawn_in_a_function_that_the_user_compiled_is_never_replayed_stale() -> None:
    model = Model(torch.compile(lambda x: x + torch.rand_like(x), backend="aot_eager"))
    runner = bcg.wrap(model)
    with torch.no_grad():
        with bcg.warmup():
            runner(torch.randn(8, 16))
        for seed in (1, 2):
            x = torch.randn(8, 16)
            torch.manual_seed(seed)
            want = model(x)
            torch.manual_seed(seed)
            assert torch.equal(runner(x), want)


def test_a_plain_capture_refuses_a_higher_order_operator_and_leaves_eager_as_it_was() -> None:
    x = torch.randn(8, 16)
    with torch.no_grad():
        want = choose(x)
        capture = bcg.BreakableCUDAGraphCapture(device="cpu")
        with pytest.raises(bcg.HostileOperationError, match="cond takes functions"), capture:
            choose(x)
        assert torch.equal(choose(x), want)


def test_a_function_met_beside_a_mode_of_this_package_is_not_given_up() -> None:
    graphs: list[Any] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Noting(_torch.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    function = torch.compile(lambda x: x * 2, backend=compiler)
    with Noting():
        function(torch.ones(2))
    function(torch.ones(2))
    assert graphs
