"""Ten thousand calls over five hundred signatures while everything changes that may, on the tape.

Several threads call one runner, some calls inside a warmup window, so that captures, replays, eager calls and evictions
go on side by side. An eager break raises now and then, and so does a capture. Between the rounds the adapters are
switched, scaled, merged, taken out and put in, and weights are replaced. Every result is compared with eager bit for
bit, and memory stays flat. ``benchmarks/soak.py`` is the like for a GPU.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.graph import current_capture

peft = pytest.importorskip("peft")
psutil = pytest.importorskip("psutil")

MIB: Final = 1 << 20
MODES: Final = ("plain", "break", "guard", "select")
RANK: Final = 4
HOT_SHARE: Final = 0.7
"""Of the calls, those with one of the signatures that are asked for often."""
HOT_SIGNATURES: Final = 16
WINDOW_SHARE: Final = 0.1
"""Of the calls, those inside a warmup window."""


class DelicateError(RuntimeError):
    """What the eager break raises now and then."""


class _Trouble(threading.local):
    """Decide on each thread what fails; a forward reads it as a global, so that it is no state of the module."""

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.break_share = 0.0
        self.capture_share = 0.0

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Let breaks and captures fail now and then in a block."""
        self.break_share, self.capture_share = 0.02, 0.05
        try:
            yield
        finally:
            self.break_share = self.capture_share = 0.0


TROUBLE: Final = _Trouble()


@bcg.eager_on_graph
def delicate(x: Tensor) -> Tensor:
    """Run between two segments, and raise now and then."""
    if TROUBLE.random.random() < TROUBLE.break_share:
        raise DelicateError("the break fails this time")
    return x / (1 + x.abs().amax())


class Denoiser(nn.Module):
    """A small network with what makes captures hard: an eager break, a host read, a shape that follows from the data.

    Args:
        width: Features.
        depth: Layers.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, mode: str = "plain", mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the sample ``[rows, width]`` and its mean over the rows."""
        for layer in self.layers:
            x = torch.nn.functional.silu(layer(x))
        if mode == "break":
            x = delicate(x)
        elif mode == "guard" and x[0, 0].item() > 1e30:
            x = x.tanh()
        elif mode == "select":
            x = x + x[x > 0].sum() * 1e-3
        if current_capture() is not None and TROUBLE.random.random() < TROUBLE.capture_share:
            raise torch.OutOfMemoryError("out of memory in the capture (simulated)")
        sample = self.output(x if mask is None else x * mask)
        return {"sample": sample, "mean": sample.mean(0)}


@dataclass(frozen=True)
class Request:
    """One of the signatures."""

    rows: int
    mode: str
    masked: bool


def signatures(count: int) -> list[Request]:
    """Return that many different signatures, small ones first."""
    every = [Request(rows, mode, masked) for rows in range(1, count) for mode in MODES for masked in (False, True)]
    return every[:count]


@dataclass
class Totals:
    """Count what the threads saw."""

    calls: int = 0
    wrong: int = 0
    raised: int = 0

    def __iadd__(self, other: Totals) -> Totals:
        self.calls, self.wrong, self.raised = (
            self.calls + other.calls, self.wrong + other.wrong, self.raised + other.raised,
        )  # fmt: skip
        return self


class Soak:
    """The model, its runner, the threads, and all that happens between rounds.

    Args:
        signature_count: Different signatures.
        threads: Threads that serve.
        width: Features of the model.
        depth: Its layers.
        seed: Decides everything that happens, as far as threads allow.
        **options: Of the runner.
    """

    def __init__(
        self, *, signature_count: int, threads: int = 4, width: int = 16, depth: int = 2, seed: int = 0, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        self.module = Denoiser(width, depth).eval().requires_grad_(False)
        self.runner: Any = bcg.wrap(self.module, **options)
        self.totals = Totals()
        self._width = width
        self._requests = signatures(signature_count)
        self._random = random.Random(seed)
        self._seeds = iter(range(seed + 1, sys.maxsize))
        self._adapters: dict[str, None] = {}
        self._merged = False
        self._workers = ThreadPoolExecutor(threads)
        self._threads = threads
        for name in ("a", "b"):
            self._add(name)

    def close(self) -> None:
        """End the threads."""
        self._workers.shutdown()

    # -- what is served --------------------------------------------------------------------------------------------

    def round(self, calls: int) -> None:
        """Change something, and then let every thread make its calls.

        Args:
            calls: Of all threads together.
        """
        self.change()
        works = [
            self._workers.submit(self._serve, next(self._seeds), calls // self._threads) for _ in range(self._threads)
        ]
        for work in works:
            self.totals += work.result()

    def _serve(self, seed: int, calls: int) -> Totals:
        drawn, totals = random.Random(seed), Totals()
        TROUBLE.random = random.Random(seed)
        made = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(calls):
                request = drawn.choice(
                    self._requests[:HOT_SIGNATURES] if drawn.random() < HOT_SHARE else self._requests
                )
                arguments = self._arguments(request, made)
                got = self._call(arguments, drawn, totals)
                if got is not None:
                    want = self.module(**arguments)
                    totals.wrong += not all(torch.equal(got[name], want[name]) for name in want)
        return totals

    def _call(self, arguments: dict[str, Any], drawn: random.Random, totals: Totals) -> dict[str, Tensor] | None:
        totals.calls += 1
        try:
            with TROUBLE.armed(), bcg.warmup() if drawn.random() < WINDOW_SHARE else nullcontext():
                result: dict[str, Tensor] = self.runner(**arguments)
                return result
        except DelicateError:
            totals.raised += 1
            return None

    def _arguments(self, request: Request, made: torch.Generator) -> dict[str, Any]:
        x = torch.randn(request.rows, self._width, generator=made)
        mask = (x[:, :1] > -1).to(x.dtype) if request.masked else None
        return {"x": x, "mode": request.mode, "mask": mask}

    # -- what changes between rounds -------------------------------------------------------------------------------

    def change(self) -> None:
        """Do one of the things that change a module; the threads stand still."""
        changes: list[Callable[[], None]] = [
            self._switch, self._switch, self._switch, self._scale, self._disable, self._merge, self._reload,
            self._replace_data, self._write_data, self._drop_graphs,
        ]  # fmt: skip
        with torch.no_grad():
            self._random.choice(changes)()

    def _layers(self) -> list[Any]:
        return [module for module in self.module.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]

    def _add(self, name: str) -> None:
        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=r"layers\.\d+", init_lora_weights=False)
        peft.inject_adapter_in_model(config, self.module, adapter_name=name)
        self.module.requires_grad_(False)
        self._adapters[name] = None

    def _switch(self) -> None:
        self._unmerge()
        chosen = self._random.choice([["a"], ["b"], ["a", "b"]])
        for layer in self._layers():
            layer.enable_adapters(True)
            layer.set_adapter(chosen)
        self.module.requires_grad_(False)

    def _scale(self) -> None:
        self._unmerge()
        scale = self._random.choice([0.25, 0.5, 1.0])
        for layer in self._layers():
            layer.set_scale("a", scale)

    def _disable(self) -> None:
        self._unmerge()
        for layer in self._layers():
            layer.enable_adapters(False)

    def _merge(self) -> None:
        self._unmerge()
        safe = self._random.random() < 0.5
        for layer in self._layers():
            layer.enable_adapters(True)
            layer.merge(safe_merge=safe)
        self._merged = True

    def _unmerge(self) -> None:
        if self._merged:
            for layer in self._layers():
                layer.unmerge()
        self._merged = False

    def _reload(self) -> None:
        """Unload an adapter and load it again, as new tensors."""
        self._unmerge()
        for layer in self._layers():
            layer.delete_adapter("b")
        self._add("b")
        self._switch()

    def _replace_data(self) -> None:
        weight = self.module.output.weight
        weight.data = weight.data.flip(0).contiguous()

    def _write_data(self) -> None:
        self.module.output.bias.data.mul_(-1)

    def _drop_graphs(self) -> None:
        self.runner.reset()


def resident_bytes() -> int:
    """Return the memory of this process."""
    gc.collect()
    resident: int = psutil.Process().memory_info().rss
    return resident


def live_tensors() -> int:
    """Return how many tensors there are in this process."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of captures fail on purpose; their messages would be kept by pytest, and counted as a leak."""
    logger = logging.getLogger("bcg")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def soak(*, calls: int, signatures: int, rounds: int) -> None:
    """Soak, and check that every result was eager's and that memory is flat."""
    soaked = Soak(signature_count=signatures, max_entries=32, max_rejections=32)
    threads_before = threading.active_count()
    tensors, resident = [], []
    try:
        for _ in range(rounds):
            soaked.round(calls // rounds)
            tensors.append(live_tensors())
            resident.append(resident_bytes())
        totals, stats = soaked.totals, soaked.runner.stats
        assert totals.calls >= calls * 0.9
        assert totals.wrong == 0
        assert stats.calls == totals.calls
        # Everything that is to be soaked took place.
        assert stats.captures > 32
        assert stats.replays > stats.captures
        assert stats.evictions > 0
        assert stats.rejections > 0
        assert stats.replay_failures > 0
        assert totals.raised > 0
        # A call is a replay, a capture call or an eager call; one that raised may be in none.
        assert abs(stats.calls - stats.replays - stats.eager_calls - stats.capture_calls) <= totals.raised
        assert len(soaked.runner.entries) <= 32 * soaked.runner._self_config.max_variants
        soaked.runner.reset()
        assert live_tensors() <= tensors[0], "tensors are left behind"
    finally:
        soaked.close()
    assert threading.active_count() <= threads_before + 4
    third = max(1, rounds // 3)
    early, late = max(resident[third : 2 * third]), min(resident[2 * third :])
    assert late - early < 48 * MIB, f"memory grows: {[size // MIB for size in resident]} MiB"
    assert min(tensors[2 * third :]) <= 1.5 * max(tensors[third : 2 * third]), f"tensors pile up: {tensors}"


def test_a_short_soak() -> None:
    soak(calls=1000, signatures=100, rounds=10)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_calls_over_five_hundred_signatures() -> None:
    soak(calls=10_000, signatures=500, rounds=60)
