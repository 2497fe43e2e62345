"""Time `ModuleState.key` on FLUX.1-dev's modules, with and without a LoRA.

    python benchmarks/module_state.py [--calls 500]

The transformer has its published sizes (1,160 parameters, 1,279 modules), but every weight is one expanded number, so
this needs no GPU and no checkpoint. Each line gives the median over the calls.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from torch import nn

from bcg import _dict_epoch, module_state

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


def build_flux(with_lora: bool) -> Any:
    """Build FLUX.1-dev's transformer without its 24 GB of weights.

    Args:
        with_lora: Put a LoRA on all attention linears.

    Returns:
        The module; its parameters have the published shapes and the storage of one number each.
    """
    with torch.device("meta"):
        model: Any = FluxTransformer2DModel(guidance_embeds=True)
        if with_lora:
            model.add_adapter(LoraConfig(r=16, target_modules=ATTENTION))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                number = torch.zeros(1, dtype=torch.bfloat16).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(number, requires_grad=False)
    model.eval()
    return model


def median_us(function: Callable[[], Any], calls: int) -> float:
    """Return the median time of one call in microseconds."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter_ns()
        function()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def measure(name: str, model: Any, calls: int) -> None:
    """Print the time of key() while nothing changes, and after a change."""
    state = module_state.ModuleState(model)
    for _ in range(20):
        state.key()
    modules, parameters = len(list(model.modules())), len(list(model.parameters()))
    print(f"{name}: {modules:,} modules, {parameters:,} parameters")
    print(f"  unchanged        {median_us(state.key, calls):10.1f} us")

    def change() -> None:
        model.changed_at = time.perf_counter()
        state.key()

    print(f"  after a change   {median_us(change, 5):10.1f} us")


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=500)
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    proof = "one counter for all dicts" if _dict_epoch.epoch() else "one version for each dict"
    print(f"Python {platform.python_version()}, torch {torch.__version__}; unchanged dicts are proved by {proof}")
    with torch.no_grad():
        measure("FLUX.1-dev", build_flux(with_lora=False), calls)
        measure("FLUX.1-dev with one LoRA", build_flux(with_lora=True), calls)


if __name__ == "__main__":
    main()
