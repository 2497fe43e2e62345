"""Serve for minutes what goes wrong in production all at once, and compare every result with eager.

    python -m benchmarks.soak --minutes 10 --json soak.json

Four threads, each on a stream of its own, call two wrapped modules that share one pool: a tiny FLUX with two LoRAs,
and a module with a host read, boolean indexing and a decorated eager function. Shapes are drawn from far more
signatures than ``max_entries``; LoRAs are switched; warmup windows open now and then, so that entries are captured
and evicted while others serve; captures and eager breaks fail at random; the allocator is churned. Every result is
compared with the module's own, bit for bit.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

import bcg
from bcg.graph import current_capture
from benchmarks import harness
from benchmarks.harness import Column, Report, get
from benchmarks.models import build

THREADS: Final = 4
MAX_ENTRIES: Final = 24
IMAGE_TOKENS: Final = tuple(range(16, 80, 2))
ROWS: Final = tuple(range(8, 200, 3))
CAPTURE_FAULTS: Final = 0.1
BREAK_FAULTS: Final = 0.02


class Fault(RuntimeError):
    """What the soak injects."""


class Faults:
    """Raises in captures and in eager breaks, at random and where it is allowed to."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._of_thread = threading.local()
        self._draw = random.Random(0)

    def allowed(self, wanted: bool) -> None:
        """Let faults happen on this thread, or not."""
        self._of_thread.allowed = wanted

    def may_raise(self, kind: str, probability: float) -> None:
        """Raise one time in so many."""
        # Numbers of its own: a forward that draws from Python's global ones is not captured, and rightly so.
        if getattr(self._of_thread, "allowed", False) and self._draw.random() < probability:
            self.counts[kind] += 1
            raise Fault(f"an injected fault in a {kind}")


FAULTS: Final = Faults()  # global: as a module's attribute its counts would be state of the module


@bcg.eager_on_graph
def halved(x: Tensor) -> Tensor:
    """Run as an eager break, which raises now and then in a replay or in eager."""
    if current_capture() is None:
        FAULTS.may_raise("break", BREAK_FAULTS)
    return x / 2


class Breaking(nn.Module):
    """A forward with everything that ends a segment, and faults."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Mix plain work, host constants, a host read, boolean indexing and an eager function."""
        if current_capture() is not None:
            FAULTS.may_raise("capture", CAPTURE_FAULTS)
        x = torch.nn.functional.gelu(self.first(x)) + torch.tensor([0.5], device=x.device)
        chosen = halved(x[mask])
        if mask.sum().item() > 1:
            chosen = chosen * 2
        x = x.clone()
        x[mask] = chosen
        result: Tensor = self.second(x)
        return result


class Turns:
    """Many threads serve at the same time, and one at a time may change the modules while nobody serves."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._serving = 0
        self._wants_to_change = False

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Serve while nothing changes."""
        with self._condition:
            self._condition.wait_for(lambda: not self._wants_to_change)
            self._serving += 1
        try:
            yield
        finally:
            with self._condition:
                self._serving -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Change something while nobody serves; who wants to serve meanwhile waits, or the moment might never come."""
        with self._condition:
            self._wants_to_change = True
            self._condition.wait_for(lambda: self._serving == 0)
            try:
                yield
            finally:
                self._wants_to_change = False
                self._condition.notify_all()


@dataclass
class Soak:
    """Hold the modules and what happened to them."""

    device: torch.device
    deadline_s: float
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns, self.lock = Turns(), threading.Lock()
        self.built = build("flux", self.device, tiny=True)
        self.flux: Any = self.built.module
        add_loras(self.flux)
        breaking = Breaking(64).to(self.device).eval().requires_grad_(False)
        self.runners: list[Any] = [bcg.wrap(self.flux, max_entries=MAX_ENTRIES)]
        self.runners.append(bcg.wrap(breaking, max_entries=MAX_ENTRIES, pool=self.runners[0].pool))

    def run(self) -> None:
        """Serve on all threads until the time is over."""
        threads = [threading.Thread(target=self._serve, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self, number: int) -> None:
        draw = random.Random(number)
        generator = torch.Generator().manual_seed(number)
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            while time.monotonic() < self.deadline_s:
                if number == 0 and draw.random() < 0.01:
                    self._switch_lora(draw)
                try:
                    with self.turns.serving():
                        self._one_call(draw, generator)
                except Exception as error:
                    self._note_wrong(f"{type(error).__name__}: {error}")

    def _switch_lora(self, draw: random.Random) -> None:
        with self.turns.changing():
            names = draw.choice((["one"], ["two"], ["one", "two"]))
            self.flux.set_adapters(names, weights=[draw.choice((0.5, 1.0)) for _ in names])
        self._count("lora switches")

    def _one_call(self, draw: random.Random, generator: torch.Generator) -> None:
        index = draw.randrange(2)
        runner, call = self.runners[index], (self._flux_call, self._breaking_call)[index](draw, generator)
        FAULTS.allowed(True)
        try:
            if draw.random() < 0.05:
                self._count("calls in a window")
                with bcg.warmup():
                    got = self._tolerant(runner, call)
            else:
                got = self._tolerant(runner, call)
        finally:
            FAULTS.allowed(False)
        churn = [torch.full((draw.randrange(1, 1 << 18),), float("nan"), device=self.device) for _ in range(4)]
        want = call(bcg.unwrap(runner))
        del churn
        self._count("calls")
        if got is not None and not all(map(torch.equal, harness.tensors(got), harness.tensors(want))):
            self._note_wrong(f"runner {index}: the result differs from eager")

    def _tolerant(self, runner: Any, call: Callable[[Any], Any]) -> Any:
        try:
            return call(runner)
        except Fault:
            self._count("faults that reached the caller, as in eager")
            return None

    def _flux_call(self, draw: random.Random, generator: torch.Generator) -> Callable[[Any], Any]:
        call = self.built.call(self.built.shapes[0], draw.randrange(1 << 30))
        tokens = draw.choice(IMAGE_TOKENS)
        kwargs = dict(call.kwargs)
        hidden = torch.randn(1, tokens, kwargs["hidden_states"].shape[-1], generator=generator)
        kwargs["hidden_states"] = hidden.to(self.device, kwargs["hidden_states"].dtype)
        kwargs["img_ids"] = torch.zeros(tokens, 3, device=self.device, dtype=kwargs["img_ids"].dtype)
        return lambda module: module(**kwargs)

    def _breaking_call(self, draw: random.Random, generator: torch.Generator) -> Callable[[Any], Any]:
        rows = draw.choice(ROWS)
        mask = torch.zeros(rows, dtype=torch.bool, device=self.device)
        mask[: draw.choice((rows // 2, rows // 2, rows // 2, rows // 3))] = True
        x = torch.randn(rows, 64, generator=generator).to(self.device)
        return lambda module: module(x, mask)

    def _count(self, name: str) -> None:
        with self.lock:
            self.counts[name] += 1

    def _note_wrong(self, text: str) -> None:
        with self.lock:
            self.counts["wrong"] += 1
            if len(self.wrong) < 20:
                self.wrong.append(text)


def add_loras(module: Any) -> None:
    """Add two LoRAs with weights that are not zero."""
    from peft import LoraConfig

    for name in ("one", "two"):
        module.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"]), adapter_name=name)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in module.named_parameters():
            if "lora_" in path:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    module.requires_grad_(False)


def free_bytes(device: torch.device) -> int:
    """Return the device's free memory after all that can be given back is given back."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


COLUMNS: Final = (Column("what", get("what"), text=True), Column("value", get("value"), "{}"))


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the soak from its command line, and return what happened."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = harness.parser("Serve for minutes, and compare every result with eager.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long")
    asked = parser.parse_args(arguments)
    harness.quiet_diffusers()
    device = torch.device(asked.device)
    report = Report("Soak", harness.machine(device), harness.command_line("soak", arguments))
    started = time.monotonic()
    soak = Soak(device, time.monotonic() + asked.minutes * 60)
    with torch.no_grad():
        soak._one_call(random.Random(1), torch.Generator().manual_seed(1))  # what the first call of a process allocates
    for runner in soak.runners:
        runner.reset()
    start_bytes = free_bytes(device)
    soak.run()
    end_bytes = free_bytes(device)
    stats = {
        name: sum(getattr(runner.stats, name) for runner in soak.runners)
        for name in ("replays", "eager_calls", "captures", "rejections", "evictions", "guard_misses", "replay_failures")
    }
    for runner in soak.runners:
        runner.reset()
    reset_bytes = free_bytes(device)
    report.summary = {
        "seconds": round(time.monotonic() - started, 1),
        "wrong": soak.counts["wrong"],
        **{name: count for name, count in soak.counts.items() if name != "wrong"},
        **stats,
        **{f"injected faults in a {kind}": count for kind, count in FAULTS.counts.items()},
        "free_bytes_start": start_bytes,
        "free_bytes_end": end_bytes,
        "free_bytes_after_reset": reset_bytes,
        "lost_percent_after_reset": round(100 * (1 - reset_bytes / start_bytes), 3) if start_bytes else 0.0,
        "first_wrong": soak.wrong,
    }
    report.rows = [{"what": name, "value": value} for name, value in report.summary.items()]
    report.write(asked.json)
    report.show(COLUMNS)
    return report


if __name__ == "__main__":
    sys.exit(int(main().summary["wrong"] > 0))
