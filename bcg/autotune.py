"""Choose for each signature how it is served: eagerly, by its graph, or by the graph of compiled code.

Chosen by measurement: the arms run in turns, so that what slows the machine for a while slows all of them, and medians
are compared. Choices are stored, and reused by the next process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from bcg.capture import Capturer
from bcg.config import RunnerConfig
from bcg.entry import Entry
from bcg.errors import DoesNotPayError
from bcg.model_key import device_key, model_key
from bcg.signature import Call, Signature

_log = logging.getLogger("bcg")

EAGER: Final = "eager"
GRAPH: Final = "graph"
COMPILED: Final = "graph+compiled"
DEFAULT_MIN_SPEEDUP: Final = 1.02
_ROUNDS: Final = 7
_FORMAT: Final = 1


@dataclass(frozen=True)
class Choice:
    """How a signature is served, and why.

    Attributes:
        arm: ``eager``, ``graph`` or ``graph+compiled``.
        median_ms: Measured milliseconds of one call, by arm.
    """

    arm: str
    median_ms: Mapping[str, float]


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
    """Pick the fastest arm; a graph must beat eager by a factor to be kept.

    Args:
        median_ms: Milliseconds by arm, ``eager`` among them.
        min_speedup: Least eager time over graph time.

    Returns:
        The choice.

    Example:
        >>> choose({"eager": 10.0, "graph": 9.9}, 1.02).arm
        'eager'
    """
    best = min((name for name in median_ms if name != EAGER), key=lambda name: median_ms[name])
    pays = median_ms[EAGER] / median_ms[best] >= min_speedup
    return Choice(best if pays else EAGER, dict(median_ms))


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
        name = "rank_tp1_dp1.json" if self._reads else f"runs/{time.strftime('%Y%m%dT%H%M%S')}_rank_tp1_dp1.json"
        self._path = self._path / name
        self._choices: dict[str, Choice] | None = None

    def find(self, signature: Signature) -> Choice | None:
        """Return the stored choice for a signature, or None."""
        return self._load().get(signature_digest(signature)) if self._reads else None

    def keep(self, signature: Signature, choice: Choice) -> None:
        """Store a choice; a folder that cannot be written costs a warning, and nothing else."""
        choices = self._load()
        choices[signature_digest(signature)] = choice
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
            self._choices = self._read() if self._reads and self._path.exists() else {}
        return self._choices

    def _read(self) -> dict[str, Choice]:
        try:
            content = json.loads(self._path.read_text())
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']!r} is not {_FORMAT}")
            return {str(key): _choice(value) for key, value in content["choices"].items()}
        except Exception as error:
            _log.warning("autotune cache %s is ignored: %s: %s", self._path, type(error).__name__, error)
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
        self._store = ChoiceStore(module, capturer.device, config)

    def capture(self, call: Call) -> Entry:
        """Capture a call by its stored choice, or by the arm that is measured to be the fastest.

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
        if stored is not None and (stored.arm != COMPILED or self._config.compile != "off"):
            return self._capture_arm(stored, call)
        return self._measure(call)

    def _capture_arm(self, choice: Choice, call: Call) -> Entry:
        if choice.arm == EAGER:
            raise DoesNotPayError(f"eager is as fast, as measured before ({_text(choice)}).")
        entry = self._capturer.capture(call, compiled=choice.arm == COMPILED)
        entry.choice = choice
        return entry

    def _measure(self, call: Call) -> Entry:
        entries: dict[str, Entry] = {}
        chosen: Entry | None = None
        try:
            self._capture_arms(call, entries)
            choice = choose(self._time(call, entries), self._config.min_speedup or DEFAULT_MIN_SPEEDUP)
            chosen = entries.get(choice.arm)
        finally:
            for entry in entries.values():
                if entry is not chosen:
                    entry.reset()
        assert call.signature is not None
        self._store.keep(call.signature, choice)
        if chosen is None:
            raise DoesNotPayError(f"eager is as fast ({_text(choice)}).")
        chosen.choice = choice
        return chosen

    def _capture_arms(self, call: Call, entries: dict[str, Entry]) -> None:
        entries[GRAPH] = self._capturer.capture(call)
        if self._config.compile == "off":
            return
        try:
            entries[COMPILED] = self._capturer.capture(call, compiled=True)
        except torch.OutOfMemoryError:
            raise  # no property of the compiled code, and not to be stored as a choice
        except Exception as error:
            _log.warning("compiled code is left out of the choice: %s: %s", type(error).__name__, error)

    def _time(self, call: Call, entries: Mapping[str, Entry]) -> dict[str, float]:
        args, kwargs = call.rebuild(call.tensors)
        arms: dict[str, Callable[[], Any]] = {EAGER: lambda: self._module(*args, **kwargs)}
        for arm, entry in entries.items():
            arms[arm] = lambda entry=entry: entry.replay(call.tensors)  # type: ignore[misc]
        with self._capturer.undisturbed():
            median_ms = time_arms(arms, self._elapsed_ms)
        for entry in entries.values():
            entry.hits = 0
        return median_ms


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
    arm = str(value["arm"])
    if arm not in (EAGER, GRAPH, COMPILED):
        raise ValueError(f"unknown arm {arm!r}")
    return Choice(arm, {str(name): float(ms) for name, ms in value["median_ms"].items()})


def _text(choice: Choice) -> str:
    return ", ".join(f"{arm} {ms:.2f} ms" for arm, ms in choice.median_ms.items())
