"""Why no graph may serve a call, as far as it follows from gradients and devices.

What surrounds a call is in bcg/ambient.py, what the module holds in bcg/probes.py.
"""

from __future__ import annotations

import torch
from torch import nn

from bcg.signature import Call, Signature, TensorSpec


def gradient_refusal(module: nn.Module, call: Call) -> str | None:
    """Say that a call needs gradients, which a replay would not record, or return None.

    Args:
        module: The module.
        call: The call.
    """
    if not torch.is_grad_enabled():
        return None
    needed = any(tensor.requires_grad for tensor in call.tensors)
    if needed or any(parameter.requires_grad for parameter in module.parameters()):
        return "gradients are required: call the module under torch.no_grad() or torch.inference_mode()"
    return None


def device_refusal(signature: Signature, device: torch.device) -> str | None:
    """Name an argument that is neither on the module's device nor on the host, or return None.

    Args:
        signature: The call's signature.
        device: Where the module is.
    """
    allowed = {str(device), "cpu"}
    for path, key in zip(signature.structure.paths, signature.leaf_keys, strict=True):
        if isinstance(key, TensorSpec) and key.device not in allowed:
            return f"argument `{path}` is on {key.device}, but the module is on {device}"
    return None
