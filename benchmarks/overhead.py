"""Time what a replayed call costs the host, part by part, for FLUX.1-dev's modules and call.

    python -m benchmarks.overhead --json overhead.json          weights are one expanded number each: runs anywhere
    python -m benchmarks.overhead --calls 50                    seconds; CI prints it as a report

``before launch`` is everything until the first graph launch except the copies in: binding, signature, ambient state,
module state and lookup. Nothing is captured: only what the host does in every call is run. ``refused`` is a call with
an argument of 72,000 nested numbers, which is walked up to a bound and then runs eagerly: all that a runner adds to it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

import bcg
from bcg.ambient import ambient_refusal, ambient_state
from bcg.entry import EntryKey
from bcg.module_state import ModuleState
from bcg.signature import CallBinder
from bcg.static_inputs import StaticArena, StaticInputs
from benchmarks import harness
from benchmarks.harness import Column, Report, get
from benchmarks.module_state import build_flux

CALLS: Final = 500


def flux_call(device: torch.device) -> dict[str, Any]:
    """Return FLUX.1-dev's arguments at 512x512, as its pipeline passes them."""

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    return {
        "hidden_states": draw(1, 1024, 64),
        "timestep": draw(1),
        "guidance": draw(1, dtype=torch.float32),
        "pooled_projections": draw(1, 768),
        "encoder_hidden_states": draw(1, 512, 4096),
        "txt_ids": draw(512, 3),
        "img_ids": draw(1024, 3),
        "joint_attention_kwargs": {},
        "return_dict": False,
    }


def spread_us(function: Callable[[], Any], calls: int) -> dict[str, float]:
    """Return median and quartile distance of one call, in microseconds."""
    for _ in range(20):
        function()
    times = []
    for _ in range(calls):
        begin = time.perf_counter_ns()
        function()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median_us": middle, "iqr_us": high - low}


class _Nothing(torch.nn.Module):
    """Stands for a module whose forward is for free, so that all of a call is what a runner adds."""

    def forward(self, hidden_states: torch.Tensor, numbers: Any = None) -> torch.Tensor:
        """Return the input."""
        return hidden_states


def measure_refused(device: torch.device, calls: int) -> list[dict[str, Any]]:
    """Time a call whose argument is too large to key, on the module and through a runner."""
    module, x = _Nothing(), torch.ones(1, device=device)
    runner = bcg.wrap(module, backend="tape" if device.type == "cpu" else "auto")
    ways: dict[str, Callable[[], Any]] = {
        "refused, eager": lambda: module(x, NESTED),
        "refused, through a runner": lambda: runner(x, NESTED),
    }
    return [{"model": "72,000 numbers", "part": name, **spread_us(call, calls)} for name, call in ways.items()]


def measure(with_lora: bool, device: torch.device, calls: int) -> list[dict[str, Any]]:
    """Time each part for the plain model or for one with a LoRA."""
    model = build_flux(with_lora)
    state, binder, kwargs = ModuleState(model), CallBinder(model.forward), flux_call(device)
    call = binder.call((), kwargs)
    assert call is not None and call.signature is not None
    known = {EntryKey(call.signature, state.key()): call}
    inputs = StaticInputs(call.signature.tensor_specs, device, StaticArena())

    def before_launch() -> None:
        bound = binder.call((), kwargs)
        assert bound is not None and bound.signature is not None
        ambient_refusal()
        assert known[EntryKey(bound.signature, state.key())] is call

    parts: dict[str, Callable[[], Any]] = {
        "bind and sign": lambda: binder.call((), kwargs),
        "ambient state": ambient_state,
        "module state": state.key,
        "before launch": before_launch,
        "copies in": lambda: inputs.load(call.tensors),
        "clone of the result": lambda: call.tensors[0].clone(),
        "72,000 nested numbers": lambda: binder.call((), {**kwargs, "joint_attention_kwargs": NESTED}),
    }
    model_name = "FLUX.1-dev + LoRA" if with_lora else "FLUX.1-dev"
    return [{"model": model_name, "part": name, **spread_us(function, calls)} for name, function in parts.items()]


NESTED: Final = {"numbers": [[float(column) for column in range(720)] for _ in range(100)]}


COLUMNS: Final = (
    Column("model", get("model"), text=True),
    Column("part", get("part"), text=True),
    Column("median us", get("median_us"), "{:.1f}"),
    Column("IQR us", get("iqr_us"), "{:.1f}"),
)


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark from its command line, and return what was measured."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = harness.parser("Time what a replayed call costs the host.")
    parser.add_argument("--calls", type=int, default=CALLS, help="timed calls of each part")
    asked = parser.parse_args(arguments)
    harness.quiet_diffusers()
    torch.set_num_threads(1)
    device = torch.device(asked.device)
    report = Report(
        "Host overhead of a replayed call", harness.machine(device), harness.command_line("overhead", arguments)
    )
    with torch.no_grad():
        for with_lora in (False, True):
            report.rows += measure(with_lora, device, asked.calls)
        report.rows += measure_refused(device, asked.calls)
    report.write(asked.json)
    report.show(COLUMNS)
    return report


if __name__ == "__main__":
    main()
