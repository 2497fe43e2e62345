"""The plan that a pipeline's own numbers suggest."""

from __future__ import annotations

import inspect
from typing import Any, Final

from .family import family_of
from .text_buckets import TextBuckets
from .wrap import runners_of

USUAL_NEGATIVE_PROMPT: Final = " "
"""What the model cards of families with true guidance pass where there is nothing to avoid."""
_FALLBACK_PIXELS: Final = 1024


def default_fields(pipe: Any) -> dict[str, Any]:
    """Return the fields of `WarmupPlan.for_pipeline`."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    sizes = _sizes(pipe, parameters)
    fields: dict[str, Any] = {"resolutions": tuple(dict.fromkeys((height, width) for height, width, _ in sizes))}
    frames = tuple(dict.fromkeys(count for _, _, count in sizes))
    if "num_frames" in parameters:
        fields["num_frames"] = frames
    lengths = bucket_lengths(pipe)
    if lengths:
        fields["text_lengths"] = lengths
    if _default(parameters, "true_cfg_scale", 1.0) > 1.0:
        fields["negative_prompts"] = (None, USUAL_NEGATIVE_PROMPT)
    return fields


def bucket_lengths(pipe: Any) -> tuple[int, ...]:
    """Return the text buckets that the pipeline was wrapped with."""
    found: set[int] = set()
    for runner in runners_of(pipe).values():
        prepare = runner._self_prepare
        if isinstance(prepare, TextBuckets):
            found.update(prepare.buckets)
    return tuple(sorted(found))


def _sizes(pipe: Any, parameters: Any) -> list[tuple[int, int, int | None]]:
    published = family_of(pipe).default_requests
    if published:
        return [(request.height, request.width, request.num_frames) for request in published]
    pixels = _own_pixels(pipe)
    height, width = (_default(parameters, name, pixels) for name in ("height", "width"))
    return [(height, width, _default(parameters, "num_frames", None))]


def _own_pixels(pipe: Any) -> int:
    sample, scale = (getattr(pipe, name, None) for name in ("default_sample_size", "vae_scale_factor"))
    return sample * scale if isinstance(sample, int) and isinstance(scale, int) else _FALLBACK_PIXELS


def _default(parameters: Any, name: str, otherwise: Any) -> Any:
    value = parameters[name].default if name in parameters else None
    return otherwise if value is None or value is inspect.Parameter.empty else value
