"""The runners: stand-ins for a module that serve its calls, eagerly or by replaying captured graphs.

The path of a call is `BreakableCudaGraphRunner.__call__`, read from top to bottom.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from bcg import probes
from bcg.ambient import ambient_refusal
from bcg.autotune import Tuner, capture_as_told
from bcg.backends import Backend, Pool, backend_for
from bcg.base_runner import BaseRunner, EagerRunner, device_of
from bcg.cache import EntriesView, EntryCache
from bcg.capture import Capturer, Seams
from bcg.config import RunnerConfig
from bcg.entry import Entry, EntryKey
from bcg.errors import BcgError, CaptureError, ConfigError, GuardMiss, InterferenceError, StateWriteError
from bcg.events import Events
from bcg.explanation import Explanation, not_captured, other_guard_values
from bcg.graph import current_capture
from bcg.interception import Finding
from bcg.memory import MemoryReport
from bcg.misses import Miss
from bcg.module_state import ModuleState
from bcg.pools import is_working, working_in
from bcg.proxy import ModuleProxy
from bcg.recapture import kept_content
from bcg.refusals import device_refusal, gradient_refusal
from bcg.signature import Call, CallBinder, Signature, describe_difference
from bcg.static_inputs import StaticArena
from bcg.steps import EagerStep
from bcg.upkeep import Host, Upkeep
from bcg.warmup import Window, window_of

_MAX_MISSES = 256  # different missed signatures that are remembered and explained
_MAX_VALUES_OF_A_NUMBER: Final = 8  # a LoRA scale has a few values, a time step has many
_NOT_SERVED: Final = object()

Prepare = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""Maps a call's arguments to those that the module is called with."""

_module_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


class BreakableCudaGraphRunner(BaseRunner):
    """Replay captured graphs for calls with a known signature, and run every other call eagerly.

    Made by `bcg.wrap`. Captures happen inside a `bcg.warmup` window, where ``capture_when`` says so, and in `capture`;
    never while serving.

    Args:
        module: The module to serve.
        config: Options; from the environment where left out.
        pool: Another runner that never runs at the same time, to share the scratch memory with, or its pool; made where
            left out. A runner's pool is followed when both modules are moved.
        capture_when: Asked at a miss outside a window; captures where it returns True. The seam for hosts that have a
            warmup flag of their own.
        barrier: Called before every eager step while capturing; ranks wait for each other there.
        capture_context: Makes a context manager that is entered around each capture.
        prepare: Given the positional and keyword arguments of each call, returns those that the module is called with,
            by graph or eagerly. It must not change what it is given.

    Raises:
        BackendError: The config names a backend that cannot run here.
        ConfigError: The config names an eager function, or an option of the compiler, that does not exist.
    """

    def __init__(
        self,
        module: nn.Module,
        config: RunnerConfig | None = None,
        *,
        pool: Pool | BreakableCudaGraphRunner | None = None,
        capture_when: Callable[[], bool] | None = None,
        barrier: Callable[[], None] | None = None,
        capture_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        super().__init__(module, config)
        if self._self_config.backend == "cuda":
            # A module that is still on the CPU may be moved later; a torch without CUDA cannot be helped.
            backend_for("cuda", torch.device("cuda"))
        self._self_capture_when = capture_when
        self._self_prepare = prepare
        self._self_seams = Seams(barrier, capture_context)
        self._self_given_pool = pool
        self._self_pool: Pool | None = None
        self._self_capturer: Capturer | None = None
        self._self_arena = StaticArena()
        self._self_state = ModuleState(module)
        self._self_binder: CallBinder = CallBinder(module.forward)
        self._self_disabled: str | None = None
        self._self_refused = False
        self._self_misses: dict[EntryKey, Miss] = {}  # plain, so that its values are listed in one go
        self._self_told: set[str] = set()
        self._self_lock = _module_locks.setdefault(module, threading.RLock())
        self._self_cache = EntryCache(
            self._self_config.max_entries,
            self._self_config.max_bytes,
            self._self_config.max_rejections,
            self._evicting,
            self._shared_bytes,
        )
        self._self_events = Events(self._name(), self._self_config.debug)
        self._self_upkeep: Upkeep | None = None
        self._self_tuner: Tuner | None = None
        self._make_capturer()

    # -- the path of a call ----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve one call: replay where its signature is captured, capture inside a window, else run eagerly.

        Args:
            *args: As the module's forward takes them.
            **kwargs: Likewise.

        Returns:
            What the module returns, in tensors of its own.
        """
        self._self_counters.add("calls")
        args, kwargs = self._prepared(args, kwargs)
        call = self._bind(args, kwargs)
        if call is not None and self.can_run_graph(call):
            with self._self_lock:
                result = self.execute(call)
            if result is not _NOT_SERVED:
                return result
        return self._run_eagerly(args, kwargs)

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args, kwargs) if self._self_prepare is None else self._self_prepare(args, kwargs)

    def _wait_for_ranks(self) -> None:
        if self._self_seams.barrier is not None:
            self._self_seams.barrier()

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Bind the call to forward's parameters and key it; None where it does not bind or graphs are off."""
        if self._self_disabled is not None or current_capture() is not None or is_working():
            return None
        forward = self.__wrapped__.forward
        if not self._self_binder.fits(forward):
            self._self_binder = CallBinder(forward)
        return self._self_binder.call(args, kwargs, max_leaves=self._self_config.max_leaves)

    def can_run_graph(self, call: Call) -> bool:
        """Tell whether a graph may serve a call under what is around it now, captured or not.

        Args:
            call: A bound call.

        Returns:
            False where the call must run eagerly; the reason is counted, and logged once.
        """
        reason = self._refusal_of_call(call)
        if reason is not None:
            self._note_refusal(reason)
        return reason is None

    def execute(self, call: Call) -> Any:
        """Serve a call by a graph: find its entries and replay one, or capture inside a window.

        Args:
            call: A bound call that a graph may serve.

        Returns:
            The result, or a private mark where the call must run eagerly.
        """
        key = self._key(call)
        variants = self._self_cache.find(key)
        misses: list[str] = []
        for entry in tuple(variants):
            result = self._replay(entry, call, misses)
            if result is not _NOT_SERVED:
                self._self_counters.add("replays")
                return result
            if not self._self_cache.peek(key):
                break  # quarantined, with its other variants
        # Asked only now: what was captured was not refused, and a refusal follows from the signature and the state.
        if not self._module_allows(call):
            return _NOT_SERVED
        window = window_of(self._self_identity)
        if self._may_capture(window) and len(variants) < self._self_config.max_variants:
            return self._capture_and_serve(key, call, window)
        self._note_miss(call, key, misses)
        return _NOT_SERVED

    def load_inputs(self, entry: Entry, call: Call) -> None:
        """Copy a call's tensors into an entry's static inputs.

        Args:
            entry: An entry.
            call: A call with the entry's signature.
        """
        entry.inputs.load(call.tensors)

    # -- its steps -------------------------------------------------------------------------------------------------

    def _refusal(self, call: Call) -> str | None:
        """Say why no graph may serve a call, or return None."""
        return self._refusal_of_call(call) or self._refusal_of_module(call)

    def _refusal_of_call(self, call: Call) -> str | None:
        """Say why no graph may serve a call under what is around it now; asked in every call."""
        if call.refusal is not None:
            return call.refusal
        if self._self_refused:
            # Its hooks may count, so that each call finds another state; asking the hooks is cheaper than a walk.
            reason = probes.refusal(self.__wrapped__)
            self._self_refused = reason is not None
            if reason is not None:
                return reason
        reason = ambient_refusal() or gradient_refusal(self.__wrapped__, call)
        if reason is None and self._self_backend.is_capturing():
            reason = "another CUDA graph is being captured"
        return reason

    def _refusal_of_module(self, call: Call) -> str | None:
        """Say why no graph may serve the module as it is, or tensors where they are."""
        assert call.signature is not None
        reason = self._self_state.refusal()
        self._self_refused = reason is not None
        device = self._capturer().device  # first: a module that was moved has another backend
        return reason or self._self_backend.refusal() or device_refusal(call.signature, device)

    def _module_allows(self, call: Call) -> bool:
        reason = self._refusal_of_module(call)
        if reason is not None:
            self._note_refusal(reason)
        return reason is None

    def _note_refusal(self, reason: str) -> None:
        self._self_counters.add("refusals")
        window = window_of(self._self_identity)
        if window is not None:
            window.calls += 1
        self._tell_once(reason, "calls run eagerly: %s", reason)

    def _key(self, call: Call) -> EntryKey:
        assert call.signature is not None
        return EntryKey(call.signature, self._self_state.key())

    def _replay(self, entry: Entry, call: Call, misses: list[str]) -> Any:
        try:
            with working_in(entry.pool):
                result = entry.replay(call.tensors)
        except GuardMiss as miss:
            misses.append(str(miss))
            return _NOT_SERVED
        except Exception as error:
            self._quarantine(entry, error)
            return _NOT_SERVED
        self._self_cache.prefer(entry)
        return result

    def _quarantine(self, entry: Entry, error: Exception) -> None:
        """Drop a signature whose replay raised; raise the error where the device's context is dead."""
        if isinstance(error, torch.OutOfMemoryError) or isinstance(entry.graph.failed_step, EagerStep):
            # Memory may be there for the next call; the module's own code raises in the eager call, too.
            self._self_counters.add("replay_failures")
            return
        if not _may_be_of_replay(error):
            raise error
        try:
            entry.pool.backend.synchronize(entry.pool.device)
        except Exception:
            raise error from None
        self._self_counters.add("replay_failures")
        reason = f"a replay raised {type(error).__name__}: {error}"
        self._self_cache.drop(entry.key)
        # A later capture that failed may have parted a graph that draws from the generator: it can be captured again.
        if not entry.random:
            self._self_cache.reject(entry.key, reason)
        self._self_events.quarantined(entry.signature, reason, is_lasting=not entry.random)

    def _may_capture(self, window: Window | None) -> bool:
        if window is not None:
            window.calls += 1
            return True
        return self._self_capture_when is not None and self._self_capture_when()

    def _capture_and_serve(self, key: EntryKey, call: Call, window: Window | None) -> Any:
        if self._self_cache.rejection(key) is not None:
            return _NOT_SERVED
        with self._locked():
            entry = self._capture(key, call)
        if entry is None:
            return _NOT_SERVED
        if window is not None:
            window.captures += 1
        result = self._replay(entry, call, [])
        if result is not _NOT_SERVED:
            self._self_counters.add("capture_calls")
        return result

    def _capture(self, key: EntryKey, call: Call) -> Entry | None:
        """Capture a call and keep the entry; None, with the reason remembered, where that fails."""
        reason, remember = "", True
        moving: frozenset[str] = frozenset()
        try:
            self._check_changing_number(key.signature)
            entry = self._charged_capture(call)
        except Exception as error:
            reason = str(error) if isinstance(error, BcgError) else f"{type(error).__name__}: {error}"
            remember = not isinstance(error, (torch.OutOfMemoryError, InterferenceError))  # the next try may succeed
            moving = error.moving if isinstance(error, StateWriteError) else moving
            # Frames of the failed capture hold its tensors; the eager call that follows needs their memory.
            traceback.clear_frames(error.__traceback__)
        else:
            self._self_counters.add("captures")
            self._self_events.captured(entry)
            return self._keep(entry)
        self._self_counters.add("rejections")
        if remember:
            self._self_cache.reject(key, reason, moving)
        self._self_events.rejected(key.signature, reason)
        return None

    def _charged_capture(self, call: Call) -> Entry:
        """Capture a call, with what that adds to shared memory and what a later capture of it needs."""
        self._capturer()  # a module that was moved has another pool
        with self._upkeep.ledger.charging() as charge:
            entry = self._capture_as_configured(call)
        entry.pool_bytes, entry.arena_bytes = charge.pool_bytes, charge.arena_bytes
        entry.kept = kept_content(call.tensors)
        return entry

    def _keep(self, entry: Entry) -> Entry | None:
        """Keep an entry; where evicted ones left shared memory that exceeds the limit, let the pool be made anew."""
        key = entry.key
        self._self_cache.add(entry)
        if self._self_cache.is_over_bytes():
            self._upkeep.compact()
        return next(iter(self._self_cache.peek(key)), None)

    def _capture_as_configured(self, call: Call) -> Entry:
        """Capture a call: compiled or not as the config says, or as autotuning finds best on a GPU."""
        capturer, config = self._capturer(), self._self_config
        tunes = (config.autotune or config.min_speedup is not None) and not self._self_backend.executes_while_capturing
        if not tunes:
            return capture_as_told(capturer, call, config)
        if self._self_tuner is None:
            elapsed_ms = functools.partial(self._self_backend.elapsed_ms, capturer.device)
            self._self_tuner = Tuner(self.__wrapped__, capturer, config, elapsed_ms)
        return self._self_tuner.capture(call)

    def _check_changing_number(self, signature: Signature) -> None:
        """Refuse another capture of calls that differ in one number alone: it changes from step to step."""
        known = {entry.signature for entry in self._self_cache.entries()}  # several states may hold the same one
        lines = [describe_difference(one, signature) for one in known]
        numbers = Counter(line[0].partition(":")[0] for line in lines if len(line) == 1)
        for path, count in numbers.items():
            if count >= _MAX_VALUES_OF_A_NUMBER and _is_number(signature, path):
                raise CaptureError(
                    f"argument `{path}` is a Python number that changes from call to call: {count} of its values are "
                    "captured already, and every further one would need a graph of its own. Pass it as a tensor."
                )

    def _note_miss(self, call: Call, key: EntryKey, guard_misses: list[str]) -> None:
        """Count a call that is served eagerly, remember whose it was, and explain the first of its signature."""
        self._self_counters.add("guard_misses" if guard_misses else "misses")
        miss = self._self_misses.pop(key, None)
        if miss is None or self._self_config.debug:
            why = other_guard_values(guard_misses) if guard_misses else self._explain_miss(key)
            # A module whose state moves in every call has a new key each time, and is explained once all the same.
            is_told = miss is not None or any(known.signature == key.signature for known in self._self_misses)
            if len(self._self_cache):
                self._self_events.missed(key.signature, why.text, why.differences, is_first=not is_told)
            miss = miss or Miss(key.signature.summary(), why.text)
        miss.note(self.__wrapped__)
        self._self_misses[key] = miss
        while len(self._self_misses) > _MAX_MISSES:
            del self._self_misses[next(iter(self._self_misses))]

    # -- explicit use ----------------------------------------------------------------------------------------------

    def capture(self, *args: Any, **kwargs: Any) -> bool:
        """Capture a call now, inside a window or not.

        Args:
            *args: As the module's forward takes them.
            **kwargs: Likewise.

        Returns:
            Whether the call will replay; True at once where it is captured already. `explain` says why not.

        Example:
            >>> import bcg
            >>> runner = bcg.wrap(torch.nn.Linear(4, 2).requires_grad_(False))
            >>> runner.capture(torch.ones(1, 4))
            True
        """
        call = self._bind(*self._prepared(args, kwargs))
        if call is None or not self.can_run_graph(call):
            return False
        with self._locked():
            key = self._key(call)
            self._self_cache.drop_stale(key)
            if self._self_cache.find(key):
                return True
            return self._module_allows(call) and self._capture(key, call) is not None

    def observe(self, *args: Any, **kwargs: Any) -> list[Finding]:
        """Run a call's forward without capturing, and return what a capture would meet.

        Args:
            *args: As the module's forward takes them.
            **kwargs: Likewise.

        Returns:
            Hoists, guards and breaks in their order; nothing for a call that no graph may serve.

        Raises:
            CaptureError: The forward does what no capture can follow.
        """
        call = self._bind(*self._prepared(args, kwargs))
        if call is None or not self.can_run_graph(call):
            return []
        with self._locked():
            return self._capturer().observe(call) if self._module_allows(call) else []

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Say whether a call would replay, and if not why; nothing is run but the guards' reads.

        Args:
            *args: As the module's forward takes them.
            **kwargs: Likewise.

        Returns:
            Text for a person. For a miss it names the nearest captured signature and each argument that differs.
        """
        if self._self_disabled is not None:
            return f"runs eagerly: graphs are off ({self._self_disabled})."
        call = self._bind(*self._prepared(args, kwargs))
        if call is None:
            return "runs eagerly: the arguments do not fit the module's forward."
        reason = self._refusal(call)
        if reason is not None:
            return f"runs eagerly: {reason}."
        with self._locked():
            return self._explain(call)

    def _explain(self, call: Call) -> str:
        assert call.signature is not None
        key = self._key(call)
        variants = self._self_cache.peek(key)
        return self._explain_variants(variants, call) if variants else self._explain_miss(key).text

    def _explain_miss(self, key: EntryKey) -> Explanation:
        rejection = self._self_cache.rejection(key)
        if rejection is not None:
            return Explanation(f"runs eagerly: the capture was rejected: {rejection}")
        entries = list(self._self_cache.entries())
        if not any(entry.signature == key.signature for entry in entries):
            # Where a forward changes the module's state, the rejection is filed under a state that will not come again.
            earlier = self._self_cache.rejections().get(key.signature)
            if earlier is not None:
                return Explanation(f"runs eagerly: a capture in an earlier state of the module was rejected: {earlier}")
        return not_captured(entries, key)

    def _explain_variants(self, variants: list[Entry], call: Call) -> str:
        misses: list[str] = []
        for entry in variants:
            miss = entry.miss(call.tensors)
            if miss is None:
                return f"replays: {entry.segments} segments, {entry.breaks} breaks, {entry.guards} guards."
            misses.append(miss)
        return other_guard_values(misses).text

    def recapture(self) -> int:
        """Capture the known calls anew for the module's present state, without running the pipeline.

        After a LoRA was loaded or switched, or weights were replaced, every call would miss. This captures each known
        call again, the largest first, inside a window or not: from the integers, masks and other values that were kept
        at its first capture, and random numbers for all other inputs. Entries of the old state stay, so that switching
        back hits them, as long as ``max_entries`` and ``max_bytes`` allow. After `release` it restores what was
        released.

        Other threads are served between two captures. Limits: a call is captured with the shapes, dtypes and device
        that it had, so a module that was cast or moved to another device needs a warm-up of its own; a guard that
        reads the content of latents or embeddings finds random numbers and may keep a variant that no real call hits.

        Returns:
            The number of captures. A call that is captured already, or that was rejected for this state, is left out.

        Example:
            >>> import bcg
            >>> linear = torch.nn.Linear(4, 2).requires_grad_(False)
            >>> runner = bcg.wrap(linear)
            >>> runner.capture(torch.ones(1, 4))
            True
            >>> linear.weight = torch.nn.Parameter(torch.zeros(2, 4), requires_grad=False)
            >>> runner.recapture(), runner.recapture()
            (1, 0)
        """
        self._capturer()  # a module that was moved has another pool
        return self._upkeep.recapture()

    def memory(self) -> MemoryReport:
        """Say what the captured entries hold, each and together; print it for a table.

        Does not wait for a capture or replay in another thread.

        Returns:
            Bytes of static inputs, hoists, break outputs, pool, and what lies outside torch's allocator.

        Example:
            >>> import bcg
            >>> runner = bcg.wrap(torch.nn.Linear(4, 2).requires_grad_(False))
            >>> runner.memory().total_bytes
            0
        """
        return self._upkeep.memory()

    def release(self) -> int:
        """Give back all memory that can be given back now, and remember the calls.

        All graphs of the runner are dropped, and calls run eagerly until `recapture`, or a warmup window, captures
        them again. For an allocation elsewhere that fails, such as the decoding of a video. A pool that other runners
        use stays as long as one of their graphs lives in it: release those, too.

        Returns:
            The bytes given back.

        Example:
            >>> import bcg
            >>> runner = bcg.wrap(torch.nn.Linear(4, 2).requires_grad_(False))
            >>> def decode(latents):
            ...     return latents * 2  # stands for vae.decode, which needs the room
            >>> def decode_with_room(latents):
            ...     try:
            ...         return decode(latents)
            ...     except torch.OutOfMemoryError:
            ...         runner.release()
            ...     result = decode(latents)
            ...     runner.recapture()
            ...     return result
            >>> decode_with_room(torch.ones(1)).item()
            2.0
        """
        return self._upkeep.release()

    def compact(self) -> int:
        """Give an evicted share of the pool back to the device: capture the remaining entries into a fresh one.

        Scratch memory of an evicted entry stays in the pool for later captures, as long as any graph lives there. Where
        none of the remaining entries asked for that memory (`MemoryReport.abandoned_bytes`), this drops all graphs and
        captures them again, the largest first; other threads wait meanwhile. It does nothing where it cannot help:
        other runners use the pool, or an entry belongs to another state of the module and would be lost.

        Returns:
            The bytes given back; 0 where nothing was done, and the log says why.

        Example:
            >>> import bcg
            >>> runner = bcg.wrap(torch.nn.Linear(4, 2).requires_grad_(False), max_entries=1)
            >>> for rows in (100, 1):
            ...     assert runner.capture(torch.ones(rows, 4))
            >>> runner.compact(), runner.memory().total_bytes
            (1584, 16)
        """
        return self._upkeep.compact()

    def reset(self, disabled_reason: str | None = None) -> None:
        """Drop all entries and give their memory back.

        Args:
            disabled_reason: Serve every call eagerly from now on, for this reason; None switches graphs on again.
        """
        with self._locked():
            self.pool.wait()
            self._self_cache.drop_all()
            self._self_arena.clear()
            self._upkeep.forget()
            self._self_backend.trim(self._capturer().device)
            self._self_misses.clear()
            self._self_told.clear()
            self._self_disabled = disabled_reason

    @property
    def entries(self) -> EntriesView:
        """Captured entries, the least recently used first."""
        return EntriesView(list(self._self_cache.entries()))

    @property
    def rejections(self) -> Mapping[Signature, str]:
        """Why signatures were rejected."""
        return self._self_cache.rejections()

    @property
    def misses(self) -> tuple[Miss, ...]:
        """Calls outside of a warmup window that no captured graph served, the latest signature last; bounded."""
        return tuple(self._self_misses.values())

    def forget_misses(self) -> None:
        """Begin a new list of misses, such as after a warm-up that covered the old ones."""
        with self._locked():
            self._self_misses.clear()

    @property
    def refusals(self) -> tuple[str, ...]:
        """Different reasons for which no graph could serve a call at all, since the last reset; bounded."""
        return tuple(sorted(self._self_told))

    @property
    def pool(self) -> Pool:
        """Scratch memory of the replays; give it to `bcg.wrap` for a module that never runs at the same time."""
        self._capturer()
        assert self._self_pool is not None
        return self._self_pool

    # -- what belongs to the module's device -----------------------------------------------------------------------

    def _capturer(self) -> Capturer:
        """Return what captures on the device where the module is now."""
        device = device_of(self.__wrapped__)
        assert self._self_capturer is not None
        if self._self_capturer.device != device:
            with self._self_lock:
                self._upkeep.shelve()  # the module may come back
                self._self_cache.drop_all()
                self._make_capturer()
        return self._self_capturer

    def _make_capturer(self) -> None:
        device = device_of(self.__wrapped__)
        self._self_pool = self._pool_on(device)
        self._self_tuner = None
        self._self_backend: Backend = self._self_pool.backend
        self._self_capturer = Capturer(
            self.__wrapped__, device, self._self_state, self._self_config, self._self_pool, self._self_arena,
            self._self_seams,
        )  # fmt: skip
        if self._self_upkeep is None:
            self._self_upkeep = Upkeep(self._host(), self._self_identity, self._self_pool)
        else:
            self._self_upkeep.use(self._self_pool)

    def _host(self) -> Host:
        return Host(
            cache=self._self_cache,
            arena=self._self_arena,
            events=self._self_events,
            locked=self._locked,
            key=self._key,
            refusal=self._refusal,
            capture=self._capture,
            max_variants=self._self_config.max_variants,
        )

    @property
    def _upkeep(self) -> Upkeep:
        assert self._self_upkeep is not None
        return self._self_upkeep

    def _shared_bytes(self) -> int:
        return self._upkeep.ledger.shared_bytes(self._self_cache.entries())

    def _pool_on(self, device: torch.device) -> Pool:
        given = self._self_given_pool
        if isinstance(given, BreakableCudaGraphRunner):
            given = given.pool  # asked anew after each move, since the other module is moved too
        if given is not None and given.device.type == device.type and given.device.index in (None, device.index):
            return given
        name = self._self_config.backend
        if name == "cuda" and device.type != "cuda":
            name = "auto"  # not moved to the GPU yet
        return backend_for(name, device).create_pool(device)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one thread at a time use the module's graphs, and the pool that they share."""
        with self._self_lock, working_in(self.pool):
            yield

    # -- small parts -----------------------------------------------------------------------------------------------

    def _evicting(self, entry: Entry) -> None:
        self._self_counters.add("evictions")
        self._self_events.evicted(entry)

    def _tell_once(self, topic: str, message: str, *args: object) -> None:
        if topic not in self._self_told and len(self._self_told) < _MAX_MISSES:
            self._self_told.add(topic)
            self._self_events.emit(logging.WARNING, "refusal", message % args, reason=topic)

    def _name(self) -> str:
        return type(self.__wrapped__).__name__

    def _rewrap(self, module: nn.Module) -> BreakableCudaGraphRunner:
        return type(self)(module, self._self_config, **self._given())

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), **self._given()), (self.__wrapped__, self._self_config)

    def _given(self) -> dict[str, Any]:
        """Return what the host gave beside the config; not a pool, which is for graphs, and graphs stay behind."""
        return {
            "capture_when": self._self_capture_when,
            "barrier": self._self_seams.barrier,
            "capture_context": self._self_seams.capture_context,
            "prepare": self._self_prepare,
        }

    def __repr__(self) -> str:
        entries = list(self._self_cache.entries())
        breaks = sum(entry.breaks for entry in entries)
        counts = f"{len(entries)} graphs, {breaks} breaks, {self.stats.replays} replays"
        return f"BreakableCudaGraphRunner({self._name()}, {counts})"


def wrap(
    module: nn.Module,
    config: RunnerConfig | None = None,
    *,
    pool: Pool | BreakableCudaGraphRunner | None = None,
    capture_when: Callable[[], bool] | None = None,
    barrier: Callable[[], None] | None = None,
    capture_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    prepare: Prepare | None = None,
    **options: Any,
) -> BreakableCudaGraphRunner:
    """Wrap a module so that calls with a known signature replay captured CUDA graphs.

    The runner stands in for the module everywhere: assign it where the module was. Warm up inside `bcg.warmup`; every
    later call with a captured signature replays, with the same result bit for bit, and every other call runs eagerly.

    A copy of a runner, or what is read back from a pickle of it, is a runner of the copied module with the same config
    and callables, without graphs and with a pool of its own. A callable that cannot be pickled, such as a lambda, makes
    pickling raise; pickle ``bcg.unwrap(runner)`` for the module alone.

    Args:
        module: The module, usually a diffusers transformer. It is not changed. A runner is wrapped anew.
        config: Options; mutually exclusive with ``options``.
        pool: Another runner that never runs at the same time, to share the scratch memory with, or its pool.
        capture_when: Asked at a miss outside a window; captures where it returns True.
        barrier: Called before every eager step while capturing, where there are several ranks.
        capture_context: Makes a context manager that is entered around each capture.
        prepare: Given the positional and keyword arguments of each call, returns those that the module is called with,
            by graph or eagerly; pads prompts, for example. It must not change what it is given.
        **options: Fields of `RunnerConfig`.

    Returns:
        The runner.

    Raises:
        NotAModuleError: ``module`` is not a callable ``nn.Module``.
        ConfigError: An option is unknown or has a value that is not accepted.
        BackendError: ``backend="cuda"`` where torch sees no CUDA device.

    Example:
        >>> import bcg, torch
        >>> model = bcg.wrap(torch.nn.Linear(4, 2))
        >>> with torch.no_grad(), bcg.warmup():
        ...     _ = model(torch.ones(1, 4))
        >>> with torch.no_grad():
        ...     y = model(torch.zeros(1, 4))
        >>> model.stats.replays
        1
    """
    if config is not None and options:
        raise ConfigError(f"config and the options {', '.join(options)} were both given: give one of them.")
    chosen = config if config is not None else RunnerConfig.from_environment(**options)
    return BreakableCudaGraphRunner(
        unwrap(module),
        chosen,
        pool=pool,
        capture_when=capture_when,
        barrier=barrier,
        capture_context=capture_context,
        prepare=prepare,
    )


def unwrap(runner: nn.Module) -> nn.Module:
    """Return the module behind a runner; any other module is returned as it is.

    Args:
        runner: A runner or a module.

    Returns:
        The module.

    Example:
        >>> import bcg
        >>> linear = torch.nn.Linear(4, 2)
        >>> bcg.unwrap(bcg.wrap(linear)) is linear
        True
    """
    return runner.transformer if isinstance(runner, ModuleProxy) else runner


def _may_be_of_replay(error: Exception) -> bool:
    """Tell whether a replay may have raised an error, and not a signal handler of the user's (a time limit) meanwhile.

    Segments raise torch's errors, built-in ones and bcg's own; eager would not have kept any other from its caller.
    """
    package = type(error).__module__.partition(".")[0]
    return package in ("torch", "builtins", "bcg") and not isinstance(error, TimeoutError)


def _is_number(signature: Signature, path: str) -> bool:
    named = zip(signature.structure.paths, signature.leaf_keys, strict=True)
    return any(name == path and key[0] in (int, float) for name, key in named)


__all__ = ["BaseRunner", "BreakableCudaGraphRunner", "EagerRunner", "unwrap", "wrap"]
