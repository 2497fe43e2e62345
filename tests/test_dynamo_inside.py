"""Forwards that enter dynamo by themselves: higher-order operators, and functions that a user compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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
        assert graphs, "nothing was compiled beside the modes"
        for _ in range(2):
            x = torch.randn(8, 16)
            assert torch.equal(runner(x), model(x))
        compiled = len(graphs)
        model(torch.randn(8, 16)), runner(torch.randn(8, 16))
    assert (runner.stats.replays, len(graphs)) == (3, compiled)


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


def test_modes_of_this_package_let_dynamo_compile_beside_them() -> None:
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
    assert len(graphs) == 1
