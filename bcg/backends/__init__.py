"""The devices that segments are captured on: `cuda`, and `tape` for machines without a GPU."""

from __future__ import annotations

import torch

from bcg.backends.base import Backend, Pool, Recording, Segment
from bcg.backends.cuda import CudaBackend
from bcg.backends.tape import TapeBackend
from bcg.errors import BackendError

__all__ = ["Backend", "Pool", "Recording", "Segment", "backend_for"]


def backend_for(name: str, device: torch.device) -> Backend:
    """Return the backend that a config names.

    Args:
        name: ``auto``, ``cuda`` or ``tape``.
        device: Where the module lives; decides for ``auto``.

    Returns:
        The backend.

    Raises:
        BackendError: ``cuda`` was asked for where there is no CUDA device, or for a module that is not on one.
    """
    if name == "auto":
        name = "cuda" if device.type == "cuda" else "tape"
    if name == "tape":
        return TapeBackend()
    if not torch.cuda.is_available():
        raise BackendError(
            "backend='cuda' was asked for, but torch sees no CUDA device: install a CUDA build of torch on a machine "
            "with a GPU, or use backend='tape' to check capture-safety without one."
        )
    if device.type != "cuda":
        raise BackendError(
            f"backend='cuda' was asked for, but the module is on {device}: move it to a CUDA device first."
        )
    return CudaBackend()
