"""Options of a runner, each settable by an environment variable."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from bcg.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "BCG_"


@dataclass(frozen=True)
class _Form:
    """How the text of one option is read, and what a user is told when it cannot be."""

    accepted: str
    parse: Callable[[str], Any]
    check: Callable[[Any], bool]


def _choice(*names: str) -> _Form:
    return _Form("one of " + ", ".join(names), str.strip, lambda value: value in names)


def _refusing(form: _Form, refused: frozenset[str]) -> _Form:
    names = " and ".join(sorted(refused))
    return _Form(
        f"{form.accepted}, but not what makes CUDA graphs of its own ({names})",
        form.parse,
        lambda value: form.check(value) and value not in refused,
    )


def _parse_bool(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    return words[text.strip().lower()]


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _count(least: int) -> _Form:
    return _Form(f"a whole number, at least {least}", int, lambda value: _is_count(value, least))


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _parse_settings(text: str) -> dict[str, Any]:
    settings = {}
    for part in _parse_names(text):
        name, separator, value = part.partition("=")
        if not separator:
            raise ValueError(part)
        settings[name.strip()] = _parse_setting(value.strip())
    return settings


def _parse_setting(text: str) -> Any:
    """Read true, false, a number, or text."""
    for parse in ({"true": True, "false": False}.__getitem__, int, float):
        with contextlib.suppress(KeyError, ValueError):
            return parse(text.lower())
    return text


def _optional(form: _Form) -> _Form:
    return _Form(
        form.accepted + ", or 'none'",
        lambda text: None if text.strip().lower() == "none" else form.parse(text),
        lambda value: value is None or form.check(value),
    )


_BOOL: Final = _Form("true or false", _parse_bool, lambda value: isinstance(value, bool))
_RATIO: Final = _Form(
    "a number greater than 0",
    float,
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0,
)
_TEXT: Final = _Form("text", str, lambda value: isinstance(value, str) and bool(value))
_MODES: Final = _choice("default", "max-autotune-no-cudagraphs")
_NAMES: Final = _Form(
    "names separated by commas",
    _parse_names,
    lambda value: isinstance(value, tuple) and all(isinstance(name, str) for name in value),
)
_SETTINGS: Final = _Form(
    "settings by their names (name=value, separated by commas, in the environment)",
    _parse_settings,
    lambda value: isinstance(value, dict) and all(isinstance(name, str) and name for name in value),
)


def _option(default: Any, form: _Form) -> Any:
    if isinstance(default, dict):
        return field(default_factory=default.copy, hash=False, metadata={"form": form})
    return field(default=default, metadata={"form": form})


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Hold the options of one runner.

    Every field can be set by the environment variable ``BCG_<FIELD>`` (upper case). A value given in code wins over the
    environment, the environment over the default. Tuples of names are separated by commas in the environment; ``none``
    stands for None.

    Attributes:
        backend: ``auto`` (cuda for a module on a CUDA device, else tape), ``cuda`` or ``tape``.
        max_entries: Captured signatures kept; the least recently used one goes first.
        max_bytes: Device bytes that all entries may hold together; None for no limit.
        max_rejections: Rejected signatures whose reason is remembered.
        max_segments: Graph segments of one entry; a capture that needs more is rejected.
        max_variants: Captured variants of one signature, which differ in guard values.
        max_capture_attempts: Tries at one capture, each with one more operation made an eager break.
        max_leaves: Leaves of all arguments together that a call is searched for; beyond it the call runs eagerly.
        warmup_iterations: Eager forwards before a capture (kernel selection, caches, autotuning).
        verify: ``exact`` (bit for bit), ``close`` (tolerance), ``off``, or ``auto``: close where something is
            compiled, else exact.
        collectives: ``capture`` puts collectives into segments, ``break`` runs them eagerly between segments.
        eager_modules: Patterns of submodule names that run as eager breaks (``fnmatch``: ``*.ff_i``).
        eager_functions: Functions, as ``package.module:function``, that run as eager breaks.
        module_breaks: Turn a submodule into an eager break when its host reads change with the content.
        compile: ``off``; ``blocks`` compiles every repeated block class for captures; ``model`` the whole forward.
            Results are then close to eager, not equal; eager calls stay uncompiled. A call whose compiled code cannot
            be captured is captured without, with a warning.
        compile_mode: Inductor's mode; one that makes CUDA graphs of its own is refused.
        compile_options: Inductor's options, as ``torch.compile(options=...)`` takes them, over those of the mode and
            over bcg's own, ``{"combo_kernels": True}``: independent small kernels of a block then run as one, which
            was measured to pay (docs/DESIGN.md, "Compiled code"). Nothing for other backends.
        compile_backend: torch.compile's backend.
        compile_dynamic: ``auto`` (static shapes first, one dynamic version when another shape comes; with autotuning,
            code for each shape instead where that was measured to be faster on the second), ``yes``, or ``no``, which
            compiles for seconds at every new shape.
        compile_cache: Directory for torch's portable compile artifacts, so that the next process starts without
            compiling; None for none. Artifacts are code: name a directory that only trusted users write to.
        autotune: Time eager and each way to replay at capture, and keep the fastest. Never on the tape.
        attention_backends: diffusers' attention backends that autotuning may choose among, by name, or ``installed``
            for all that are. Empty by default, since another backend moves bits: results are then close to eager, or
            equal with ``verify="exact"``, which drops a backend that is not. Some backends switch torch's SDPA flags
            for the whole process while they run, so warm up before other threads serve.
        min_speedup: Eager over replay time below which an entry is dropped; None for 1.02 where autotuning is on, and
            for no limit where it is off.
        autotune_cache: Reuse stored choices; where false, measure afresh and store under ``runs/``.
        cache_dir: Directory of stored choices; None for ``$XDG_CACHE_HOME/bcg`` or ``~/.cache/bcg``.
        capture_error_mode: CUDA's stream capture mode: ``thread_local``, ``relaxed`` or ``global``.
        debug: Log more facts. Never changes behaviour.

    Raises:
        ConfigError: A value, given or from the environment, is not of the accepted form.

    Example:
        >>> RunnerConfig(max_entries=4).max_entries
        4
    """

    backend: str = _option("auto", _choice("auto", "cuda", "tape"))
    max_entries: int = _option(32, _count(1))
    max_bytes: int | None = _option(None, _optional(_count(1)))
    max_rejections: int = _option(256, _count(1))
    max_segments: int = _option(1024, _count(1))
    max_variants: int = _option(8, _count(1))
    max_capture_attempts: int = _option(4, _count(1))
    max_leaves: int = _option(2048, _count(1))
    warmup_iterations: int = _option(2, _count(2))
    verify: str = _option("auto", _choice("auto", "exact", "close", "off"))
    collectives: str = _option("capture", _choice("capture", "break"))
    eager_modules: tuple[str, ...] = _option((), _NAMES)
    eager_functions: tuple[str, ...] = _option((), _NAMES)
    module_breaks: bool = _option(True, _BOOL)
    compile: str = _option("off", _choice("off", "blocks", "model"))
    compile_mode: str = _option("default", _refusing(_MODES, frozenset({"reduce-overhead", "max-autotune"})))
    compile_options: Mapping[str, Any] = _option({}, _SETTINGS)
    compile_backend: str = _option("inductor", _refusing(_TEXT, frozenset({"cudagraphs"})))
    compile_dynamic: str = _option("auto", _choice("auto", "yes", "no"))
    compile_cache: str | None = _option(None, _optional(_TEXT))
    autotune: bool = _option(False, _BOOL)
    attention_backends: tuple[str, ...] = _option((), _NAMES)
    min_speedup: float | None = _option(None, _optional(_RATIO))
    autotune_cache: bool = _option(True, _BOOL)
    cache_dir: str | None = _option(None, _optional(_TEXT))
    capture_error_mode: str = _option("thread_local", _choice("thread_local", "relaxed", "global"))
    debug: bool = _option(False, _BOOL)

    def __post_init__(self) -> None:
        for option in fields(self):
            form: _Form = option.metadata["form"]
            value = getattr(self, option.name)
            if not form.check(value):
                raise ConfigError(f"{option.name}={value!r} is not accepted: give {form.accepted}.")
        # What the caller does to his dict later is not checked any more.
        object.__setattr__(self, "compile_options", dict(self.compile_options))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **options: Any) -> RunnerConfig:
        """Build a config from given options, then the environment, then the defaults.

        Args:
            environment: Where to read ``BCG_<FIELD>`` from; ``os.environ`` by default.
            **options: Field values that win over the environment.

        Returns:
            The config.

        Raises:
            ConfigError: An unknown option, or a value that is not of the accepted form; the message names the option or
                variable, the value and the accepted form.

        Example:
            >>> RunnerConfig.from_environment({"BCG_MAX_ENTRIES": "4"}).max_entries
            4
        """
        names = [option.name for option in fields(cls)]
        unknown = sorted(set(options) - set(names))
        if unknown:
            raise ConfigError(f"unknown option {', '.join(unknown)}: known options are {', '.join(names)}.")
        source = os.environ if environment is None else environment
        for option in fields(cls):
            variable = ENVIRONMENT_PREFIX + option.name.upper()
            if option.name not in options and variable in source:
                options[option.name] = _read(variable, source[variable], option.metadata["form"])
        return cls(**options)


def _read(variable: str, text: str, form: _Form) -> Any:
    try:
        value = form.parse(text)
    except (ValueError, KeyError):
        value = None
        readable = False
    else:
        readable = form.check(value)
    if not readable:
        raise ConfigError(f"{variable}={text!r} is not accepted: give {form.accepted}.")
    return value
