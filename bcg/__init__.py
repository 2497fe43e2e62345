"""Breakable CUDA graphs for diffusion transformers.

pipe.transformer = bcg.wrap(pipe.transformer)
with bcg.warmup():
    pipe("a prompt", height=1024, width=1024)
pipe("another prompt", height=1024, width=1024)      # replays; the same image, bit for bit
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from bcg.cache import EntriesView, VariantKey
from bcg.config import RunnerConfig
from bcg.entry import Entry, EntryKey
from bcg.errors import (
    BackendError,
    BcgError,
    CaptureError,
    ConfigError,
    DoesNotPayError,
    GuardMiss,
    HostileOperationError,
    InterferenceError,
    MissingDependencyError,
    NestedCaptureError,
    NotAModuleError,
    PlanError,
    ReplayError,
    SegmentLimitError,
    StateWriteError,
    VerificationError,
)
from bcg.graph import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    break_graph,
    eager_on_graph,
    replay_token,
)
from bcg.interception import Finding
from bcg.memory import EntryMemory, MemoryReport
from bcg.misses import CallerArguments, Miss
from bcg.report import CaptureReport, OpaqueArgument, inspect
from bcg.runner import BaseRunner, BreakableCudaGraphRunner, EagerRunner, unwrap, wrap
from bcg.signature import Signature, TensorSpec, register_key, unregister_key
from bcg.stats import RunnerStats
from bcg.warmup import Window, in_warmup
from bcg.warmup import open_window as _open_window

if _TYPE_CHECKING:
    from bcg.pipelines.plan import WarmupPlan as _WarmupPlan

__version__ = "0.1.0"


def warmup(runner: BreakableCudaGraphRunner | None = None) -> contextlib.AbstractContextManager[Window]:
    """Open a warmup window: the only place where calls of wrapped modules capture.

    Args:
        runner: Open the window of this runner, for all threads; without it, the window of all runners, for this thread
            or task (threads and executors do not inherit it).

    Returns:
        A context manager. A window that saw calls and captured nothing warns at its end.

    Example:
        >>> with warmup():
        ...     in_warmup()
        True
    """
    return _open_window(None if runner is None else runner._self_identity)


def plan_from_misses(pipe: _Any) -> _WarmupPlan:
    """Make the next warmup plan of a wrapped pipeline: the requests whose calls ran eagerly for want of a graph.

    Args:
        pipe: A pipeline that `bcg.pipelines.wrap_pipeline` wrapped.

    Returns:
        The plan; empty where nothing missed since the last `bcg.pipelines.warm`. It can be saved as JSON.
    """
    from bcg.pipelines.misses import plan_from_misses as plan

    return plan(pipe)


__all__ = [
    "BackendError",
    "BaseRunner",
    "BcgError",
    "BreakableCUDAGraph",
    "BreakableCUDAGraphCapture",
    "BreakableCudaGraphRunner",
    "CallerArguments",
    "CaptureError",
    "CaptureReport",
    "ConfigError",
    "DoesNotPayError",
    "EagerRunner",
    "EntriesView",
    "Entry",
    "EntryKey",
    "EntryMemory",
    "Finding",
    "GuardMiss",
    "HostileOperationError",
    "InterferenceError",
    "MemoryReport",
    "Miss",
    "MissingDependencyError",
    "NestedCaptureError",
    "NotAModuleError",
    "OpaqueArgument",
    "PlanError",
    "ReplayError",
    "RunnerConfig",
    "RunnerStats",
    "SegmentLimitError",
    "Signature",
    "StateWriteError",
    "TensorSpec",
    "VariantKey",
    "VerificationError",
    "Window",
    "break_graph",
    "eager_on_graph",
    "in_warmup",
    "inspect",
    "plan_from_misses",
    "register_key",
    "replay_token",
    "unregister_key",
    "unwrap",
    "warmup",
    "wrap",
]

for _name in __all__:
    globals()[_name].__module__ = __name__
