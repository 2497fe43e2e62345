"""Who drew from the global random numbers, and how they go on."""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.host_random import HostRandomWatch


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: random.uniform(0, 1), lambda: random.seed(3), lambda: random.choice([1, 2])],
    ids=["random", "uniform", "seed", "choice"],
)
def test_a_draw_from_pythons_random_numbers_is_noticed_and_put_back(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # whatever other tests have left running
    state = random.getstate()
    with HostRandomWatch() as watch:
        draw()
    assert watch.drew_python and not watch.moved_numpy
    watch.put_back()
    assert random.getstate() == state


def test_a_draw_from_numpys_random_numbers_is_noticed_and_put_back() -> None:
    numpy.random.seed(1)
    expected = numpy.random.rand()
    numpy.random.seed(1)
    with HostRandomWatch() as watch:
        numpy.random.rand()
    assert watch.moved_numpy and not watch.drew_python
    watch.put_back()
    assert numpy.random.rand() == expected


def test_generators_of_ones_own_and_draws_of_other_threads_are_none_of_its_business() -> None:
    with HostRandomWatch() as watch:
        random.Random(3).random()
        thread = threading.Thread(target=random.random)
        thread.start()
        thread.join()
        state = random.getstate()
    watch.put_back()
    assert not watch.drew_python
    assert random.getstate() == state


def test_a_state_that_is_set_to_what_it_was_is_no_draw_and_another_one_is() -> None:
    state = random.getstate()
    with HostRandomWatch() as same:
        random.setstate(random.getstate())
    with HostRandomWatch() as other:
        random.setstate(random.Random(5).getstate())
    other.put_back()
    assert (same.drew_python, other.drew_python) == (False, True)
    assert random.getstate() == state


def test_a_draw_through_a_kept_function_is_noticed_where_no_other_thread_could_have_made_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    kept = [random.random]
    with HostRandomWatch() as watch:
        kept[0]()
    assert watch.drew_python


def test_functions_are_as_before_and_no_profiler_is_set() -> None:
    before = dict(vars(random))
    with HostRandomWatch():
        assert sys.getprofile() is None
    assert all(vars(random)[name] is value for name, value in before.items())


def test_a_capture_is_not_rejected_for_what_another_thread_draws() -> None:
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            random.random()

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            state = random.getstate()
            for _ in range(10_000):
                if random.getstate() != state:  # the other thread drew meanwhile
                    break
            return x + 1

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        runner = bcg.wrap(Slow())
        with torch.no_grad():
            assert runner.capture(torch.ones(2))
            for value in (2.0, 3.0):
                assert torch.equal(runner(torch.full((2,), value)), torch.full((2,), value + 1))
    finally:
        stop.set()
        thread.join()


_KEPT = random.random  # a reference that no dispatcher takes the place of


class Drawing(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), [draw]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.draw[0]()


def test_a_draw_by_a_kept_function_is_refused_beside_an_idle_thread_too() -> None:
    done = threading.Event()
    idle = threading.Thread(target=done.wait)
    idle.start()
    try:
        runner = bcg.wrap(Drawing(_KEPT))
        state = random.getstate()
        with torch.no_grad():
            assert not runner.capture(torch.ones(2, 4))
            assert random.getstate() == state
            assert "random numbers" in runner.explain(torch.ones(2, 4))
    finally:
        done.set()
        idle.join()


def test_a_thread_that_draws_once_by_a_kept_function_costs_no_capture() -> None:
    drawn: list[float] = []

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if not drawn:
                thread = threading.Thread(target=lambda: drawn.append(_KEPT()))
                thread.start()
                thread.join()
            return self.layer(x)

    done = threading.Event()
    idle = threading.Thread(target=done.wait)
    idle.start()
    try:
        runner = bcg.wrap(Once())
        with torch.no_grad():
            assert runner.capture(torch.ones(2, 4))
    finally:
        done.set()
        idle.join()
    assert len(drawn) == 1
