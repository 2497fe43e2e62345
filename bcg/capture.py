"""Capture one call of a module: warm up, record, verify, and try again where a break can help.

Nothing here serves a call. Whatever goes wrong is a `CaptureError`; Python state and random number generators are then
as they were before.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from bcg import _torch, probes, trees
from bcg.ambient import ambient_state
from bcg.backends import Backend, Pool
from bcg.compilation import Compiler
from bcg.config import RunnerConfig
from bcg.entry import Entry, EntryKey, OutputTemplate
from bcg.errors import (
    CaptureError,
    GuardMiss,
    HostileOperationError,
    InterferenceError,
    StateWriteError,
    VerificationError,
)
from bcg.functions import redirected
from bcg.graph import BreakableCUDAGraphCapture
from bcg.host_random import HostRandomWatch
from bcg.interception import CaptureRun, DryRun, Finding, OperationFailedError, Policy
from bcg.memory import OutsideMeter
from bcg.module_state import ModuleState, describe_difference, moving_parts
from bcg.patching import (
    broken_modules,
    compiled_submodules,
    is_torch_function,
    patched,
    resolve_function,
)
from bcg.python_state import PythonState
from bcg.recipe import PLAIN, Recipe
from bcg.signature import VARIABLE_POSITIONALS, Call
from bcg.source import naming
from bcg.static_inputs import StaticArena, StaticInputs
from bcg.steps import EagerStep, GuardStep, same_value
from bcg.verification import difference, fresh_inputs

_log = logging.getLogger("bcg")
_FRESH_SEED = 20_232
_GENERATORS_DIFFER: Final = "random number generators are left in another state"
_TRIES_BESIDE_OTHERS: Final = 3
_MAX_MODULE_BREAK_ROUNDS = 8  # a break that misses again moves outwards one module a round


@dataclass
class Learned:
    """What earlier captures of a class of modules found out.

    Attributes:
        operations: Operations that fail inside a capture.
        classes: Classes of submodules whose host reads change with the content.
    """

    operations: set[str] = field(default_factory=set)
    classes: set[type] = field(default_factory=set)


_Generators = list[tuple[torch.Generator, Tensor]]

_learned: weakref.WeakKeyDictionary[type, Learned] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Seams:
    """Where a host takes part in captures.

    Attributes:
        barrier: Called before every eager step while capturing; ranks wait for each other there.
        capture_context: Makes a context manager that is entered around each capture.
    """

    barrier: Callable[[], None] | None = None
    capture_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None


class Capturer:
    """Captures calls of one module.

    Args:
        module: The module.
        device: Where it is.
        state: Its state.
        config: Options.
        pool: Scratch memory.
        arena: Memory for static inputs.
        seams: Where a host takes part.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, state: ModuleState, config: RunnerConfig, pool: Pool,
        arena: StaticArena, seams: Seams,
    ) -> None:  # fmt: skip
        self.device = device
        self._module = module
        self._state = state
        self._config = config
        self._pool = pool
        self._arena = arena
        self._seams = seams
        self._compiler = Compiler(module, device, config)
        self._recipe = PLAIN
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}  # of eager modules, which may write to them, with copies
        self._random = False  # forwards draw from the default generators, which are then put back
        self._unsettled: list[Any] = []  # the result of a first forward that changed Python state
        functions = {name: resolve_function(name) for name in config.eager_functions}
        self._torch_functions = frozenset(function for function in functions.values() if is_torch_function(function))
        self._functions = [pair for pair in functions.items() if pair[1] not in self._torch_functions]

    @property
    def _backend(self) -> Backend:
        return self._pool.backend

    @property
    def draws_random(self) -> bool:
        """Whether forwards like the last captured one draw from the default generators."""
        return self._random

    def capture(self, call: Call, recipe: Recipe = PLAIN) -> Entry:
        """Capture a call.

        Args:
            call: A call with a signature.
            recipe: What stands in for parts of the module while it is captured.

        Returns:
            The entry, verified as the config asks.

        Raises:
            CaptureError: The call cannot be captured; the message says why.
            Exception: What the module itself raises passes unchanged.
        """
        started = time.perf_counter()
        self._recipe = recipe
        with self._compiler.session() if recipe.compiled else contextlib.nullcontext():
            entry = self._capture(call)
        # The key is what later calls find: torch orders its attention kernels in the first call of a process.
        entry.key = EntryKey(entry.signature.under(ambient_state()), entry.key.state)
        entry.capture_s = time.perf_counter() - started
        return entry

    def _capture(self, call: Call) -> Entry:
        before = PythonState(self._module)
        generators = self._backend.generator_states(self._pool.device)
        self._random = False
        try:
            with self._in_order(), _without_autocast_cache(), naming(self._module):
                entry = self._try_until_verified(call, generators)
        except BaseException:
            before.restore()
            raise
        finally:
            self._unsettled.clear()
            self._put_back(generators)
            self._buffers.clear()
        # Only now: the device makes room for a graph when it is launched first.
        entry.outside_bytes = self._outside.grown_bytes()
        return entry

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """Run a block behind a replay in flight on another stream, and the next replay behind the block.

        Captures write to the pool and to the static inputs that entries share, which such a replay still reads.
        """
        self._pool.before_replay()
        try:
            yield
        finally:
            self._pool.after_replay()

    @contextlib.contextmanager
    def undisturbed(self, draws_random: bool) -> Iterator[None]:
        """Let Python state, and generators where forwards draw from them, stand as before a block of forwards."""
        before = PythonState(self._module)
        generators = self._backend.generator_states(self._pool.device)
        try:
            yield
        finally:
            before.restore()
            self._random = draws_random
            self._put_back(generators)

    def observe(self, call: Call) -> list[Finding]:
        """Run a call's forward twice without capturing, and return what the second met.

        Args:
            call: A call with a signature.

        Returns:
            Hoists, guards and breaks in their order.

        Raises:
            CaptureError: The forward does what no capture can follow.
        """
        before = PythonState(self._module)
        generators = self._backend.generator_states(self._pool.device)
        self._random = False
        try:
            with self._in_order(), _without_autocast_cache(), naming(self._module):
                plan = self._plan(self._learned().classes)
                return self._warm_up(call, self._inputs(call), plan, generators).findings
        finally:
            before.restore()
            self._put_back(generators)
            self._buffers.clear()

    # -- attempts --------------------------------------------------------------------------------------------------

    def _learned(self) -> Learned:
        return _learned.setdefault(type(self._module), Learned())

    def _try_until_verified(self, call: Call, generators: _Generators) -> Entry:
        classes = set(self._learned().classes)
        for _ in range(_MAX_MODULE_BREAK_ROUNDS):
            entry = self._try(call, self._plan(classes), generators)
            with _reset_on_error(entry):
                self._check_first_result(entry, call, generators)
                miss = self._verify(entry, call, generators)
            if miss is None:
                self._learned().classes |= classes
                return entry
            outer = self._class_to_break(miss, classes) if self._config.module_breaks else None
            if outer is None:
                break
            _log.info("%s: %s becomes an eager break, since %s", type(self._module).__name__, outer.__name__, miss)
            entry.reset()
            classes.add(outer)
        assert miss is not None
        return self._keep_guards(call, entry, miss, classes, generators)

    def _keep_guards(
        self, call: Call, entry: Entry, miss: GuardMiss, classes: set[type], generators: _Generators
    ) -> Entry:
        """Keep an entry that fresh inputs miss: it serves the calls whose guards hold, and is verified on one such."""
        if classes != self._learned().classes:
            entry.reset()
            entry = self._try(call, self._plan(self._learned().classes), generators)
        with _reset_on_error(entry):
            problem = self._compare(entry, call, call.tensors, generators)
            if problem is not None:
                raise VerificationError(
                    f"the entry differs from eager on the inputs that it was captured with: {problem}."
                )
        entry.verified = f"on the captured inputs only: {miss}"
        return entry

    def _try(self, call: Call, plan: _Plan, generators: _Generators) -> Entry:
        """Capture once, and again with one more break after each operation that fails."""
        for attempt in range(self._config.max_capture_attempts):
            try:
                return self._record(call, plan, generators)
            except OperationFailedError as error:
                if attempt + 1 == self._config.max_capture_attempts or error.operation in plan.policy.operations:
                    raise
                _log.info("%s; trying again with it as an eager break", error)
                plan.policy.operations.add(error.operation)
                self._learned().operations.add(error.operation)
            except _UnwatchedError as error:
                plan.watched = True
                _log.info("%s; trying again with every operation watched", error)
        raise CaptureError(f"not captured after max_capture_attempts={self._config.max_capture_attempts} tries.")

    def _check_first_result(self, entry: Entry, call: Call, generators: _Generators) -> None:
        """Make sure that what the first forward changed, such as a cache that it filled, does not change results."""
        while self._unsettled:
            expected = self._unsettled.pop()
            self._put_back(generators)
            try:
                problem = difference(expected, entry.replay(call.tensors), close=self._is_close())
            except GuardMiss as miss:
                problem = str(miss)
            if problem is not None:
                raise StateWriteError(
                    f"the first forward changes Python state of the module and gives another result than the next "
                    f"({problem}): this call runs eagerly, and the next one can be captured."
                )

    def _class_to_break(self, miss: GuardMiss, classes: set[type]) -> type | None:
        """Return the class of the innermost submodule around a missed guard that is no break yet."""
        if not isinstance(miss.step, (EagerStep, GuardStep)):
            return None
        for name in miss.step.where.modules:
            kind = type(self._module.get_submodule(name))
            if name and kind not in classes and not isinstance(self._module, kind):
                return kind
        return None

    def _plan(self, classes: set[type]) -> _Plan:
        policy = Policy(
            operations=set(self._learned().operations),
            functions=self._torch_functions,
            break_collectives=self._config.collectives == "break",
        )
        broken = broken_modules(self._module, self._config.eager_modules, classes)
        compiled: Mapping[str, Callable[..., Any]] = {}
        if self._recipe.compiled:
            compiled = self._compiler.forwards(broken, static_shapes=self._recipe.static_shapes)
        return _Plan(policy, broken, compiled)

    def _redirected(self) -> contextlib.AbstractContextManager[None]:
        """Put the recipe's attention backend in place on this thread: for captured forwards, not for eager ones."""
        if self._recipe.attention is None:
            return contextlib.nullcontext()
        return redirected(probes.attention_redirection(self._recipe.attention))

    def _untold(self) -> contextlib.AbstractContextManager[None]:
        """Let the forward take itself for eager: what it leaves out or adds in a capture, eager would not."""
        return redirected(*((tell, lambda: False) for tell in self._backend.capture_tells))

    def _keep_buffers(self, plan: _Plan) -> None:
        """Copy the buffers of eager modules before the first forward in which nobody watches these."""
        for name in plan.broken:
            for path, tensor in self._module.get_submodule(name).named_buffers(prefix=name):
                if path not in self._buffers:
                    self._buffers[path] = tensor, tensor.clone()

    def _put_back(self, generators: _Generators) -> None:
        """Let generators and the buffers of eager modules be as they were before the capture.

        The generators belong to all threads: where the forward draws no numbers they are left alone, or a thread that
        serves would draw its numbers twice.
        """
        if self._random:
            for generator, state in generators:
                generator.set_state(state)
        with torch.inference_mode():  # may write to inference tensors and to others
            for tensor, content in self._buffers.values():
                tensor.copy_(content)

    def _written_buffers(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor, content in self._buffers.values() if not same_value(content, tensor))

    # -- one attempt -----------------------------------------------------------------------------------------------

    def _inputs(self, call: Call) -> StaticInputs:
        assert call.signature is not None
        inputs = StaticInputs(call.signature.tensor_specs, self._pool.device, self._arena)
        inputs.load(call.tensors)
        return inputs

    def _protected(self, call: Call, inputs: StaticInputs) -> dict[int, str]:
        """Name the storages that a forward must not write to."""
        named = {_torch.storage_key(tensor): f"parameter {name}" for name, tensor in self._module.named_parameters()}
        named |= {_torch.storage_key(tensor): f"buffer {name}" for name, tensor in self._module.named_buffers()}
        paths = [call.structure.paths[slot] for slot in call.tensor_slots]
        named |= {
            _torch.storage_key(tensor): f"argument {path}" for path, tensor in zip(paths, inputs.tensors, strict=True)
        }
        return named

    def _warm_up(self, call: Call, inputs: StaticInputs, plan: _Plan, generators: _Generators) -> DryRun:
        """Run the forward as eager would, until it is in a steady state; return what the last run met."""
        protected = self._protected(call, inputs)
        watches: list[HostRandomWatch] = []
        ends: list[_Generators] = []
        self._keep_buffers(plan)
        for iteration in range(self._config.warmup_iterations):
            dry = DryRun(self._backend, protected, plan.policy)
            watches.append(HostRandomWatch())
            try:
                with watches[-1]:
                    self._run_dry(call, inputs, plan, dry, steady=iteration > 0)
            except BaseException:
                watches[0].put_back()
                raise
            finally:
                ends.append(self._backend.generator_states(self._pool.device))
                self._random = self._random or dry.random or dry.runs_unseen or _moves_alone(generators, ends[-1])
            dry.written = self._written_buffers()
            self._put_back(generators)
        if not self._random and self._seeds(call, inputs, plan, generators, ends):
            self._random = True
            self._put_back(generators)
        # Once could have been by another thread.
        moved_each_time = all(watch.moved_python for watch in watches) or all(watch.moved_numpy for watch in watches)
        if moved_each_time or any(watch.drew_python for watch in watches):
            watches[0].put_back()
            raise HostileOperationError(
                "every forward draws from Python's or numpy's random numbers, which a replay would not: draw them "
                "outside of the module and pass them in."
            )
        return dry

    def _seeds(
        self, call: Call, inputs: StaticInputs, plan: _Plan, before: _Generators, ends: list[_Generators]
    ) -> bool:
        """Tell whether each forward sets a generator, which no operation shows, and not another thread moved it."""
        states = [[state for _, state in each] for each in (before, ends[0], ends[-1])]
        moved = [not torch.equal(start, end) and torch.equal(one, end) for start, one, end in zip(*states, strict=True)]
        if not any(moved):
            return False
        for generator, _ in before:
            torch.empty(1, device=generator.device).uniform_(generator=generator)
        self._run_dry(
            call, inputs, plan, DryRun(self._backend, self._protected(call, inputs), plan.policy), steady=True
        )
        now = self._backend.generator_states(self._pool.device)
        return any(
            is_moved and torch.equal(end, state)
            for is_moved, end, (_, state) in zip(moved, states[2], now, strict=True)
        )

    def _run_dry(self, call: Call, inputs: StaticInputs, plan: _Plan, dry: DryRun, *, steady: bool) -> None:
        args, kwargs = call.rebuild(inputs.tensors)
        arguments, state = _named(call, args, kwargs), self._state.key()
        with self._pool.side_stream(), self._redirected(), self._patched(dry, plan), dry.watching():
            result = self._module(*args, **kwargs)
        _check_arguments(arguments, _named(call, args, kwargs))
        if steady:
            self._check_state(state)
            _check_survivors(dry, result)
        elif self._state.key() != state:
            self._unsettled.append(result)

    def _patched(self, watch: Any, plan: _Plan) -> contextlib.AbstractContextManager[None]:
        return patched(watch, self._module, plan.broken, self._functions, plan.compiled)

    def _check_state(self, before: Any) -> None:
        after = self._state.key()
        if after != before:
            lines = describe_difference(before, after)
            raise StateWriteError(
                f"every forward changes Python state of the module ({'; '.join(lines[:3])}), which a replay would "
                "not: keep the state outside of the module and pass it in.",
                moving_parts(lines),
            )

    def _record(self, call: Call, plan: _Plan, generators: _Generators) -> Entry:
        inputs = self._inputs(call)
        dry = self._warm_up(call, inputs, plan, generators)
        held_before, state = self._pool.bytes(), self._state.key()
        capture = BreakableCUDAGraphCapture(
            pool=self._pool,
            capture_error_mode=self._config.capture_error_mode,
            barrier=self._seams.barrier,
            capture_context=self._seams.capture_context,
            max_segments=self._config.max_segments,
            draws_random=dry.random,
        )
        args, kwargs = call.rebuild(inputs.tensors)
        self._outside = OutsideMeter(self._backend, self._pool.device)  # after the warm-up, which loads kernels
        with self._redirected(), self._untold():
            result = self._run_capture(capture, call, inputs, plan, dry, args, kwargs)
        try:
            self._check_state(state)
            outputs = OutputTemplate(result, inputs.tensors, capture.borrowed)
        except BaseException:
            capture.graph.reset()
            raise
        assert call.signature is not None
        return Entry(
            key=EntryKey(call.signature, state),
            graph=capture.graph,
            inputs=inputs,
            outputs=outputs,
            call=call.without_tensors(),
            pool=self._pool,
            findings=tuple(dry.findings),
            hoists=dry.hoists,
            host_guards=tuple(dry.host_guards.values()),
            externals=tuple(dry.externals.values()),
            random=dry.random or dry.runs_unseen,
            written=dry.written,
            pool_bytes=self._pool.bytes() - held_before,
        )

    def _run_capture(
        self, capture: BreakableCUDAGraphCapture, call: Call, inputs: StaticInputs, plan: _Plan, dry: DryRun,
        args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        if not dry.findings and not dry.reads_constants and not plan.watched:
            try:
                with capture, _torch.uncompiled(lambda: capture.in_segment):  # as in the dry run
                    return self._module(*args, **kwargs)
            except RuntimeError as error:
                if isinstance(error, (CaptureError, torch.OutOfMemoryError)):
                    raise
                raise _UnwatchedError(f"{type(error).__name__} in the capture: {error}") from error
        run = CaptureRun(capture, self._protected(call, inputs), plan.policy, dry.hoists, dry.failures)
        with capture, self._patched(run, plan), run.watching():
            return self._module(*args, **kwargs)

    # -- verification ----------------------------------------------------------------------------------------------

    def _verify(self, entry: Entry, call: Call, generators: _Generators) -> GuardMiss | None:
        """Compare the entry with eager on fresh inputs; return the miss where those do not pass its guards."""
        if self._config.verify == "off":
            entry.verified = "off"
            return None
        beside_others = threading.active_count() > 1  # they may have ended when they are looked for again
        try:
            problem = self._problem(entry, call, generators, _TRIES_BESIDE_OTHERS if beside_others else 1)
        except GuardMiss as miss:
            return miss
        if problem == _GENERATORS_DIFFER and beside_others:
            raise InterferenceError(
                f"the entry could not be verified in {_TRIES_BESIDE_OTHERS} tries: {problem}, maybe by another thread; "
                "warm up while none draws random numbers on the device."
            )
        if problem is not None:
            raise VerificationError(f"the entry does not reproduce eager on fresh inputs: {problem}.")
        entry.verified = "close" if self._is_close() else "exact"
        return None

    def _problem(self, entry: Entry, call: Call, generators: _Generators, tries: int) -> str | None:
        """Say how the entry differs from eager on fresh inputs, if it does; another thread may draw in between."""
        problem: str | None = None
        for _ in range(tries):
            given = self._fresh_generators(generators) if self._random else generators
            problem = self._compare(entry, call, fresh_inputs(call.tensors), given)
            if problem != _GENERATORS_DIFFER:
                break
        return problem

    def _fresh_generators(self, generators: _Generators) -> _Generators:
        """Return other states than those of the capture, which a forward that seeds by itself would not draw from."""
        for generator, _ in generators:
            generator.manual_seed(_FRESH_SEED)
        return self._backend.generator_states(self._pool.device)

    def _compare(self, entry: Entry, call: Call, tensors: list[Tensor], generators: _Generators) -> str | None:
        args, kwargs = call.rebuild(tensors)
        self._put_back(generators)
        expected = self._module(*args, **kwargs)
        drawn = self._backend.generator_states(self._pool.device)
        self._put_back(generators)
        got = entry.replay(tensors)
        problem = difference(expected, got, close=self._is_close())
        left = self._backend.generator_states(self._pool.device)
        if problem is None and self._random and not _same_generators(drawn, left):
            problem = _GENERATORS_DIFFER
        entry.hits = 0
        return problem

    def _is_close(self) -> bool:
        if self._config.verify == "auto":
            return not self._recipe.is_exact or bool(compiled_submodules(self._module))
        return self._config.verify == "close"


@dataclass
class _Plan:
    """What one attempt does beyond the table of operations."""

    policy: Policy
    broken: frozenset[str]
    compiled: Mapping[str, Callable[..., Any]]
    watched: bool = False


class _UnwatchedError(CaptureError):
    """A capture without interception failed; with it, the operation can be found."""


@contextlib.contextmanager
def _reset_on_error(entry: Entry) -> Iterator[None]:
    """Give an entry's memory back where a block raises."""
    try:
        yield
    except BaseException:
        entry.reset()
        raise


def _moves_alone(before: _Generators, after: _Generators) -> bool:
    """Tell whether a forward moved the generators though no operation drew; another thread may have, too."""
    return threading.active_count() == 1 and not _same_generators(before, after)


def _same_generators(one: _Generators, other: _Generators) -> bool:
    return all(torch.equal(left[1], right[1]) for left, right in zip(one, other, strict=True))


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Keep autocast from caching casted weights: a cached cast made in a capture would be scratch memory of the "
    "pool."""
    enabled = torch.is_autocast_cache_enabled()
    if not (enabled and _torch.any_autocast()):
        yield  # the flag is a guard of compiled code: left alone, nothing is compiled again
        return
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _named(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> trees.Tree:
    """Take a rebuilt call's arguments apart under the names of forward's parameters."""
    names = list(call.arguments)[: call.positionals]
    further = args[len(names) :]
    named = {**dict(zip(names, args, strict=False)), **({VARIABLE_POSITIONALS: further} if further else {}), **kwargs}
    return trees.flatten_arguments(named)


def _check_arguments(before: trees.Tree, after: trees.Tree) -> None:
    if before.structure == after.structure and all(map(_is_same, before.leaves, after.leaves)):
        return
    one, other = (dict(zip(tree.structure.paths, tree.leaves, strict=True)) for tree in (before, after))
    changed = [path for path in one | other if not (path in one and path in other and _is_same(one[path], other[path]))]
    raise StateWriteError(
        f"the forward changes an argument ({', '.join(changed[:3]) or 'its structure'}), which a replay would not: "
        "pass "
        "what changes as a tensor and return its new value."
    )


def _is_same(one: object, other: object) -> bool:
    return one is other or (not isinstance(one, Tensor) and type(one) is type(other) and bool(one == other))


def _check_survivors(dry: DryRun, result: Any) -> None:
    results = [leaf for leaf in trees.flatten(result).leaves if isinstance(leaf, Tensor)]
    if not dry.survivors(results):
        return
    gc.collect()
    kept = dry.survivors(results)
    if kept:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in kept[:3])
        raise StateWriteError(
            f"every forward keeps {len(kept)} tensors that it makes (shapes {shapes}) beyond the call, in a cache "
            "or an "
            "object: a replay would change them under whoever reads them later. Bound the cache by the signature, "
            "or name "
            "the submodule in eager_modules."
        )
