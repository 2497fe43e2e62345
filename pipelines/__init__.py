"""One short adapter per diffusers family, and a tiny checkpoint of it to try things on without downloading anything.

Example:
    >>> from bcg.pipelines import wrap_pipeline
    >>> pipe = wrap_pipeline(pipe, text_buckets=(128, 256, 512))  # doctest: +SKIP
"""

from __future__ import annotations

from .family import Family, Request, TextInputs, TextStream, family_of
from .text_buckets import TextBuckets
from .wrap import from_pipe, runners_of, unwrap_pipeline, wrap_pipeline

__all__ = [
    "Family",
    "Request",
    "TextBuckets",
    "TextInputs",
    "TextStream",
    "family_of",
    "from_pipe",
    "runners_of",
    "unwrap_pipeline",
    "wrap_pipeline",
]
