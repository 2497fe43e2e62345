"""Run a warm-up plan: the pipeline's own calls, largest first, and then once more to see that they replay."""

from __future__ import annotations

import contextlib
import logging
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.utils import _pytree as pytree

from bcg.entry import Entry
from bcg.errors import BcgError, PlanError
from bcg.proxy import ModuleProxy
from bcg.python_state import PythonState
from bcg.runner import BreakableCudaGraphRunner
from bcg.stats import RunnerStats
from bcg.warmup import open_window

from ._adapters import adapters_active, check_adapters
from ._defaults import bucket_lengths
from ._requests import CallBuilder
from .family import family_of
from .plan import WarmupPlan, WarmupRequest
from .report import RequestOutcome, ShortfallError, SignatureRow, WarmupReport, compile_note
from .wrap import runners_of

__all__ = ["warm"]

_log = logging.getLogger("bcg")

MAX_STEPS: Final = 48
"""Steps that are tried, at the most, to reach a denoiser that runs in some steps only."""
_CALLS_PER_REQUEST: Final = 4
"""Signatures that one request rarely exceeds in one denoiser: two of guidance, and other dtypes in the first step."""
_TIMING_ROUNDS: Final = 3

_Runners = dict[str, BreakableCudaGraphRunner]


def warm(
    pipe: Any,
    plan: WarmupPlan | None = None,
    *,
    full: bool = False,
    strict: bool = False,
    progress: bool = True,
) -> WarmupReport:
    """Capture what a plan's requests need, and tell what will replay.

    Each request is a real call of the pipeline in a warmup window, the largest first. Text is made up: random
    embeddings of the lengths that the plan says, where the pipeline takes embeddings, so that the text encoder runs for
    two short prompts and the negative ones only; results stay in latent space, so that the VAE does not run. Requests
    have as many steps as it takes to reach every denoiser (Wan 2.2 has one for the noisy steps and one for the rest)
    and both sides of where a call stops guiding. Afterwards every request runs again with other values, outside of the
    window: only what then replays is reported to replay. Misses remembered from before are forgotten.

    Args:
        pipe: A pipeline that `wrap_pipeline` wrapped.
        plan: What will be served; `WarmupPlan.for_pipeline` where left out.
        full: Run text encoder and VAE as well, as their runners need, or to load their kernels.
        strict: Raise where a request of the plan will not replay.
        progress: Show a progress bar.

    Returns:
        The report.

    Raises:
        PlanError: The plan is empty, asks for what the pipeline cannot do, or has more signatures than ``max_entries``,
            in which case nothing has been captured.
        ShortfallError: With ``strict``, a request will not replay; it holds the report.

    Example:
        >>> plan = WarmupPlan(resolutions=[(1024, 1024)], guidance=(True, False))
        >>> report = warm(wrap_pipeline(pipe), plan)            # doctest: +SKIP
        >>> report.complete                                     # doctest: +SKIP
        True
    """
    plan = WarmupPlan.for_pipeline(pipe) if plan is None else plan
    warming = _Warming(pipe, plan, full=full)
    warming.check()
    with _quiet(pipe), _progress(progress, 2 * len(warming.requests)) as step:
        report = warming.run(step)
    for shortfall in report.shortfalls:
        _log.warning("%s: will not replay: %s", report.pipeline, shortfall)
    if strict and not report.complete:
        raise ShortfallError(report)
    return report


class _Warming:
    """One run of a plan."""

    def __init__(self, pipe: Any, plan: WarmupPlan, *, full: bool) -> None:
        self.requests = plan.expand()
        self._pipe = pipe
        self._full = full
        denoisers = family_of(pipe).denoisers
        self._runners: _Runners = {
            name: runner for name, runner in runners_of(pipe).items() if full or name in denoisers
        }
        arguments = self.requests[0].arguments if self.requests else {}
        self._builder = CallBuilder(pipe, full=full, arguments=arguments)
        self._rows: list[SignatureRow] = []
        self._seen: set[Entry] = set()
        self._steps: dict[str, int] = {}
        self._unreached: set[tuple[str, ...]] = set()

    # -- before it starts ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise where the plan cannot be run."""
        if not self._runners:
            raise PlanError(f"{type(self._pipe).__name__} has no runner: call wrap_pipeline(pipe) before warm(pipe).")
        if not self.requests:
            raise PlanError("the plan is empty: give resolutions, such as [(1024, 1024)], or requests.")
        check_adapters(self._pipe, [request.adapters for request in self.requests])
        for request in self.requests:
            self._builder.arguments(request, steps=1)
        limit = min(runner._self_config.max_entries for runner in self._runners.values())
        if len(self.requests) * _CALLS_PER_REQUEST > limit:
            with _quiet(self._pipe):
                self._count_signatures()

    def _count_signatures(self) -> None:
        """Run every request without capturing, each signature eagerly once, and raise where there are too many."""
        tallies = {name: _Tally(runner) for name, runner in self._runners.items()}
        with _replaced(self._pipe, tallies):
            for number, request in enumerate(self.requests, 1):
                try:
                    self._call(request, self._builder.steps(request), seed=0)
                except _TooManyError as error:
                    raise PlanError(
                        f"the plan needs more signatures than max_entries={error.limit} of {error.name} can keep: "
                        f"{error.limit + 1} after {number} of {len(self.requests)} requests. The cache would drop the "
                        f"first and largest while the last are captured. Give wrap_pipeline(pipe, max_entries="
                        f"{_rounded(error.limit, number, len(self.requests))}), or a smaller plan."
                    ) from None
                except Exception as error:  # told again, with its request, by the run itself
                    _log.debug("%s could not be counted: %s", request, error)

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(self, step: Any) -> WarmupReport:
        """Capture, try, and report."""
        started = time.perf_counter()
        failures: dict[int, str] = {}
        for index, request in enumerate(self.requests):
            step(f"Capturing {request}")
            failure = self._capture(request)
            if failure is not None:
                failures[index] = failure
        outcomes = []
        for index, request in enumerate(self.requests):
            step(f"Trying {request}")
            failure = failures.get(index)
            outcomes.append(self._try(request) if failure is None else _failed(request, failure))
        lengths, notes = self._text_limits(outcomes)
        for runner in self._runners.values():
            runner.forget_misses()
        return WarmupReport(
            pipeline=type(self._pipe).__name__,
            rows=tuple(self._rows),
            outcomes=tuple(outcomes),
            notes=(*notes, *self._guard_notes(), *self._idle_notes(), *self._compile_notes()),
            text_lengths=lengths,
            is_bucketed=bool(bucket_lengths(self._pipe)),
            total_s=time.perf_counter() - started,
            total_bytes=sum(entry.bytes for runner in self._runners.values() for entry in runner.entries.values()),
        )

    def _capture(self, request: WarmupRequest) -> str | None:
        """Run a request in a window, with more steps until every denoiser took part; return why that failed."""
        steps = self._builder.steps(request)
        try:
            while True:
                before = self._stats()
                with open_window() as window:
                    self._call(request, steps, seed=0)
                    window.captures += 1  # a request that is captured already needs no warning
                unreached = _uncalled(before, self._stats())
                if not unreached or unreached in self._unreached:
                    break
                if 2 * steps > MAX_STEPS:
                    self._unreached.add(unreached)
                    break
                steps *= 2
        except (RuntimeError, TypeError, ValueError, AssertionError, BcgError) as error:
            return f"the pipeline raised {type(error).__name__}: {error}"
        self._steps[repr(request)] = steps
        self._note_entries(request)
        return None

    def _try(self, request: WarmupRequest) -> RequestOutcome:
        """Run a request as a server would, with other values than were captured."""
        for runner in self._runners.values():
            runner.forget_misses()
        steps = self._steps[repr(request)]
        before = self._stats()
        self._call(request, steps, seed=1)
        after = self._stats()
        calls = {name: after[name].calls - before[name].calls for name in before}
        return RequestOutcome(
            request=request,
            steps=steps,
            calls=calls,
            replays=sum(after[name].replays - before[name].replays for name in before),
            reasons=tuple(self._why(before, after)),
        )

    def _why(self, before: dict[str, RunnerStats], after: dict[str, RunnerStats]) -> Iterator[str]:
        for name, runner in self._runners.items():
            if after[name].eager_calls == before[name].eager_calls:
                continue
            for miss in runner.misses:
                yield f"{name} {miss.reason}"
            if after[name].refusals > before[name].refusals:
                yield from (f"{name} runs eagerly: {reason}" for reason in runner.refusals)

    def _call(self, request: WarmupRequest, steps: int, seed: int) -> None:
        with adapters_active(self._pipe, request.adapters):
            self._pipe(**self._builder.arguments(request, steps=steps, seed=seed))

    def _stats(self) -> dict[str, RunnerStats]:
        return {name: runner.stats for name, runner in self._runners.items()}

    # -- what is told ----------------------------------------------------------------------------------------------

    def _note_entries(self, request: WarmupRequest) -> None:
        """Keep a row of each new entry, timed while the module is as it was captured."""
        with adapters_active(self._pipe, request.adapters):
            for name, runner in self._runners.items():
                for entry in runner.entries.values():
                    if entry not in self._seen:
                        self._seen.add(entry)
                        self._rows.append(_row(name, runner, entry, request))

    def _text_limits(self, outcomes: Sequence[RequestOutcome]) -> tuple[tuple[int, ...] | None, list[str]]:
        """Tell which prompts replay: all, or those of the lengths that were captured."""
        buckets = bucket_lengths(self._pipe)
        if any("prompt_embeds" in one.request.arguments for one in outcomes):
            return None, []
        if buckets:
            return buckets, [f"text is padded to {_listed(buckets)} tokens; longer prompts run eagerly."]
        if self._builder.text_kind == "fixed":
            return None, []
        lengths = {one.request.text_length or self._builder.short_length for one in outcomes if one.will_replay}
        found = tuple(sorted(lengths))
        if self._builder.text_kind == "masked" and self._any_length_replays(outcomes):
            return None, []
        reason = family_of(self._pipe).text_reason
        why = f" Text buckets are not possible: {reason}." if reason else ""
        return found, [f"prompts of {_listed(found)} tokens replay, prompts of other lengths run eagerly.{why}"]

    def _any_length_replays(self, outcomes: Sequence[RequestOutcome]) -> bool:
        """Try a prompt of a length that was not captured, where lengths are a matter of the mask."""
        tried = [one.request for one in outcomes if one.will_replay]
        if not tried:
            return True
        known = {request.text_length for request in tried} | {self._builder.short_length}
        smallest = tried[-1]
        length = next(count for count in range(2, len(known) + 3) if count not in known)
        before = self._stats()
        other = replace(smallest, text_length=length)
        with _unheard():
            self._call(other, self._steps[repr(smallest)], seed=2)
        return all(self._stats()[name].eager_calls == before[name].eager_calls for name in before)

    def _guard_notes(self) -> Iterator[str]:
        for name in self._runners:
            guards = sum(row.guards for row in self._rows if row.component == name)
            if guards:
                yield (
                    f"{name} reads {guards} values on the host; a call whose values were not captured runs eagerly, "
                    "with the same result."
                )

    def _idle_notes(self) -> Iterator[str]:
        for name, stats in self._stats().items():
            if not stats.calls:
                yield f"{name} was never called, with up to {MAX_STEPS} steps, and has no graphs."

    def _compile_notes(self) -> Iterator[str]:
        for name, runner in self._runners.items():
            note = compile_note(name, runner.transformer, runner._self_config)
            if note is not None and any(row.component == name for row in self._rows):
                yield note


# --- counting --------------------------------------------------------------------------------------------------------


class _TooManyError(Exception):
    """More signatures than can be kept."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(name)
        self.name = name
        self.limit = limit


class _Tally(ModuleProxy):
    """Stands in for a runner, runs the module once for each signature, and repeats that result for the rest."""

    def __init__(self, runner: BreakableCudaGraphRunner) -> None:
        super().__init__(runner.transformer)
        self._self_runner = runner
        self._self_results: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner = self._self_runner
        args, kwargs = runner._prepared(args, kwargs)
        call = runner._bind(args, kwargs)
        if call is None or call.signature is None:
            return self.__wrapped__(*args, **kwargs)
        key = runner._key(call)
        if key not in self._self_results:
            limit = runner._self_config.max_entries
            if len(self._self_results) == limit:
                raise _TooManyError(runner._name(), limit)
            self._self_results[key] = self.__wrapped__(*args, **kwargs)
        return pytree.tree_map_only(Tensor, torch.clone, self._self_results[key])


@contextlib.contextmanager
def _replaced(pipe: Any, components: dict[str, Any]) -> Iterator[None]:
    """Put other components into a pipeline for a while; those of components, such as ``vae.decode``, are left."""
    kept = {name: getattr(pipe, name) for name in components if hasattr(pipe, name)}
    try:
        for name in kept:
            setattr(pipe, name, components[name])
        yield
    finally:
        for name, component in kept.items():
            setattr(pipe, name, component)


def _rounded(limit: int, done: int, total: int) -> int:
    """Guess how many entries the whole plan needs, from the requests that were counted; a power of two."""
    return int(2 ** ((limit + 1) * total // done).bit_length())


# --- small parts -----------------------------------------------------------------------------------------------------


def _uncalled(before: dict[str, RunnerStats], after: dict[str, RunnerStats]) -> tuple[str, ...]:
    return tuple(name for name in before if after[name].calls == before[name].calls)


def _failed(request: WarmupRequest, reason: str) -> RequestOutcome:
    return RequestOutcome(request=request, steps=0, calls={}, replays=0, reasons=(reason,))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "no"


def _row(name: str, runner: BreakableCudaGraphRunner, entry: Entry, request: WarmupRequest) -> SignatureRow:
    eager_ms, replay_ms = _time(runner, entry)
    return SignatureRow(
        component=name,
        signature=entry.signature.summary(),
        request=str(request),
        segments=entry.segments,
        breaks=entry.breaks,
        guards=entry.guards,
        capture_s=entry.capture_s,
        bytes=entry.bytes,
        eager_ms=eager_ms,
        replay_ms=replay_ms,
        verified=entry.verified,
        arm=entry.choice.arm if entry.choice is not None else None,
        arms_ms=entry.choice.median_ms if entry.choice is not None else {},
    )


def _time(runner: BreakableCudaGraphRunner, entry: Entry) -> tuple[float | None, float | None]:
    """Time an entry both ways in turn, on what its inputs hold; None for both where its guards miss there."""
    module, backend = runner.transformer, entry.pool.backend
    # Only where the forward draws: the generators belong to all threads.
    generators = backend.generator_states(entry.pool.device) if entry.random else []
    state = PythonState(module)
    live = [tensor.clone() for tensor in entry.inputs.tensors]
    hits = entry.hits
    samples: tuple[list[float], list[float]] = ([], [])
    try:
        args, kwargs = entry.call.rebuild(live)
        with torch.no_grad(), runner._locked():
            for _ in range(_TIMING_ROUNDS):
                samples[0].append(_elapsed_ms(entry, lambda: module(*args, **kwargs)))
                samples[1].append(_elapsed_ms(entry, lambda: entry.replay(live)))
    except (BcgError, RuntimeError, ValueError) as error:  # another thread may have evicted it
        _log.debug("%r could not be timed: %s", entry, error)
        return None, None
    finally:
        entry.hits = hits
        state.restore()
        for generator, value in generators:
            generator.set_state(value)
    return statistics.median(samples[0]), statistics.median(samples[1])


def _elapsed_ms(entry: Entry, call: Any) -> float:
    entry.pool.backend.synchronize(entry.pool.device)
    started = time.perf_counter()
    call()
    entry.pool.backend.synchronize(entry.pool.device)
    return (time.perf_counter() - started) * 1e3


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Keep what this thread logs of a call that was expected to miss away from the user, who is told in the report."""
    thread = threading.get_ident()

    def is_heard(record: logging.LogRecord) -> bool:
        return record.thread != thread

    _log.addFilter(is_heard)
    try:
        yield
    finally:
        _log.removeFilter(is_heard)


@contextlib.contextmanager
def _quiet(pipe: Any) -> Iterator[None]:
    """Switch the pipeline's own bar off, which would tear ours."""
    before = getattr(pipe, "_progress_bar_config", None)
    if hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(**{**(before or {}), "disable": True})
    try:
        yield
    finally:
        if before is not None:
            pipe._progress_bar_config = before
        elif hasattr(pipe, "_progress_bar_config"):
            del pipe._progress_bar_config


@contextlib.contextmanager
def _progress(visible: bool, total: int) -> Iterator[Any]:
    """Show a bar, and yield what says which of ``total`` steps begins."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not visible) as bar:
        task = bar.add_task("Warming up", total=total)
        begun = 0

        def step(description: str) -> None:
            nonlocal begun
            bar.update(task, description=description, completed=begun)
            begun += 1

        yield step
        bar.update(task, description="Warmed up", completed=total)
