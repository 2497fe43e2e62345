"""Fresh inputs are ones that a forward can work with, and a difference is found, named and measured."""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.entry import Entry
from bcg.graph import current_capture
from bcg.verification import difference, fresh_inputs

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def fresh(tensor: Tensor) -> Tensor:
    [result] = fresh_inputs([tensor])
    assert (result.shape, result.dtype, result.device) == (tensor.shape, tensor.dtype, tensor.device)
    assert result.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not tensor.numel()
    return result


# -- fresh inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_have_their_own_elements_in_another_order(dtype: torch.dtype) -> None:
    live = torch.randn(8, 8).to(dtype)
    result = fresh(live)
    assert not torch.equal(result, live)
    assert torch.equal(result.flatten().sort().values, live.flatten().sort().values)


@pytest.mark.parametrize("value", [3.0, -2.0, 1e-3])
def test_a_tensor_of_one_value_is_scaled(value: float) -> None:
    result = fresh(torch.full((4,), value))
    assert bool((result == result[0]).all())
    ratio = result[0].item() / value
    assert 0.5 <= ratio < 1


def test_a_scalar_is_scaled() -> None:
    assert 4.0 <= fresh(torch.tensor(8.0)).item() < 8.0


@pytest.mark.parametrize(
    "live",
    [
        torch.zeros(4),
        torch.ones(4),
        torch.tensor([1.0, 0.0, 1.0]),
        torch.tensor([1, 2, 3]),
        torch.tensor([True, False]),
        torch.tensor([3 + 1j, 2j]),
        torch.empty(0, 3),
    ],
    ids=["zeros", "ones", "0/1 mask", "integers", "booleans", "complex", "empty"],
)
def test_what_steers_shapes_is_kept(live: Tensor) -> None:
    assert torch.equal(fresh(live), live)


@pytest.mark.parametrize(
    "live",
    [
        torch.randn(3, 4).t(),
        torch.randn(4, 6)[::2, 1:3],
        torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.randn(1, 4).expand(3, 4),
        torch.tensor(7.0).expand(3),
        torch.randn(3, 1, 4).expand(3, 5, 4),
    ],
    ids=["transposed", "slice", "channels last", "expanded", "stride 0", "expanded in the middle"],
)
def test_strides_are_kept(live: Tensor) -> None:
    result = fresh(live)
    assert result.stride() == live.stride()
    assert not torch.equal(result, live)
    assert torch.equal(result.flatten().sort().values, live.flatten().sort().values) or live[0].dim() == 0


def test_fresh_inputs_are_the_same_in_every_run_and_leave_generators_alone() -> None:
    state = torch.default_generator.get_state()
    live = [torch.arange(20.0), torch.full((3,), 5.0)]
    one, other = fresh_inputs(live), fresh_inputs(live)
    assert all(map(torch.equal, one, other))
    assert torch.equal(torch.default_generator.get_state(), state)


def test_two_inputs_of_the_same_content_are_permuted_differently() -> None:
    one, other = fresh_inputs([torch.arange(20.0), torch.arange(20.0)])
    assert not torch.equal(one, other)


def test_fresh_inputs_are_ordinary_tensors_under_inference_mode() -> None:
    with torch.inference_mode():
        live = torch.randn(4)
        [result] = fresh_inputs([live])
    assert not result.is_inference()
    assert not result.requires_grad


def test_the_live_tensors_are_not_written_to() -> None:
    live = torch.randn(4)
    before = live.clone()
    fresh(live).fill_(9.0)
    assert torch.equal(live, before)


# -- difference --------------------------------------------------------------------------------------------------------


@dataclass
class Output:
    sample: Any


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3),
        torch.tensor([NAN, 1.0, INF, -INF]),
        torch.tensor([1, 2]),
        torch.tensor([True]),
        torch.empty(0),
        torch.tensor([1j]),
        (torch.ones(2), None, "text", 3, NAN),
        {"a": [torch.ones(2)]},
        Output(torch.ones(2)),
        None,
    ],
    ids=str,
)
@pytest.mark.parametrize("close", [False, True])
def test_equal_results_have_no_difference(value: Any, close: bool) -> None:
    twin = bcg.steps.frozen(value)
    assert difference(value, twin, close=close) is None


@pytest.mark.parametrize(
    ("expected", "got", "text"),
    [
        (torch.zeros(4), torch.tensor([0.0, 1, 0, 0]), "1 of 4 elements differ"),
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), "relative distance 0.1"),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0]), "1 of 2 elements differ"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, NAN]), "relative distance inf"),
        (torch.tensor([INF]), torch.tensor([-INF]), "1 of 1 elements differ"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 elements differ"),
        (torch.ones(2), torch.ones(3), "expected torch.float32[2], got torch.float32[3]"),
        (torch.ones(2), torch.ones(2).double(), "got torch.float64[2]"),
        (torch.ones(2), None, "got"),
        (1, 2, "expected 1, got 2"),
        (1, True, "expected 1, got True"),
        ([torch.ones(1)], (torch.ones(1),), "another structure"),
        ((torch.ones(1), torch.ones(1)), (torch.ones(1), torch.zeros(1)), "output[1]: "),
        (Output(torch.ones(1)), Output(torch.zeros(1)), "output.sample: "),
        ({"a": [torch.ones(1)]}, {"a": [torch.zeros(1)]}, "output['a'][0]: "),
    ],
    ids=str,
)
def test_a_difference_names_the_output_and_says_how_much(expected: Any, got: Any, text: str) -> None:
    found = difference(expected, got, close=False)
    assert found is not None
    assert text in found


def test_the_exact_comparison_sees_the_last_bit() -> None:
    one = torch.ones(3)
    assert difference(one, torch.nextafter(one, torch.tensor(2.0)), close=False) is not None


@pytest.mark.parametrize(("dtype", "inside", "outside"), [(torch.float32, 1.005, 1.02), (torch.bfloat16, 1.05, 1.2)])
def test_the_close_comparison_has_a_limit_by_dtype(dtype: torch.dtype, inside: float, outside: float) -> None:
    expected = torch.ones(100, dtype=dtype)
    assert difference(expected, expected * inside, close=True) is None
    assert difference(expected, expected * outside, close=True) is not None


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_the_close_comparison_looks_past_what_is_not_finite_in_both(odd: float) -> None:
    expected, inside, outside = (torch.tensor([odd, value]) for value in (1.0, 1.005, 1.5))
    assert difference(expected, inside, close=True) is None
    assert difference(expected, outside, close=True) is not None


@pytest.mark.parametrize(("expected", "got"), [(1.0, NAN), (NAN, 1.0), (INF, 1.0), (1.0, INF), (INF, -INF), (INF, NAN)])
def test_the_close_comparison_sees_what_is_not_finite_in_one(expected: float, got: float) -> None:
    assert difference(torch.tensor([2.0, expected]), torch.tensor([2.0, got]), close=True) is not None


def test_the_close_comparison_of_zeros() -> None:
    assert difference(torch.zeros(3), torch.zeros(3), close=True) is None
    assert difference(torch.zeros(3), torch.full((3,), 1e-3), close=True) is not None


# -- rejected entries --------------------------------------------------------------------------------------------------

calls = itertools.count(1)


class ReadsAGlobal(nn.Module):
    """Depends on Python state that is no part of the module and changes from call to call."""

    def forward(self, x: Tensor) -> Tensor:
        return x + next(calls)


def test_an_entry_that_does_not_reproduce_eager_is_rejected_with_output_and_magnitude() -> None:
    runner = bcg.wrap(ReadsAGlobal())
    x = torch.ones(4)
    assert not runner.capture(x)
    [reason] = runner.rejections.values()
    assert "does not reproduce eager on fresh inputs: output: 4 of 4 elements differ, relative distance" in reason
    assert len(runner.entries) == 0
    assert runner.stats.rejections == 1
    assert current_capture() is None
    assert "does not reproduce" in runner.explain(x)
    for _ in range(2):
        before = next(calls)
        assert torch.equal(runner(x), x + before + 1)


def test_verification_can_be_switched_off_and_the_entry_says_so() -> None:
    runner = bcg.wrap(ReadsAGlobal(), verify="off")
    assert runner.capture(torch.ones(4))
    [entry] = runner.entries.values()
    assert entry.verified == "off"


class ConsumesRandomNumbersUnseen(nn.Module):
    """Draws while Python says so, which the capture bakes: results agree, the generator does not."""

    def forward(self, x: Tensor) -> Tensor:
        if next(calls) % 2:
            torch.rand(1)
        return x * 2


def test_an_entry_that_leaves_the_generator_elsewhere_is_rejected_and_the_generator_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # whatever other tests have left running
    runner = bcg.wrap(ConsumesRandomNumbersUnseen())
    state = torch.default_generator.get_state()
    assert not runner.capture(torch.ones(4))
    assert torch.equal(torch.default_generator.get_state(), state)
    [reason] = runner.rejections.values()
    assert "generators" in reason


@pytest.mark.parametrize(("verify", "word"), [("exact", "exact"), ("close", "close"), ("auto", "exact")])
def test_the_entry_says_how_it_was_verified(verify: str, word: str) -> None:
    runner = bcg.wrap(nn.Linear(4, 4).requires_grad_(False), verify=verify)
    assert runner.capture(torch.randn(2, 4))
    [entry] = runner.entries.values()
    assert (entry.verified, entry.hits) == (word, 0)


def test_an_error_in_the_verification_gives_the_memory_of_the_entry_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(expected: Any, got: Any, *, close: bool) -> str | None:
        raise torch.OutOfMemoryError("no room to compare (simulated)")

    resets: list[Entry] = []
    monkeypatch.setattr("bcg.capture.difference", raising)
    monkeypatch.setattr(Entry, "reset", lambda self: resets.append(self))
    runner = bcg.wrap(nn.Linear(4, 4))
    with torch.no_grad():
        assert not runner.capture(torch.ones(2, 4))
    monkeypatch.undo()  # before the process is asked whether it still captures
    assert len(resets) == 1
