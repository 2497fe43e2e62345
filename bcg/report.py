"""Tell what a capture of a call would meet, without keeping a graph and on any device."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bcg.errors import CaptureError
from bcg.interception import Finding
from bcg.runner import BreakableCudaGraphRunner, unwrap, wrap


@dataclass(frozen=True)
class CaptureReport:
    """Say what stands between a call and a single CUDA graph.

    Attributes:
        module: Class of the module.
        findings: Hoists, guards, breaks and module breaks, in the order in which the forward meets them.
        segments: Graph segments of the capture; 0 where it was rejected.
        rejected: Why the call cannot be captured; None where it can.
        verified: ``exact``, or why the capture was not verified on fresh inputs.
    """

    module: str
    findings: tuple[Finding, ...]
    segments: int
    rejected: str | None
    verified: str

    def of_kind(self, kind: str) -> list[Finding]:
        """Return the findings of one kind: ``hoist``, ``guard``, ``break``, ``module break``, ``compiled``."""
        return [finding for finding in self.findings if finding.kind == kind]

    def __str__(self) -> str:
        lines = [f"{self.module}: " + (f"rejected: {self.rejected}" if self.rejected else f"{self.segments} segments")]
        lines += [f"  {finding}" for finding in self.findings]
        return "\n".join(lines)


def inspect(module: nn.Module, *args: Any, **kwargs: Any) -> CaptureReport:
    """Report what a capture of a call meets: hoists, guards, breaks, opaque arguments, with their source lines.

    Runs the forward a few times, on the device where the module is (the tape stands in for a graph on the CPU), and
    keeps no graph. Module and random state are as before.

    Args:
        module: The module, or a runner.
        *args: The call's positional arguments.
        **kwargs: The call's keyword arguments.

    Returns:
        The report.

    Example:
        >>> import bcg, torch
        >>> with torch.no_grad():
        ...     report = bcg.inspect(torch.nn.Linear(4, 2), torch.ones(1, 4))
        >>> report.segments, report.findings
        (1, ())
    """
    inner = unwrap(module)
    with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
        runner = wrap(inner)
        try:
            return _report(runner, args, kwargs)
        finally:
            runner.reset()


def _report(runner: BreakableCudaGraphRunner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureReport:
    name = type(runner.transformer).__name__
    if runner.capture(*args, **kwargs):
        entry = list(runner.entries.values())[-1]
        return CaptureReport(name, entry.findings, entry.segments, None, entry.verified)
    return CaptureReport(name, _findings(runner, args, kwargs), 0, runner.explain(*args, **kwargs), "no")


def _findings(runner: BreakableCudaGraphRunner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Finding, ...]:
    try:
        return tuple(runner.observe(*args, **kwargs))
    except CaptureError:
        return ()
