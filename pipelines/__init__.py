"""One short adapter per diffusers family, and a tiny checkpoint of it to try things on without downloading anything.

Example:
    >>> from bcg.pipelines import WarmupPlan, warm, wrap_pipeline
    >>> pipe = wrap_pipeline(pipe, text_buckets=(128, 256, 512))  # doctest: +SKIP
    >>> print(warm(pipe, WarmupPlan.for_pipeline(pipe)))          # doctest: +SKIP
"""

from __future__ import annotations

from ._warm import warm
from .family import Family, Request, TextInputs, TextStream, family_of
from .misses import plan_from_misses
from .plan import WarmupPlan, WarmupRequest
from .report import ShortfallError, WarmupReport
from .text_buckets import TextBuckets
from .wrap import from_pipe, runners_of, unwrap_pipeline, wrap_pipeline

__all__ = [
    "Family",
    "Request",
    "ShortfallError",
    "TextBuckets",
    "TextInputs",
    "TextStream",
    "WarmupPlan",
    "WarmupReport",
    "WarmupRequest",
    "family_of",
    "from_pipe",
    "plan_from_misses",
    "runners_of",
    "unwrap_pipeline",
    "warm",
    "wrap_pipeline",
]
