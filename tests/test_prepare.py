"""The seam between a pipeline and its runner, and pools that are shared by naming a runner."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg


class Summed(nn.Module):
    """Multiplies rows by a weight and adds them up: rows of zeros change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        return (rows * self.weight).sum(0)


def to_eight_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    rows = kwargs["rows"]
    return args, {"rows": torch.cat([rows, rows.new_zeros(8 - len(rows), *rows.shape[1:])])}


def test_calls_that_are_prepared_alike_share_one_graph() -> None:
    runner = bcg.wrap(Summed(), prepare=to_eight_rows)
    with bcg.warmup():
        runner(rows=torch.ones(3))
    for length in (1, 5, 8):
        assert runner(rows=torch.arange(length).float()) == 2 * sum(range(length))
    assert (runner.stats.captures, runner.stats.replays) == (1, 3)


def test_an_eager_call_is_prepared_too() -> None:
    seen: list[int] = []
    module = Summed()
    module.register_forward_pre_hook(lambda _, args, kwargs: seen.append(len(kwargs["rows"])), with_kwargs=True)
    bcg.wrap(module, prepare=to_eight_rows)(rows=torch.ones(3))
    assert seen == [8]


def test_explicit_use_is_prepared_too() -> None:
    runner = bcg.wrap(Summed(), prepare=to_eight_rows)
    assert runner.capture(rows=torch.ones(3))
    assert runner.explain(rows=torch.ones(5)).startswith("replays")
    assert runner.observe(rows=torch.ones(2)) == []
    assert next(iter(runner.entries.values())).signature.tensor_specs[0].shape == (8,)


def test_a_copy_prepares_its_calls_too() -> None:
    runner = copy.deepcopy(bcg.wrap(Summed(), prepare=to_eight_rows))
    assert runner.capture(rows=torch.ones(3))
    assert next(iter(runner.entries.values())).signature.tensor_specs[0].shape == (8,)


def test_an_error_in_prepare_reaches_the_caller() -> None:
    with pytest.raises(KeyError, match="rows"):
        bcg.wrap(Summed(), prepare=to_eight_rows)(torch.ones(3))


def test_a_pool_is_shared_by_naming_the_other_runner() -> None:
    first = bcg.wrap(Summed())
    assert bcg.wrap(Summed(), pool=first).pool is first.pool


def test_a_pool_on_another_device_is_not_shared() -> None:
    first = bcg.wrap(Summed().to("meta"))
    assert bcg.wrap(Summed(), pool=first).pool is not first.pool


def test_a_shared_pool_is_followed_when_both_modules_move() -> None:
    first = bcg.wrap(Summed())
    second = bcg.wrap(Summed(), pool=first)
    before = first.pool
    for runner in (second, first):
        runner.to("meta")
    assert second.pool is first.pool
    assert first.pool is not before
