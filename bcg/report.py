"""Tell what a capture of a call would meet, without keeping a graph and on any device."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bcg.config import RunnerConfig
from bcg.errors import CaptureError
from bcg.foresight import foresee
from bcg.interception import Finding
from bcg.runner import BreakableCudaGraphRunner, unwrap, wrap
from bcg.signature import CallBinder, opaque_arguments

_OPAQUE_KINDS = frozenset({"module break", "compiled"})


@dataclass(frozen=True)
class OpaqueArgument:
    """An argument, or a part of one, that keeps a call from being served by a graph.

    Attributes:
        path: Such as ``attention_kwargs['callback']``.
        reason: What it is that it cannot be compared from call to call.
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return f"argument `{self.path}` {self.reason}"


@dataclass(frozen=True)
class CaptureReport:
    """Say what stands between a call and a single CUDA graph.

    Attributes:
        module: Class of the module.
        findings: Hoists, guards, breaks and module breaks, in the order in which the forward meets them.
        segments: Graph segments of the capture; 0 where it was rejected.
        rejected: Why the call cannot be captured; None where it can.
        verified: ``exact``, or why the capture was not verified on fresh inputs.
        opaque: Arguments for which the call runs eagerly.
        on_gpu: What a capture on a GPU meets besides, where the module is on the host and was captured there: copies
            from host to device. A tensor that a forward on the host has cached may show as one.
        on_gpu_unknown: Why that is not known; None where it is.
    """

    module: str
    findings: tuple[Finding, ...]
    segments: int
    rejected: str | None
    verified: str
    opaque: tuple[OpaqueArgument, ...] = ()
    on_gpu: tuple[Finding, ...] = ()
    on_gpu_unknown: str | None = None

    def of_kind(self, kind: str) -> list[Finding]:
        """Return the findings of one kind: ``hoist``, ``guard``, ``break``, ``module break``, ``compiled``."""
        return [finding for finding in self.findings if finding.kind == kind]

    def __str__(self) -> str:
        lines = [f"{self.module}: " + (f"rejected: {self.rejected}" if self.rejected else f"{self.segments} segments")]
        lines += [f"  {part}" for part in (*self.opaque, *self.findings)]
        lines += [f"  on a GPU also {finding}" for finding in self.on_gpu]
        if self.on_gpu_unknown is not None:
            lines.append(f"  what a GPU meets besides is not known: {self.on_gpu_unknown}")
        return "\n".join(lines)


def inspect(module: nn.Module, *args: Any, **kwargs: Any) -> CaptureReport:
    """Report what a capture of a call meets: hoists, guards, breaks, opaque arguments, with their source lines.

    Runs the forward a few times, on the device where the module is (the tape stands in for a graph on the CPU), and
    keeps no graph. On the CPU the forward of a copy that shares the weights runs once more, with tensors that pass for
    another device's: that shows the copies from host to device which a GPU will meet. Module and random state are as
    before.

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
        >>> report.segments, report.findings, report.on_gpu
        (1, (), ())
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
        on_gpu, unknown = _on_gpu(runner, args, kwargs, entry.findings)
        return CaptureReport(name, entry.findings, entry.segments, None, entry.verified, (), on_gpu, unknown)
    rejected, opaque = runner.explain(*args, **kwargs), _opaque(runner, args, kwargs)
    return CaptureReport(name, _findings(runner, args, kwargs), 0, rejected, "no", opaque)


def _findings(runner: BreakableCudaGraphRunner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Finding, ...]:
    try:
        return tuple(runner.observe(*args, **kwargs))
    except CaptureError:
        return ()


def _opaque(
    runner: BreakableCudaGraphRunner, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[OpaqueArgument, ...]:
    arguments = CallBinder(runner.transformer.forward).bind(args, kwargs)
    if arguments is None:
        return ()
    max_leaves = RunnerConfig.from_environment().max_leaves
    return tuple(OpaqueArgument(*found) for found in opaque_arguments(arguments, max_leaves=max_leaves))


def _on_gpu(
    runner: BreakableCudaGraphRunner, args: tuple[Any, ...], kwargs: dict[str, Any], known: tuple[Finding, ...]
) -> tuple[tuple[Finding, ...], str | None]:
    """Return what a capture on a GPU meets besides, and why that is not known, if it is not."""
    module, config = runner.transformer, RunnerConfig.from_environment()
    call = CallBinder(module.forward).call(args, kwargs, max_leaves=config.max_leaves)
    if runner.pool.device.type != "cpu" or call is None:
        return (), None
    if any(finding.kind == "compiled" for finding in known):
        return (), "compiled code is not looked into, and does not run on tensors that pass for another device's."
    broken = {finding.name for finding in known if finding.kind == "module break"}
    try:
        found = foresee(module, call, config, broken)
    except Exception as error:
        return (), f"no forward runs on tensors that pass for another device's: {type(error).__name__}: {error}"
    return _besides(found, known), None


def _besides(found: Iterable[Finding], known: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings without those that are known; names differ, since the two devices read in different ways."""
    left = Counter((finding.kind, finding.where) for finding in known)
    more = []
    for finding in found:
        mark = (finding.kind, finding.where)
        left[mark] -= 1
        if left[mark] < 0 and finding.kind not in _OPAQUE_KINDS:
            more.append(finding)
    return tuple(more)
