"""Choose for each signature how it is served: eagerly, by its graph, or by a graph of something faster.

Something faster is compiled code, or another attention backend: only what the config allows, since both move bits.
Chosen by measurement: the arms run in turns, so that what slows the machine for a while slows all of them, and medians
are compared. Timings are stored, and reused by the next process.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from bcg import probes
from bcg.ambient import ambient_state
from bcg.capture import Capturer
from bcg.config import RunnerConfig
from bcg.entry import Entry
from bcg.errors import DoesNotPayError, InterferenceError
from bcg.model_key import device_key, model_key
from bcg.recipe import PLAIN, Recipe
from bcg.signature import Call, Signature

_log = logging.getLogger("bcg")

EAGER: Final = "eager"
GRAPH: Final = "graph"
DEFAULT_MIN_SPEEDUP: Final = 1.02
_ROUNDS: Final = 7
_FORMAT: Final = 2
_INSTALLED: Final = "installed"
_numbers = itertools.count()  # tells apart the files of one process
_writing = threading.Lock()  # one runner of the process at a time


@dataclass(frozen=True)
class Choice:
    """How a signature is served, and why.

    Attributes:
        arm: ``eager``, ``graph``, or ``graph+`` what stands in for parts of the module, as `arm_of` names it.
        median_ms: Measured milliseconds of one call, by arm.
        failed: Why an arm could not be captured, by arm.
    """

    arm: str
    median_ms: Mapping[str, float]
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def tried(self) -> frozenset[str]:
        """The arms that need not be tried again."""
        return frozenset(self.median_ms) | frozenset(self.failed)


def arm_of(recipe: Recipe, config: RunnerConfig) -> str:
    """Name an arm by all that makes it differ from others.

    Args:
        recipe: How it is captured.
        config: What is compiled, and how.

    Returns:
        The name.

    Example:
        >>> arm_of(Recipe(compiled=True, static_shapes=True), RunnerConfig(compile="blocks"))
        'graph+blocks static'
    """
    if recipe.attention is not None:
        return f"{GRAPH}+attention {recipe.attention}"
    if not recipe.compiled:
        return GRAPH
    words = [config.compile]
    words += [] if config.compile_backend == "inductor" else [config.compile_backend]
    words += [] if config.compile_mode == "default" else [config.compile_mode]
    words += [f"{name}={value}" for name, value in sorted(config.compile_options.items())]
    words += [] if config.compile_dynamic != "yes" else ["dynamic"]
    words += ["static"] if recipe.static_shapes or config.compile_dynamic == "no" else []
    return f"{GRAPH}+{' '.join(words)}"


def time_arms(
    arms: Mapping[str, Callable[[], Any]], elapsed_ms: Callable[[Callable[[], Any]], float], *, rounds: int = _ROUNDS
) -> dict[str, float]:
    """Time several ways to do one thing, in turns.

    Args:
        arms: What to run, by name.
        elapsed_ms: Runs a function and returns the milliseconds that it took, on the device.
        rounds: Timed runs of each arm, after one that is not timed.

    Returns:
        Median milliseconds by name.
    """
    names = list(arms)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        arms[name]()
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(elapsed_ms(arms[name]))
    return {name: statistics.median(values) for name, values in samples.items()}


def choose(median_ms: Mapping[str, float], min_speedup: float) -> Choice:
    """Pick the fastest arm; a graph must beat eager by a factor, and what moves bits must beat both by it.

    Args:
        median_ms: Milliseconds by arm, ``eager`` among them.
        min_speedup: Least time of what is given up over that of the arm.

    Returns:
        The choice.

    Example:
        >>> choose({"eager": 10.0, "graph": 9.9}, 1.02).arm
        'eager'
        >>> choose({"eager": 10.0, "graph": 5.0, "graph+blocks": 4.99}, 1.02).arm
        'graph'
    """
    eager_ms = median_ms[EAGER]
    exact_ms = min(eager_ms, median_ms.get(GRAPH, eager_ms))
    inexact = min(set(median_ms) - {EAGER, GRAPH}, key=lambda name: (median_ms[name], name), default=None)
    if inexact is not None and exact_ms / median_ms[inexact] >= min_speedup:
        arm = inexact
    else:
        arm = GRAPH if GRAPH in median_ms and eager_ms / median_ms[GRAPH] >= min_speedup else EAGER
    return Choice(arm, dict(median_ms))


def capture_as_told(capturer: Capturer, call: Call, config: RunnerConfig) -> Entry:
    """Capture a call as the config says, without measuring; as it is where compiled code cannot be captured.

    Args:
        capturer: Captures.
        call: A call with a signature.
        config: Options.

    Returns:
        The entry.

    Raises:
        CaptureError: The call cannot be captured.
    """
    if config.compile == "off":
        return capturer.capture(call)
    try:
        return capturer.capture(call, Recipe(compiled=True))
    except (torch.OutOfMemoryError, InterferenceError):
        raise  # no property of the compiled code
    except Exception as error:
        _log.warning("captured without compiled code: %s", _first_line(error))
        return capturer.capture(call)


class ChoiceStore:
    """Stored choices of one model on one kind of device.

    ``<cache>/autotune/<torch>/<sm>/<model key>/rank_tp1_dp1.json``, where later work with several ranks names them.

    Args:
        module: The model.
        device: Where it is.
        config: Options.
    """

    def __init__(self, module: nn.Module, device: torch.device, config: RunnerConfig) -> None:
        self._path = _cache_folder(config) / torch.__version__ / device_key(device) / model_key(module)
        self._reads = config.autotune_cache
        name = "rank_tp1_dp1.json"
        if not self._reads:
            name = f"runs/{time.strftime('%Y%m%dT%H%M%S')}_{os.getpid()}_{next(_numbers)}_{name}"
        self._path = self._path / name
        self._choices: dict[str, Choice] | None = None
        self._warned = False

    def find(self, signature: Signature) -> Choice | None:
        """Return the stored choice for a signature, or None; without the cache, that of this run alone."""
        return self._load().get(signature_digest(signature))

    def keep(self, signature: Signature, choice: Choice) -> None:
        """Store a choice; a folder that cannot be written costs a warning, and nothing else."""
        own = self._load()
        own[signature_digest(signature)] = choice
        # The forward may have moved what is around it: torch orders its attention kernels in a process's first call.
        own[signature_digest(signature.under(ambient_state()))] = choice
        with _writing:
            choices = self._choices = {**self._read(), **own}  # other processes write to the same file
            content = {"format": _FORMAT, "choices": {key: asdict(value) for key, value in choices.items()}}
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                partial = self._path.with_suffix(f".{os.getpid()}.partial")
                partial.write_text(json.dumps(content, indent=1))
                partial.replace(self._path)
            except OSError as error:
                _log.warning("autotune cache %s is not written: %s", self._path, error)

    def _load(self) -> dict[str, Choice]:
        if self._choices is None:
            self._choices = self._read()
        return self._choices

    def _read(self) -> dict[str, Choice]:
        if not (self._reads and self._path.exists()):
            return {}
        try:
            content = json.loads(self._path.read_text())
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']!r} is not {_FORMAT}")
            return {str(key): _choice(value) for key, value in content["choices"].items()}
        except Exception as error:
            if not self._warned:
                _log.warning("autotune cache %s is ignored: %s: %s", self._path, type(error).__name__, error)
            self._warned = True
            return {}


class Tuner:
    """Captures a call in the way that pays.

    Args:
        module: The module.
        capturer: Captures.
        config: Options.
        elapsed_ms: Times a function on the device.
    """

    def __init__(
        self,
        module: nn.Module,
        capturer: Capturer,
        config: RunnerConfig,
        elapsed_ms: Callable[[Callable[[], Any]], float],
    ) -> None:
        self._module = module
        self._capturer = capturer
        self._config = config
        self._elapsed_ms = elapsed_ms
        self._min_speedup = config.min_speedup or DEFAULT_MIN_SPEEDUP
        self._store = ChoiceStore(module, capturer.device, config)
        self._first_shapes: frozenset[tuple[int, ...]] | None = None  # of the first compiled call
        self._static_pays: bool | None = None  # not compared yet

    def capture(self, call: Call) -> Entry:
        """Capture a call by the arm that is, or was before, measured to be the fastest.

        Args:
            call: A call with a signature.

        Returns:
            The entry.

        Raises:
            DoesNotPayError: Eager is as fast.
            CaptureError: The call cannot be captured.
        """
        assert call.signature is not None
        stored = self._store.find(call.signature)
        if stored is not None and self._covers(stored, call):
            return self._capture_stored(stored, call)
        return self._measure(call)

    # -- the arms --------------------------------------------------------------------------------------------------

    def _recipes(self, call: Call) -> dict[str, Recipe]:
        """Return what is to be captured and timed for a call, by arm."""
        recipes = [PLAIN, *self._attention_recipes(), *self._compiled_recipes(call)]
        return {arm_of(recipe, self._config): recipe for recipe in recipes}

    def _attention_recipes(self) -> list[Recipe]:
        """Return the attention backends that the user names and that are installed, under the module's own code.

        Not under compiled code: each would be compiled for itself.
        """
        asked = self._config.attention_backends
        if not asked or any(name.endswith(":dispatch_attention_fn") for name in self._config.eager_functions):
            return []
        installed = probes.attention_backends(self._module)
        return [Recipe(attention=name) for name in installed if name in asked or _INSTALLED in asked]

    def _compiled_recipes(self, call: Call) -> list[Recipe]:
        """Return how compiled code may be captured: static shapes against dynamic ones once, then the faster.

        The first shapes are compiled as they are. Where the config leaves it open, the first call of other shapes is
        compiled twice, for its shapes alone and for all shapes to come, and the faster way is taken from then on: a
        warm-up compiles once more than it has to, and once for each shape only where that was measured to pay.
        """
        if self._config.compile == "off":
            return []
        as_told, static = Recipe(compiled=True), Recipe(compiled=True, static_shapes=True)
        is_first = self._first_shapes is None or _shapes(call) == self._first_shapes
        if self._config.compile_dynamic != "auto" or is_first:
            return [as_told]
        if self._static_pays is None:
            return [as_told, static]
        return [static if self._static_pays else as_told]

    def _both_compiled(self) -> tuple[str, str]:
        as_told, static = Recipe(compiled=True), Recipe(compiled=True, static_shapes=True)
        return arm_of(as_told, self._config), arm_of(static, self._config)

    def _note_compiled(self, choice: Choice, call: Call) -> None:
        """Learn from timings whether code for one shape pays, and remember which shapes came first."""
        as_told, static = self._both_compiled()
        if self._first_shapes is None and as_told in choice.median_ms:
            self._first_shapes = _shapes(call)
        if self._static_pays is None and {as_told, static} <= choice.tried:
            slow, fast = (choice.median_ms.get(arm, float("inf")) for arm in (as_told, static))
            self._static_pays = fast < slow and slow / fast >= DEFAULT_MIN_SPEEDUP

    # -- stored choices --------------------------------------------------------------------------------------------

    def _covers(self, stored: Choice, call: Call) -> bool:
        """Tell whether every arm that would be measured now was tried before; of compiled code, any."""
        recipes = self._recipes(call)
        plain = {arm for arm, recipe in recipes.items() if not recipe.compiled}
        compiled = self._config.compile == "off" or bool(stored.tried & set(self._both_compiled()))
        return EAGER in stored.median_ms and plain <= stored.tried and compiled

    def _capture_stored(self, stored: Choice, call: Call) -> Entry:
        recipes = self._recipes(call)
        if self._config.compile != "off":
            both = (Recipe(compiled=True), Recipe(compiled=True, static_shapes=True))
            recipes |= {arm_of(recipe, self._config): recipe for recipe in both}
        allowed = {arm: ms for arm, ms in stored.median_ms.items() if arm == EAGER or arm in recipes}
        choice = choose(allowed, self._min_speedup)
        self._note_compiled(stored, call)
        if choice.arm == EAGER:
            raise DoesNotPayError(f"eager is as fast, as measured before ({choice_text(choice)}).")
        entry = self._capturer.capture(call, recipes[choice.arm])
        entry.choice = choice
        return entry

    # -- measuring -------------------------------------------------------------------------------------------------

    def _measure(self, call: Call) -> Entry:
        entries: dict[str, Entry] = {}
        chosen: Entry | None = None
        try:
            failed = self._capture_arms(call, entries)
            measured = choose(self._time(call, entries), self._min_speedup)
            choice = Choice(measured.arm, measured.median_ms, failed)
            chosen = entries.get(choice.arm)
        finally:
            for entry in entries.values():
                if entry is not chosen:
                    entry.reset()
        assert call.signature is not None
        self._store.keep(call.signature, choice)
        self._note_compiled(choice, call)
        if chosen is None:
            raise DoesNotPayError(f"eager is as fast ({choice_text(choice)}).")
        chosen.choice = choice
        return chosen

    def _capture_arms(self, call: Call, entries: dict[str, Entry]) -> dict[str, str]:
        """Capture each arm; return why others than the plain graph could not be."""
        failed: dict[str, str] = {}
        recipes = self._recipes(call)
        entries[GRAPH] = self._capturer.capture(call, recipes.pop(GRAPH))
        self._draws_random = self._capturer.draws_random
        for arm, recipe in recipes.items():
            try:
                entries[arm] = self._capturer.capture(call, recipe)
            except (torch.OutOfMemoryError, InterferenceError):
                raise  # no property of the arm, and not to be stored as a choice
            except Exception as error:
                failed[arm] = _first_line(error)
                _log.warning("%s is left out of the choice: %s", arm, failed[arm])
        return failed

    def _time(self, call: Call, entries: Mapping[str, Entry]) -> dict[str, float]:
        args, kwargs = call.rebuild(call.tensors)
        arms: dict[str, Callable[[], Any]] = {EAGER: lambda: self._module(*args, **kwargs)}
        for arm, entry in entries.items():
            arms[arm] = lambda entry=entry: entry.replay(call.tensors)  # type: ignore[misc]
        with self._capturer.undisturbed(self._draws_random):
            median_ms = time_arms(arms, self._elapsed_ms)
        for entry in entries.values():
            entry.hits = 0
        return median_ms


def _shapes(call: Call) -> frozenset[tuple[int, ...]]:
    return frozenset(tuple(tensor.shape) for tensor in call.tensors)


def signature_digest(signature: Signature) -> str:
    """Name a signature by what it says, so that another process finds it.

    Args:
        signature: The signature.

    Returns:
        A hexadecimal digest.
    """
    named = [(path, repr(key)) for path, key in zip(signature.structure.paths, signature.leaf_keys, strict=True)]
    return hashlib.sha256(repr((named, repr(signature.ambient))).encode()).hexdigest()[:32]


def _cache_folder(config: RunnerConfig) -> Path:
    if config.cache_dir is not None:
        return Path(config.cache_dir) / "autotune"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "bcg" / "autotune"


def _choice(value: Mapping[str, Any]) -> Choice:
    median_ms = {str(name): float(ms) for name, ms in value["median_ms"].items()}
    failed = {str(name): str(reason) for name, reason in value["failed"].items()}
    return Choice(str(value["arm"]), median_ms, failed)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def choice_text(choice: Choice) -> str:
    """Say what was measured, such as ``eager 9.10 ms, graph 4.20 ms``.

    Args:
        choice: A choice.
    """
    return ", ".join(f"{arm} {ms:.2f} ms" for arm, ms in choice.median_ms.items())
