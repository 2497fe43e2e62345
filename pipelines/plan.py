"""What a server will be asked for, said beforehand: the plan that `warm` runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

from bcg.errors import PlanError

__all__ = ["Adapters", "WarmupPlan", "WarmupRequest", "parse_resolution"]

Adapters = tuple[tuple[str, float], ...]
"""LoRA adapters that are active together, and their weights."""

DEFAULT_STEPS: Final = 3
"""The first step, one in the middle and the last: some families pass other dtypes or strides in the first."""
_MIN_STEPS: Final = 1
_UNKNOWN_LENGTH: Final = 0


@dataclass(frozen=True, kw_only=True)
class WarmupRequest:
    """One pipeline call of a plan, as far as it decides about signatures.

    Attributes:
        height: In pixels; None for the pipeline's own default.
        width: In pixels; likewise.
        num_frames: Frames of a video; None for the pipeline's default, and for pictures.
        batch_size: Prompts in one call.
        guidance: True for guidance with the pipeline's usual scale, False for none, a number for that scale, None for
            what the pipeline does when it is not told.
        negative_prompt: Given with the call where it is not None; a number stands for some text of so many tokens.
        text_length: Tokens of the prompt that the text encoder sees, its template included; None for a short prompt.
        steps: Denoising steps.
        adapters: LoRA adapters that are active in the call; empty for none, None for those that are active anyway.
        arguments: Further arguments of the pipeline, such as ``{"cfg_trunc_ratio": 0.5}``.

    Example:
        >>> print(WarmupRequest(height=1024, width=768, batch_size=2, guidance=True))
        1024x768, batch 2, guidance on
    """

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    batch_size: int = 1
    guidance: bool | float | None = None
    negative_prompt: str | int | None = None
    text_length: int | None = None
    steps: int = DEFAULT_STEPS
    adapters: Adapters | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("height", "width", "num_frames", "text_length"):
            _check_count(name, getattr(self, name), optional=True)
        for name in ("batch_size", "steps"):
            _check_count(name, getattr(self, name))

    @property
    def size(self) -> tuple[int, ...]:
        """What requests are ordered by: pixels of all frames and prompts, then tokens."""
        pixels = (self.height or _UNKNOWN_LENGTH) * (self.width or _UNKNOWN_LENGTH)
        guided = 0 if self.guidance is False else 1
        length = self.text_length or _UNKNOWN_LENGTH
        return pixels * (self.num_frames or 1) * self.batch_size, guided, length, self.height or 0

    def __str__(self) -> str:
        parts = [f"{self.height}x{self.width}" if self.height and self.width else "default size"]
        parts += [f"{self.num_frames} frames"] if self.num_frames else []
        parts += [f"batch {self.batch_size}"] if self.batch_size > 1 else []
        parts += [] if self.guidance is None else [f"guidance {_guidance_text(self.guidance)}"]
        parts += [] if self.negative_prompt is None else [_negative_text(self.negative_prompt)]
        parts += [f"{self.text_length} tokens"] if self.text_length else []
        parts += [] if self.adapters is None else [_adapters_text(self.adapters)]
        return ", ".join([*parts, *(f"{name}={value}" for name, value in self.arguments.items())])


@dataclass(frozen=True, kw_only=True)
class WarmupPlan:
    """Say which pipeline calls will be served, so that `warm` can capture what they need.

    The requests are every combination of the fields, and those in ``requests`` besides.

    Attributes:
        resolutions: Heights and widths in pixels.
        num_frames: Frames of videos; None for the pipeline's default, and for pictures.
        batch_sizes: Prompts in one call.
        guidance: See `WarmupRequest.guidance`; ``(True, False)`` covers both.
        negative_prompts: See `WarmupRequest.negative_prompt`; ``(None, "blurry")`` covers calls with and without.
        text_lengths: See `WarmupRequest.text_length`.
        adapters: Sets of LoRA adapters with weights, each a mapping, a name or several; None for what is active.
        steps: Denoising steps of each request. `warm` takes more where a denoiser would not be reached.
        arguments: Further arguments that every call gets.
        requests: Further requests, run with the others.

    Raises:
        PlanError: A value is not of the form that the field asks for.

    Example:
        >>> plan = WarmupPlan(resolutions=[(512, 512), (1024, 768)], guidance=(True, False))
        >>> for request in plan.expand():
        ...     print(request)
        1024x768, guidance on
        1024x768, guidance off
        512x512, guidance on
        512x512, guidance off
    """

    resolutions: Sequence[tuple[int, int]] = ()
    num_frames: Sequence[int | None] = (None,)
    batch_sizes: Sequence[int] = (1,)
    guidance: Sequence[bool | float | None] = (None,)
    negative_prompts: Sequence[str | int | None] = (None,)
    text_lengths: Sequence[int | None] = (None,)
    adapters: Sequence[Adapters | None] = (None,)
    steps: int = DEFAULT_STEPS
    arguments: Mapping[str, Any] = field(default_factory=dict)
    requests: Sequence[WarmupRequest] = ()

    def __post_init__(self) -> None:
        _check_count("steps", self.steps)
        given: dict[str, Any] = {
            "resolutions": tuple(map(parse_resolution, _several("resolutions", self.resolutions))),
            "adapters": tuple(map(_adapters, _several("adapters", self.adapters))),
            "requests": tuple(map(_request, _several("requests", self.requests))),
            "arguments": _mapping("arguments", self.arguments),
        }
        for name in ("num_frames", "batch_sizes", "guidance", "negative_prompts", "text_lengths"):
            given[name] = _several(name, getattr(self, name))
            _check_all(name, given[name])
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def expand(self) -> tuple[WarmupRequest, ...]:
        """Return the requests, each once, the largest first.

        Memory that the largest one needs is then there for all others; the other way round it would be asked for anew
        at each larger one.
        """
        # By their text: guidance True and a scale of 1.0 are equal, and mean on and off.
        found = {repr(request): request for request in (*self._combined(), *self.requests)}
        return tuple(sorted(found.values(), key=lambda request: request.size, reverse=True))

    def _combined(self) -> Iterable[WarmupRequest]:
        choices = itertools.product(
            self.resolutions, self.num_frames, self.batch_sizes, self.guidance, self.negative_prompts,
            self.text_lengths, self.adapters,
        )  # fmt: skip
        for (height, width), frames, batch_size, guidance, negative, length, adapters in choices:
            yield WarmupRequest(
                height=height, width=width, num_frames=frames, batch_size=batch_size, guidance=guidance,
                negative_prompt=negative, text_length=length, adapters=adapters, steps=self.steps,
                arguments=self.arguments,
            )  # fmt: skip

    @classmethod
    def for_pipeline(cls, pipe: Any, **changes: Any) -> Self:
        """Make the plan of a pipeline's family: the sizes that its models were published for.

        Text lengths are the buckets of `wrap_pipeline`, where it was given some. A family whose usual calls are guided
        only when a negative prompt is given is warmed with one and without.

        Args:
            pipe: The pipeline.
            **changes: Fields that are to be otherwise.

        Returns:
            The plan.
        """
        from ._defaults import default_fields

        return cls(**{**default_fields(pipe), **changes})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a plan from what JSON or YAML can say.

        Args:
            values: Fields by name. A resolution may be the text ``"1024x768"``, height first.

        Returns:
            The plan.

        Raises:
            PlanError: There is no such field, or a value is not of its form.

        Example:
            >>> WarmupPlan.from_dict({"resolutions": ["512x768"], "steps": 4}).resolutions
            ((512, 768),)
        """
        return cls(**_known(cls, _mapping("a plan", values)))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan from a file.

        Args:
            path: A ``.yaml`` or ``.yml`` file is read as YAML (which needs PyYAML), every other one as JSON.

        Returns:
            The plan.

        Raises:
            PlanError: The file is not of its form, or says what no plan can.
            OSError: It cannot be read.
        """
        path = Path(path)
        read = _read_yaml if path.suffix.lower() in {".yaml", ".yml"} else _read_json
        return cls.from_dict(read(path))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, to be read with `load`.

        Args:
            path: The file.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in types that JSON knows; fields with their default are left out."""
        plain = WarmupPlan()
        changed = [one.name for one in fields(self) if getattr(self, one.name) != getattr(plain, one.name)]
        return {name: _jsonable(getattr(self, name)) for name in changed}


def parse_resolution(value: Any) -> tuple[int, int]:
    """Read a height and a width.

    Args:
        value: A pair, or text such as ``"1024x768"``, height first.

    Returns:
        Height and width.

    Raises:
        PlanError: It is neither.

    Example:
        >>> parse_resolution("1024x768")
        (1024, 768)
    """
    parts: Any = value.lower().split("x") if isinstance(value, str) else value
    try:
        height, width = (int(part) for part in parts)
    except (TypeError, ValueError):
        raise PlanError(f"resolution {value!r}: give height and width, such as (1024, 768) or '1024x768'.") from None
    _check_count("height", height)
    _check_count("width", width)
    return height, width


# --- fields ----------------------------------------------------------------------------------------------------------


def _known(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    names = [one.name for one in fields(kind)]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise PlanError(f"{kind.__name__} has no field {', '.join(unknown)}: it has {', '.join(names)}.")
    return dict(values)


def _several(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise PlanError(f"{name}={value!r}: give a list, such as [{value!r}].")
    return tuple(value)


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(f"{name} must be a mapping of names to values, not {type(value).__name__}.")
    return {str(key): item for key, item in value.items()}


def _request(value: Any) -> WarmupRequest:
    if isinstance(value, WarmupRequest):
        return value
    given = _known(WarmupRequest, _mapping("a request", value))
    return WarmupRequest(**{**given, "adapters": _adapters(given.get("adapters"))})


def _adapters(value: Any) -> Adapters | None:
    """Read adapters as a mapping of weights, a name, names, or pairs as JSON writes them."""
    if value is None:
        return None
    if isinstance(value, str):
        return ((value, 1.0),)
    if isinstance(value, Mapping):
        value = tuple(value.items())
    try:
        pairs = [(item, 1.0) if isinstance(item, str) else tuple(item) for item in value]
        return tuple((str(name), float(weight)) for name, weight in pairs)
    except (TypeError, ValueError):
        raise PlanError(f"adapters {value!r}: give a name, names, or a mapping of names to weights.") from None


def _check_count(name: str, value: Any, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < _MIN_STEPS:
        raise PlanError(f"{name}={value!r}: give a whole number, at least 1.")


def _check_all(name: str, values: tuple[Any, ...]) -> None:
    if not values:
        raise PlanError(f"{name} is empty: leave it out, or give at least one value.")
    kinds: dict[str, tuple[type, ...]] = {"guidance": (bool, int, float), "negative_prompts": (str, int)}
    for value in values:
        if name in kinds:
            if value is not None and not isinstance(value, kinds[name]):
                raise PlanError(
                    f"{name}: {value!r} is none of {', '.join(kind.__name__ for kind in kinds[name])}, None."
                )
        else:
            _check_count(name, value, optional=name != "batch_sizes")


def _jsonable(value: Any) -> Any:
    if isinstance(value, WarmupRequest):
        plain = asdict(WarmupRequest())
        return {name: _jsonable(item) for name, item in asdict(value).items() if item != plain[name]}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


# --- files -----------------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise PlanError(f"{path} is not JSON: {error}") from error


def _read_yaml(path: Path) -> Any:
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise PlanError(
            f"{path} is YAML, which needs PyYAML: pip install pyyaml, or write the plan as JSON."
        ) from error
    try:
        return yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise PlanError(f"{path} is not YAML: {error}") from error


# --- text ------------------------------------------------------------------------------------------------------------


def _guidance_text(guidance: bool | float) -> str:
    return ("on" if guidance else "off") if isinstance(guidance, bool) else f"{guidance:g}"


def _negative_text(negative: str | int) -> str:
    return f"negative prompt of {negative} tokens" if isinstance(negative, int) else "negative prompt"


def _adapters_text(adapters: Adapters) -> str:
    return "adapters " + " + ".join(f"{name} {weight:g}" for name, weight in adapters) if adapters else "no adapters"
