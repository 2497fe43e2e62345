"""The collector tells what the runners count and hold, once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import bcg
from bcg.prometheus import _COUNTED, RunnerCollector
from bcg.stats import RunnerStats


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def samples() -> Any:
    client = pytest.importorskip("prometheus_client")

    def collect(**runners: Any) -> Any:
        registry = client.CollectorRegistry()
        registry.register(RunnerCollector(runners))
        return registry.get_sample_value

    return collect


def test_counters_follow_the_runner(samples: Any) -> None:
    runner = bcg.wrap(nn.Linear(4, 2))
    value = samples(transformer=runner)
    label = {"runner": "transformer"}
    assert value("bcg_calls_total", label) == 0
    runner.capture(torch.randn(1, 4))
    for rows in (1, 1, 3):
        runner(torch.randn(rows, 4))
    assert value("bcg_calls_total", label) == 3
    assert value("bcg_replays_total", label) == 2
    assert value("bcg_misses_total", label) == 1
    assert value("bcg_captures_total", label) == 1
    assert value("bcg_entries", label) == 1


def test_every_counter_of_the_stats_is_a_metric_with_a_text_of_its_own(samples: Any) -> None:
    assert set(_COUNTED) == set(vars(RunnerStats()))
    value = samples(a=bcg.wrap(nn.Linear(4, 2)))
    assert all(value(f"bcg_{name}_total", {"runner": "a"}) == 0 for name in _COUNTED)


def test_memory_is_told_by_kind_and_adds_up(samples: Any) -> None:
    runner = bcg.wrap(nn.Linear(4, 2))
    for rows in (8, 2):
        runner.capture(torch.randn(rows, 4))
    value = samples(a=runner)
    kinds = ("static", "hoists", "breaks", "outside", "pool")
    told = [value("bcg_memory_bytes", {"runner": "a", "kind": kind}) for kind in kinds]
    assert told == [8 * 4 * 4, 0, 0, 0, 0]
    assert sum(told) == runner.memory().total_bytes


def test_a_shared_pool_is_counted_for_its_first_runner_alone(samples: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = bcg.wrap(nn.Linear(4, 2))
    other, third = bcg.wrap(nn.Linear(4, 2), pool=one.pool), bcg.wrap(nn.Linear(4, 2))
    monkeypatch.setattr(type(one.pool), "bytes", lambda pool: 100)
    value = samples(one=one, other=other, third=third)
    told = [value("bcg_memory_bytes", {"runner": name, "kind": "pool"}) for name in ("one", "other", "third")]
    assert told == [100, 0, 100]


def test_an_eager_runner_has_counters_and_no_memory(samples: Any) -> None:
    runner = bcg.EagerRunner(nn.Linear(4, 2))
    runner(torch.randn(1, 4))
    value = samples(plain=runner)
    assert value("bcg_eager_calls_total", {"runner": "plain"}) == 1
    assert value("bcg_entries", {"runner": "plain"}) is None


def test_registering_reads_no_runner() -> None:
    client = pytest.importorskip("prometheus_client")

    class Untouchable(bcg.EagerRunner):
        @property
        def stats(self) -> Any:
            raise AssertionError("read at registration")

    client.CollectorRegistry().register(RunnerCollector({"a": Untouchable(nn.Linear(4, 2))}))


def test_without_the_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(bcg.MissingDependencyError, match=r"pip install 'bcg\[serve\]'"):
        RunnerCollector({})
