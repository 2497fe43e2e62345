"""Calls of functions that modules have as globals, taken for a while."""

from __future__ import annotations

import random
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import bcg
from bcg import functions
from bcg.functions import observed, original_function, redirected
from bcg.patching import resolve_function


def length(text: str) -> int:
    return len(text)


@pytest.fixture
def elsewhere() -> Iterator[Any]:
    """Another module, which has the function under another name."""
    module: Any = types.ModuleType("elsewhere_of_the_test")
    module.size = length
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def in_a_thread(function: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_substitute_is_called_by_its_thread_alone_under_whatever_name(elsewhere: Any) -> None:
    with redirected((length, lambda text: -1)):
        assert (length("abc"), elsewhere.size("abc")) == (-1, -1)
        assert in_a_thread(lambda: (length("abc"), elsewhere.size("abc"))) == (3, 3)
    assert elsewhere.size is original_function(elsewhere.size)
    assert length("abc") == 3


def test_the_inner_of_two_substitutes_is_called_and_the_outer_one_after_it() -> None:
    with redirected((length, lambda text: 1)):
        with redirected((length, lambda text: 2)):
            assert length("abc") == 2
        assert length("abc") == 1
    assert length("abc") == 3


def test_threads_that_overlap_undo_nothing_of_each_other(elsewhere: Any) -> None:
    """The first to begin ends first, while the other is inside."""
    function = length
    begun, ended = threading.Event(), threading.Event()
    inside: list[int] = []

    def second() -> None:
        begun.wait()
        with redirected((length, lambda text: 2)):
            ready.set()
            ended.wait()
            inside.append(elsewhere.size("abc"))

    ready = threading.Event()
    thread = threading.Thread(target=second)
    thread.start()
    with ExitStack() as first:
        first.enter_context(redirected((length, lambda text: 1)))
        begun.set()
        ready.wait()
        assert elsewhere.size("abc") == 1
    assert elsewhere.size("abc") == 3
    ended.set()
    thread.join()
    assert inside == [2]
    assert length is function and elsewhere.size is function


def test_an_observer_is_told_of_the_calls_of_all_threads() -> None:
    told: list[tuple[Any, ...]] = []
    with observed([length], lambda function, args, kwargs: told.append((function, args, threading.get_ident()))):
        assert length("abc") == 3
        other = in_a_thread(lambda: (length("ab"), threading.get_ident())[1])
    assert told == [(length, ("abc",), threading.get_ident()), (length, ("ab",), other)]
    length("a")
    assert len(told) == 2


def test_what_imported_a_function_meanwhile_calls_the_function_for_ever(elsewhere: Any) -> None:
    with redirected((length, lambda text: -1)):
        elsewhere.late = length
    assert elsewhere.late("abc") == 3
    with redirected((elsewhere.late, lambda text: -2)):
        assert (elsewhere.late("abc"), length("abc")) == (-2, -2)
    assert length("abc") == 3


def test_a_substitute_that_raises_is_taken_down() -> None:
    with pytest.raises(ValueError), redirected((length, lambda text: int("x"))):
        length("abc")
    assert length("abc") == 3


def test_eager_functions_are_found_while_another_thread_captures_with_them() -> None:
    name = f"{__name__}:length"
    with redirected((length, lambda text: -1)):
        found = resolve_function(name)

    class Measuring(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * length("abc")

    with redirected((length, lambda text: 3)):
        runner = bcg.wrap(Measuring(), eager_functions=(name,))
    with torch.no_grad():
        assert runner.capture(torch.ones(2))
        for value in (1.0, 2.0):
            assert runner(torch.full((2,), value)).tolist() == [3 * value] * 2
    assert found("abc") == 3


def test_modules_that_import_themselves_when_asked_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise ImportError("an optional package is missing")

    monkeypatch.setitem(sys.modules, "lazy_module_of_a_test", Lazy("lazy_module_of_a_test"))
    before = random.random
    with redirected((random.random, lambda: 7.0)):
        assert random.random() == 7.0
    assert random.random is before


def test_a_dispatcher_that_cannot_be_put_up_everywhere_stands_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    before = random.random

    def interrupted(missing: Any) -> None:
        put_up(missing)
        raise KeyboardInterrupt

    put_up = functions._put_up
    monkeypatch.setattr(functions, "_put_up", interrupted)
    with pytest.raises(KeyboardInterrupt), redirected((random.random, lambda: 7.0)):
        pass
    assert random.random is before
