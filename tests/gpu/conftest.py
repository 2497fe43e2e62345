"""What only a GPU can show. Skipped elsewhere: see ``tests/conftest.py``."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _clean_gpu() -> Iterator[None]:
    """Check that no stream is left capturing, and give the memory that the test used back to the device."""
    yield
    if not torch.cuda.is_available():
        return
    assert not torch.cuda.is_current_stream_capturing(), "the test left the current stream capturing"
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
