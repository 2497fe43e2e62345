"""Metrics of runners for Prometheus: counters of `RunnerStats`, and what the entries hold.

Needs the ``serve`` extra. Nothing is counted twice and nothing is kept: each scrape reads the runners as they are, and
waits for no capture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from bcg.errors import MissingDependencyError
from bcg.memory import MemoryReport
from bcg.runner import BaseRunner, BreakableCudaGraphRunner
from bcg.stats import RunnerStats

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["RunnerCollector"]

_PREFIX: Final = "bcg"
_COUNTED: Final = {
    "calls": "Calls of the runner.",
    "replays": "Calls that a captured graph served.",
    "eager_calls": "Calls that the module ran eagerly.",
    "capture_calls": "Calls in a warmup window that captured, and were then served.",
    "captures": "Entries captured.",
    "rejections": "Captures that did not lead to an entry.",
    "evictions": "Entries that made room for others.",
    "guard_misses": "Calls whose signature is captured, but with other values in its guards.",
    "misses": "Calls whose signature is not captured.",
    "refusals": "Calls that no graph may serve.",
    "replay_failures": "Replays that raised and were served eagerly.",
}


class RunnerCollector:
    """Collect the metrics of runners whenever Prometheus asks.

    Counters are named ``bcg_<counter>_total``, gauges ``bcg_entries`` and ``bcg_memory_bytes``. All carry the runner's
    name as the label ``runner``. Memory also carries ``kind`` (``static``, ``hoists``, ``breaks``, ``outside``,
    ``pool``); a pool that several runners use is counted for the first of them alone, so that sums are right.

    Args:
        runners: Runners by the name that they have in the metrics.

    Raises:
        MissingDependencyError: prometheus-client is not installed.

    Example:
        >>> import bcg
        >>> from prometheus_client import CollectorRegistry, generate_latest
        >>> runner = bcg.wrap(torch.nn.Linear(4, 2).requires_grad_(False))
        >>> registry = CollectorRegistry()
        >>> registry.register(RunnerCollector({"transformer": runner}))
        >>> _ = runner(torch.ones(1, 4))
        >>> 'bcg_eager_calls_total{runner="transformer"} 1.0' in generate_latest(registry).decode()
        True
    """

    def __init__(self, runners: Mapping[str, BaseRunner]) -> None:
        self._families = _families()
        self._runners = dict(runners)

    def describe(self) -> Iterable[Metric]:
        """Yield the metrics without samples; a registry that asks for them need not collect when we register."""
        yield from self._counters({})
        yield from self._gauges({}, {})

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics as they are now."""
        yield from self._counters({name: runner.stats for name, runner in self._runners.items()})
        graphs = {
            name: runner for name, runner in self._runners.items() if isinstance(runner, BreakableCudaGraphRunner)
        }
        yield from self._gauges(graphs, {name: runner.memory() for name, runner in graphs.items()})

    def _counters(self, stats: Mapping[str, RunnerStats]) -> Iterator[Metric]:
        for field in fields(RunnerStats):
            text = _COUNTED.get(field.name, f"RunnerStats.{field.name}.")
            metric = self._families.CounterMetricFamily(f"{_PREFIX}_{field.name}", text, labels=["runner"])
            for name, counted in stats.items():
                metric.add_metric([name], getattr(counted, field.name))
            yield metric

    def _gauges(
        self, runners: Mapping[str, BreakableCudaGraphRunner], reports: Mapping[str, MemoryReport]
    ) -> Iterator[Metric]:
        entries = self._families.GaugeMetricFamily(f"{_PREFIX}_entries", "Captured entries kept.", labels=["runner"])
        memory = self._families.GaugeMetricFamily(
            f"{_PREFIX}_memory_bytes", "Device memory that captured entries hold.", labels=["runner", "kind"]
        )
        seen: set[int] = set()
        for name, report in reports.items():
            entries.add_metric([name], len(report.entries))
            for kind, size_bytes in _kinds(report).items():
                memory.add_metric([name, kind], size_bytes)
            pool = id(runners[name].pool)
            memory.add_metric([name, "pool"], 0 if pool in seen else report.pool_bytes)
            seen.add(pool)
        yield entries
        yield memory


def _kinds(report: MemoryReport) -> dict[str, int]:
    return {
        "static": report.static_bytes,
        "hoists": report.hoist_bytes,
        "breaks": report.break_bytes,
        "outside": report.outside_bytes,
    }


def _families() -> Any:
    try:
        from prometheus_client import core
    except ImportError as error:
        raise MissingDependencyError(
            "bcg.prometheus needs the package prometheus-client: install it with `pip install 'bcg[serve]'`."
        ) from error
    return core
