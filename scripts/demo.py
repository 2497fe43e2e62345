"""Serve prompts through a wrapped pipeline and compare every image with plain eager, bit by bit.

Without options it runs the digits model that comes with bcg, a tiny FLUX that was trained to draw handwritten digits,
on the GPU if there is one, else on the tape backend. With --model it runs a real checkpoint the same way. The exit
status is 1 if an image differs, if anything was captured while serving, or if nothing was replayed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import nn

import bcg
from bcg.pipelines.digits import checkpoint_path, prompts

DIGIT_PROMPTS: Final = tuple(prompts.prompt(digit, variant=digit) for digit in range(10))
UNKNOWN_DIGIT_PROMPT: Final = "a sketch of the number four"
PROMPTS: Final = (
    "a red fox asleep in fresh snow",
    "a lighthouse in a storm, oil on canvas",
    "an astronaut watering tulips",
    "the old harbour at dawn, long exposure",
    "a bowl of plums on a blue table",
    "two herons over a flooded field",
    "a tram in the rain, neon reflections",
    "a paper dragon above a market street",
    "portrait of a clockmaker, soft window light",
    "a cabin under the northern lights",
)
UNKNOWN_PROMPT: Final = "a sailing boat made of glass"
COUNTERS: Final = ("captures", "replays", "eager_calls", "guard_misses")
DENOISERS: Final = ("transformer", "transformer_2", "unconditional_transformer")
DIGITS_SIZE: Final = 128
DIGITS_STEPS: Final = 12
DIGITS_TEXT_LENGTH: Final = 32
"""FLUX pads prompts to 512 tokens by default, eight times as many as the largest of these images has."""
REAL_SIZE: Final = 1024
REAL_STEPS: Final = 4
DIGITS_CALL: Final = {"max_sequence_length": DIGITS_TEXT_LENGTH}
SIZE_STEP: Final = 32
"""Heights and widths are kept multiples of this: every family's patch size times its VAE's scale divides it."""
TIMING_WARMUPS: Final = 2
TIMING_ROUNDS: Final = 15

Call = tuple[tuple[Any, ...], dict[str, Any]]
Images = list[np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Request:
    """One request: what the pipeline is asked for."""

    prompt: str
    height: int
    width: int
    seed: int


@dataclass(frozen=True)
class Served:
    """One request's images, eager and through the runner."""

    request: Request
    eager: Images
    replay: Images

    @property
    def equal(self) -> bool:
        """Whether both are the same, bit by bit (so that a NaN equals itself and -0.0 does not equal 0.0)."""
        return len(self.eager) == len(self.replay) and all(
            (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
            for a, b in zip(self.eager, self.replay, strict=True)
        )


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of one denoiser call, eager and replayed in turn."""

    eager_ms: float
    replay_ms: float


@dataclass(frozen=True)
class Outcome:
    """What serving showed: the images, and by how much each of `COUNTERS` rose."""

    served: Sequence[Served]
    captures: int
    replays: int
    eager_calls: int
    guard_misses: int

    @property
    def equal(self) -> int:
        """How many requests gave the same images both ways."""
        return sum(one.equal for one in self.served)

    @property
    def good(self) -> bool:
        """Whether all images are equal, nothing was captured while serving, and something was replayed."""
        return self.equal == len(self.served) and self.captures == 0 and self.replays > 0


class Demo:
    """A pipeline twice over the same weights: plain, and with its denoisers wrapped."""

    def __init__(self, pipe: Any, steps: int, **more: Any) -> None:
        """Wrap the denoisers of `pipe`; each call gets `more` besides what its request says."""
        self.steps = steps
        self.more = more
        # The copy shares every component; what is assigned to the original afterwards does not reach it.
        self.plain = copy.copy(pipe)
        self.wrapped = pipe
        self.runners = {name: bcg.wrap(module) for name, module in _denoisers(pipe).items()}
        for name, runner in self.runners.items():
            setattr(self.wrapped, name, runner)

    @property
    def backend(self) -> str:
        """The backend's name: ``cuda`` or ``tape``."""
        return str(next(iter(self.runners.values())).pool.backend.name)

    def count(self, counter: str) -> int:
        """Sum one of the runners' counters."""
        return sum(int(getattr(runner.stats, counter)) for runner in self.runners.values())

    def run(self, pipe: Any, request: Request) -> Images:
        """Run one request on either pipeline and return its images, or a video's frames."""
        result = pipe(
            request.prompt,
            height=request.height,
            width=request.width,
            num_inference_steps=self.steps,
            generator=torch.Generator().manual_seed(request.seed),
            output_type="np",
            **self.more,
        )
        made = result.images if hasattr(result, "images") else result.frames[0]
        return [np.asarray(image) for image in made]

    def serve(self, request: Request) -> Served:
        """Run one request on both pipelines."""
        return Served(request, eager=self.run(self.plain, request), replay=self.run(self.wrapped, request))

    def record_calls(self, requests: Sequence[Request]) -> dict[str, list[Call]]:
        """Run requests plainly and keep the arguments that each denoiser was called with."""
        calls: dict[str, list[Call]] = {name: [] for name in self.runners}
        with _recording({name: getattr(self.plain, name) for name in calls}, calls):
            for request in requests:
                self.run(self.plain, request)
        return calls


def _denoisers(pipe: Any) -> dict[str, nn.Module]:
    found = {name: getattr(pipe, name, None) for name in DENOISERS}
    modules = {name: module for name, module in found.items() if isinstance(module, nn.Module)}
    if not modules:
        raise SystemExit(f"{type(pipe).__name__} has none of the components {', '.join(DENOISERS)}.")
    return modules


@contextmanager
def _recording(modules: Mapping[str, nn.Module], calls: Mapping[str, list[Call]]) -> Iterator[None]:
    def recorder(kept: list[Call]) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return lambda _module, args, kwargs: kept.append((args, dict(kwargs)))

    handles = [
        module.register_forward_pre_hook(recorder(calls[name]), with_kwargs=True) for name, module in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    options = _parse(arguments)
    console = Console()
    _quiet_libraries()
    demo = Demo(_load(options, console), options.steps, **({} if options.model else DIGITS_CALL))
    warmed, unknown = _sizes(options)
    _warm(demo, warmed, console)

    outcome = _serve(demo, _requests(options, warmed, unknown), console)

    calls = demo.record_calls([Request("a prompt", *size, seed=0) for size in warmed])
    console.print(_table(demo, calls))
    if not outcome.replays:
        _explain(console, demo, calls)
    _contact_sheet(outcome.served).save(options.output)
    console.print(f"Contact sheet: {options.output}", soft_wrap=True)
    _report(console, demo.backend, outcome)
    return 0 if outcome.good else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--model", help="a checkpoint folder or hub id (default: the digits model of bcg)")
    parser.add_argument("--pipeline", metavar="CLASS", help="its diffusers class (default: what the checkpoint names)")
    parser.add_argument(
        "--prompt", action="append", default=[], help="served before the built-in ones; may be repeated"
    )
    parser.add_argument("--height", type=int, help=f"pixels (default: {DIGITS_SIZE}, with --model {REAL_SIZE})")
    parser.add_argument("--width", type=int, help="pixels (default: as --height)")
    steps = f"denoising steps of every request (default: {DIGITS_STEPS}, with --model {REAL_STEPS})"
    parser.add_argument("--steps", type=int, help=steps)
    parser.add_argument("--dtype", help="of the weights (default: bfloat16 on a GPU, else float32)")
    parser.add_argument("--output", type=Path, default=Path("demo.png"), help="the contact sheet (default: demo.png)")
    options = parser.parse_args(arguments)
    _complete(options, parser)
    return options


def _complete(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill in the defaults that depend on other options or on the machine, and refuse what cannot be run."""
    if options.pipeline and not options.model:
        parser.error("--pipeline says how to read --model; the built-in checkpoint is always FLUX")
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.dtype = _dtype(options.dtype or ("bfloat16" if options.device == "cuda" else "float32"), parser)
    size, steps = (REAL_SIZE, REAL_STEPS) if options.model else (DIGITS_SIZE, DIGITS_STEPS)
    options.height = options.height or options.width or size
    options.width = options.width or options.height
    least = 4 * SIZE_STEP
    if options.height < least or options.height % least or options.width < SIZE_STEP or options.width % SIZE_STEP:
        parser.error(f"--height must be a multiple of {least} and --width of {SIZE_STEP}")
    options.steps = steps if options.steps is None else options.steps
    if options.steps < 1:
        parser.error("--steps must be at least 1")


def _dtype(name: str, parser: argparse.ArgumentParser) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        parser.error(f"--dtype {name} is not a torch dtype, such as bfloat16")
    return dtype


def _quiet_libraries() -> None:
    """Keep the libraries' own bars and notes from tearing this script's progress bar."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()


def _load(options: argparse.Namespace, console: Console) -> Any:
    import diffusers

    source = options.model or str(checkpoint_path())
    loader = getattr(diffusers, options.pipeline or "DiffusionPipeline", None)
    if loader is None:
        raise SystemExit(f"diffusers {diffusers.__version__} has no class {options.pipeline}.")
    pipe = loader.from_pretrained(source, dtype=options.dtype).to(options.device)
    pipe.set_progress_bar_config(disable=True)
    console.print(f"Loaded {type(pipe).__name__}, {options.dtype} on {options.device}.")
    return pipe


def _sizes(options: argparse.Namespace) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Choose two (height, width) to warm, the larger first, and one that stays unknown."""
    height, width = options.height, options.width
    return [(height, width), (height * 3 // 4, width)], (height // 2, width)


def _requests(
    options: argparse.Namespace, warmed: Sequence[tuple[int, int]], unknown: tuple[int, int]
) -> list[Request]:
    built_in, last = (PROMPTS, UNKNOWN_PROMPT) if options.model else (DIGIT_PROMPTS, UNKNOWN_DIGIT_PROMPT)
    given = options.prompt
    chosen = list(dict.fromkeys([*given, *built_in]))[: max(len(given), len(built_in))]
    requests = [Request(prompt, *warmed[seed % len(warmed)], seed) for seed, prompt in enumerate(chosen)]
    return [*requests, Request(last, *unknown, len(chosen))]


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def _warm(demo: Demo, sizes: Sequence[tuple[int, int]], console: Console) -> None:
    with _progress(console) as progress, bcg.warmup():
        task = progress.add_task("Warming up", total=len(sizes))
        for height, width in sizes:
            progress.update(task, description=f"Warming up {height}x{width}")
            demo.run(demo.wrapped, Request("a prompt", height, width, seed=0))
            progress.advance(task)


def _serve(demo: Demo, requests: Sequence[Request], console: Console) -> Outcome:
    before = {counter: demo.count(counter) for counter in COUNTERS}
    with _progress(console) as progress:
        served = [demo.serve(request) for request in progress.track(requests, description="Serving, both ways")]
    return Outcome(served, **{counter: demo.count(counter) - before[counter] for counter in COUNTERS})


def _table(demo: Demo, calls: Mapping[str, Sequence[Call]]) -> Table:
    """Lay out what was captured, and how long one denoiser call takes each way."""
    title = f"captured on the {demo.backend} backend; medians of {TIMING_ROUNDS} interleaved denoiser calls"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, leading=1)
    table.add_column("signature")  # the only column that gives way on a narrow terminal
    for heading in ("segments", "bytes", "capture\ns", "eager\nms", "replay\nms", "hits"):
        table.add_column(heading, justify="right", no_wrap=True)
    hits = {name: {key: entry.hits for key, entry in runner.entries.items()} for name, runner in demo.runners.items()}
    for name, runner in demo.runners.items():
        timings = _time_entries(runner, calls[name])
        for key, entry in runner.entries.items():
            timing = timings.get(key)
            table.add_row(
                Text(entry.signature.summary().replace(", ", "\n")),
                str(entry.segments),
                f"{entry.bytes:,}",
                f"{entry.capture_s:.3f}",
                f"{timing.eager_ms:.2f}" if timing else "-",
                f"{timing.replay_ms:.2f}" if timing else "-",
                str(hits[name][key]),
            )
    return table


def _time_entries(runner: Any, calls: Sequence[Call]) -> dict[Any, Timing]:
    """Time each entry once, on the first of `calls` that it serves."""
    timings: dict[Any, Timing] = {}
    for call in calls:
        key = _entry_of(runner, call)
        if key is not None and key not in timings:
            timings[key] = _time(runner, call)
    return timings


@torch.no_grad()
def _entry_of(runner: Any, call: Call) -> Any:
    """Find the entry that serves a call, by whose hits it raises; None where the call runs eagerly."""
    before = {key: entry.hits for key, entry in runner.entries.items()}
    runner(*call[0], **call[1])
    return next((key for key, entry in runner.entries.items() if entry.hits > before.get(key, 0)), None)


@torch.no_grad()
def _time(runner: Any, call: Call) -> Timing:
    """Time a call both ways in turn, so that a machine that slows down slows both down."""
    module = bcg.unwrap(runner)
    samples: dict[str, list[float]] = {"eager": [], "replay": []}
    for turn in range(TIMING_WARMUPS + TIMING_ROUNDS):
        for way, target in (("eager", module), ("replay", runner)):
            elapsed_ms = _elapsed_ms(target, call)
            if turn >= TIMING_WARMUPS:
                samples[way].append(elapsed_ms)
    return Timing(statistics.median(samples["eager"]), statistics.median(samples["replay"]))


def _elapsed_ms(target: Callable[..., Any], call: Call) -> float:
    _synchronize()
    start = time.perf_counter()
    target(*call[0], **call[1])
    _synchronize()
    return (time.perf_counter() - start) * 1e3


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _explain(console: Console, demo: Demo, calls: Mapping[str, Sequence[Call]]) -> None:
    for name, runner in demo.runners.items():
        for args, kwargs in calls[name][:1]:
            console.print(f"{name} was never replayed: {runner.explain(*args, **kwargs)}", style="red")


def _report(console: Console, backend: str, outcome: Outcome) -> None:
    for one in outcome.served:
        if not one.equal:
            console.print(f"DIFFERS: {one.request}", style="bold red")
    if backend == "tape":
        console.print("The tape backend shows that replay is exact; only a GPU shows how fast it is.", soft_wrap=True)
    console.print(
        f"While serving: {outcome.replays} denoiser calls replayed, {outcome.eager_calls} run eagerly, "
        f"{outcome.guard_misses} guard misses.",
        soft_wrap=True,
    )
    console.print(
        f"{outcome.equal} of {len(outcome.served)} images equal, {outcome.captures} captures while serving",
        style="bold" if outcome.good else "bold red",
    )


def _contact_sheet(served: Sequence[Served]) -> Image.Image:
    """Draw every pair, eager beside replay, in rows of three with a caption below each."""
    cell, caption, gap, columns = 192, 34, 12, 3
    rows = -(-len(served) // columns)
    pair = 2 * cell + gap // 2
    size = (gap + columns * (pair + gap), gap + rows * (cell + caption + gap))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(12)
    for index, one in enumerate(served):
        left = gap + (index % columns) * (pair + gap)
        top = gap + (index // columns) * (cell + caption + gap)
        for offset, image in ((0, one.eager[0]), (cell + gap // 2, one.replay[0])):
            sheet.paste(_thumbnail(image, cell), (left + offset, top))
        verdict = "equal" if one.equal else "DIFFERS"
        text = f"{one.request.prompt[:60]}\n{one.request.height}x{one.request.width}, eager | replay: {verdict}"
        draw.text((left, top + cell + 2), text, fill="black" if one.equal else "red", font=font)
    return sheet


def _thumbnail(image: np.ndarray[Any, Any], cell: int) -> Image.Image:
    """Fit an image ``[H, W, 3]`` of values from 0 to 1 into a square cell."""
    picture = Image.fromarray((np.nan_to_num(image).clip(0, 1) * 255).round().astype(np.uint8))
    scale = cell / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.LANCZOS)


if __name__ == "__main__":
    sys.exit(main())
