"""Make the next plan from the calls that no graph served."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

from bcg.misses import CallerArguments

from ._adapters import has_adapters
from ._requests import CallBuilder
from .family import family_of
from .plan import WarmupPlan, WarmupRequest
from .wrap import runners_of

__all__ = ["plan_from_misses"]

_TOLD_OTHERWISE: Final = frozenset(
    {"batch_size", "height", "num_frames", "num_inference_steps", "output_type", "return_dict", "self", "width"}
)
_GUIDANCE: Final = ("true_cfg_scale", "guidance_scale")
_SECOND_STREAM: Final = ("_2", "_3")
_POSITIVE: Final = ("prompt_", "text_hiddens")
_NEGATIVE: Final = ("negative_prompt_", "uncond_text_hiddens")


def plan_from_misses(pipe: Any) -> WarmupPlan:
    """Make a plan of the requests whose calls ran eagerly since the last `warm`, for want of a graph.

    A miss remembers the arguments of the pipeline call around it, in its stack (see `bcg.misses.caller_arguments`), but
    neither prompts nor tensors: a prompt becomes its length in tokens.

    Args:
        pipe: A wrapped pipeline.

    Returns:
        The plan, with one request for each different call, and empty where nothing missed. Steps are those of any plan.

    Example:
        >>> plan = plan_from_misses(pipe)                       # doctest: +SKIP
        >>> plan.save("next.json")                              # doctest: +SKIP
        >>> warm(pipe, WarmupPlan.load("next.json"))            # doctest: +SKIP
    """
    denoisers = family_of(pipe).denoisers
    callers = dict.fromkeys(
        caller
        for name, runner in runners_of(pipe).items()
        if name in denoisers
        for miss in runner.misses
        for caller in miss.callers
    )
    requests = {repr(request): request for request in map(_Reader(pipe).request, callers)}
    return WarmupPlan(requests=tuple(requests.values()))


class _Reader:
    """Reads requests from what misses remember."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._parameters = inspect.signature(type(pipe).__call__).parameters
        self._builders: dict[str, CallBuilder] = {}

    def request(self, caller: CallerArguments) -> WarmupRequest:
        """Return the request that a pipeline call was."""
        values = dict(caller.values)
        arguments = dict(self._further(values))
        builder = self._builders.setdefault(repr(arguments), CallBuilder(self._pipe, arguments=arguments))
        return WarmupRequest(
            height=values.get("height"),
            width=values.get("width"),
            num_frames=values.get("num_frames"),
            batch_size=values.get("batch_size") or 1,
            guidance=self._guidance(values),
            negative_prompt=self._negative(caller, builder),
            text_length=self._length(caller, builder),
            adapters=caller.adapters if has_adapters(self._pipe) else None,
            arguments=arguments,
        )

    def _guidance(self, values: Mapping[str, Any]) -> float | None:
        name = self._guidance_name()
        value = values.get(name) if name is not None else None
        is_usual = name is None or value == self._parameters[name].default
        return None if value is None or is_usual else float(value)

    def _guidance_name(self) -> str | None:
        return next((name for name in _GUIDANCE if name in self._parameters), None)

    def _length(self, caller: CallerArguments, builder: CallBuilder) -> int | None:
        length = _tokens(caller, _POSITIVE)
        return None if length is None or length == builder.short_length else length

    def _negative(self, caller: CallerArguments, builder: CallBuilder) -> int | None:
        """Return the negative prompt's length, where it decides whether there is guidance or which shape it has."""
        if "true_cfg_scale" in self._parameters or builder.text_kind != "fixed":
            return _tokens(caller, _NEGATIVE)
        return None

    def _further(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        told = {*_TOLD_OTHERWISE, self._guidance_name()}
        for name, value in values.items():
            parameter = self._parameters.get(name)
            if parameter is None or name in told or value is None or "callback" in name:
                continue
            if value != parameter.default and list_of(value) != list_of(parameter.default):
                yield name, list_of(value)


def list_of(value: Any) -> Any:
    """Return tuples as lists, as JSON will."""
    return [list_of(item) for item in value] if isinstance(value, (list, tuple)) else value


def _tokens(caller: CallerArguments, names: tuple[str, ...]) -> int | None:
    """Return the tokens of the longest prompt: the ones of its mask, or its rows where it has none."""
    # Where guidance runs both halves in one batch, the negative half stands first.
    batch_size = dict(caller.values).get("batch_size") or 1
    for name, rows in caller.ones:
        if name.startswith(names) and not name.endswith(_SECOND_STREAM):
            return max(rows[-batch_size:])
    for name, shape in caller.shapes:
        is_stream = name.startswith(names) and ("embeds" in name or "hiddens" in name)
        if is_stream and len(shape) >= 2 and not name.endswith((*_SECOND_STREAM, "clip")):
            return shape[-2]
    return None
