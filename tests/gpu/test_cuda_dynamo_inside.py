"""Forwards on a GPU that enter dynamo by themselves: functions that a user compiled, and higher-order operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import bcg

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def activate(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x * 2 + 1, approximate="tanh") * torch.rsqrt(x.square().mean(-1, keepdim=True))


def project(x: Tensor) -> Tensor:
    """What inductor calls a library for, between kernels of its own."""
    return activate(activate(x) @ x.mT) @ x


def choose(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, (x,))


def attend(x: Tensor) -> Tensor:
    heads = x.view(1, 2, -1, 32)
    return flex_attention(heads, heads, heads).view_as(x)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw() -> Tensor:
    return torch.randn(128, 64, device=DEVICE)


@pytest.mark.parametrize("function", [activate, project])
def test_a_function_that_the_user_compiled_gives_eagers_results_and_stays_compiled(
    function: Callable[[Tensor], Tensor],
) -> None:
    model = Model(torch.compile(function)).to(DEVICE)
    runner = bcg.wrap(model)
    with torch.no_grad():
        with bcg.warmup():
            runner(draw())
        for _ in range(3):
            x = draw()
            assert torch.equal(runner(x), model(x)), runner.rejections
        model(draw())
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        model(draw())
    # Compiled code rounds otherwise than what a capture sees of the function, so that the call may run eagerly.
    assert 0 < compiled == torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("function", [choose, attend, torch.compile(attend)])
def test_a_higher_order_operator_gives_eagers_results_and_eager_works_on(function: Callable[[Tensor], Tensor]) -> None:
    model = Model(function).to(DEVICE)
    runner = bcg.wrap(model)
    with torch.no_grad():
        with bcg.warmup():
            runner(draw())
        for sign in (1, -1, 1, -1):
            x = sign * draw().abs()
            assert torch.equal(runner(x), model(x)), runner.rejections
        assert Model(function).to(DEVICE)(draw()[:64]).shape == (64, 64)
        torch.rand(1, device=DEVICE)
    assert runner.stats.replays == 4, runner.rejections
