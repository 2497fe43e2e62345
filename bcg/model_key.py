"""Names of a model and of a device that mean the same in another process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn


def model_key(module: nn.Module) -> str:
    """Name a model by its class, configuration, parameter dtypes and size.

    Args:
        module: The model.

    Returns:
        Such as ``FluxTransformer2DModel-1f0c…``: equal for equal configurations, whatever the weights are.

    Example:
        >>> model_key(nn.Linear(2, 2)) == model_key(nn.Linear(2, 2))
        True
    """
    config = getattr(module, "config", None)
    # Private values of diffusers' configs are where the model came from, and sets whose order changes with the process.
    given = config.items() if isinstance(config, Mapping) else ()
    parts = sorted((str(key), repr(value)) for key, value in given if not str(key).startswith("_"))
    shapes = sorted((name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in module.named_parameters())
    digest = hashlib.sha256(repr((parts, shapes)).encode()).hexdigest()
    return f"{type(module).__name__}-{digest[:16]}"


def device_key(device: torch.device) -> str:
    """Name a kind of device: ``sm90`` for a Hopper GPU, else the device's type.

    Args:
        device: The device.

    Returns:
        The name.
    """
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
