"""What comes from outside of a call: exceptions of signal handlers, and threads that draw random numbers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.graph import BreakableCUDAGraph


class SoftTimeLimit(Exception):
    """What a worker's time limit raises, wherever the program is."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.fixture
def _limit() -> Iterator[None]:
    def raise_limit(number: int, frame: object) -> None:
        raise SoftTimeLimit

    before = signal.signal(signal.SIGUSR1, raise_limit)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_limit")
def test_an_exception_of_a_signal_handler_in_a_replay_reaches_the_caller_and_the_graph_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model()
    runner = bcg.wrap(model)
    with torch.no_grad():
        assert runner.capture(torch.randn(2, 8))
        replay = BreakableCUDAGraph.replay

        def interrupted(graph: BreakableCUDAGraph) -> None:
            signal.raise_signal(signal.SIGUSR1)
            replay(graph)

        with monkeypatch.context() as patch:
            patch.setattr(BreakableCUDAGraph, "replay", interrupted)
            with pytest.raises(SoftTimeLimit):
                runner(torch.randn(2, 8))
        assert not runner.rejections
        for _ in range(2):
            x = torch.randn(2, 8)
            assert torch.equal(runner(x), model(x))
    assert (runner.stats.replays, runner.stats.replay_failures) == (2, 0)


@pytest.mark.parametrize("error", [RuntimeError("device"), KeyError("a mistake of bcg's")])
def test_an_error_of_the_replay_itself_is_still_served_eagerly(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(graph: BreakableCUDAGraph) -> None:
        raise error

    model = Model()
    runner = bcg.wrap(model)
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert runner.capture(x)
        monkeypatch.setattr(BreakableCUDAGraph, "replay", failing)
        assert torch.equal(runner(x), model(x))
    assert runner.stats.replay_failures == 1


class Unseen(nn.Module):
    """Has a module break, in which nobody sees whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))


def test_a_thread_that_draws_meanwhile_costs_a_try_and_not_the_signature() -> None:
    model = Unseen()
    runner = bcg.wrap(model, eager_modules=("inner",))
    stop, drawn = threading.Event(), threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.rand(64)
            drawn.set()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        assert drawn.wait(10)
        with torch.no_grad():
            captured = runner.capture(torch.randn(2, 8))
            rejections = dict(runner.rejections)
    finally:
        stop.set()
        thread.join()
    assert captured or not rejections
    with torch.no_grad():
        assert captured or runner.capture(torch.randn(2, 8))
        for _ in range(2):
            x = torch.randn(2, 8)
            assert torch.equal(runner(x), model(x))
    assert runner.stats.replays == 2


class Moving(nn.Module):
    """Overwrites an attribute in each forward, as OmniGen's rotary embedding does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.frequencies = 1 / (torch.arange(8) + 1)
        return self.layer(x) * self.frequencies


def test_a_rejection_is_explained_though_the_module_moved_on() -> None:
    runner = bcg.wrap(Moving())
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert not runner.capture(x)
        for _ in range(2):
            runner.__wrapped__(x)
            assert "frequencies" in runner.explain(x)
