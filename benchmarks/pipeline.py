"""Time whole pipeline calls, from the prompt to the final latents.

    python -m benchmarks.pipeline --models sd35,flux,qwen,sana --json pipeline.json
    python -m benchmarks.pipeline --tiny                  a test of the benchmark, on a machine without a GPU

The pipelines are diffusers' own. The transformer has its published size and random weights, the scheduler its usual
settings. Text encoders have two layers and the published width, and the call ends with the latents, without a VAE: what
is timed is the denoising loop with all that surrounds it in Python. In a served call the text encoder and the VAE add
the same time to every arm.

Each arm is a pipeline of its own on the same transformer. bcg's are wrapped and warmed as a server would do it, with
`wrap_pipeline` and `warm`, before any of the prompts that are timed and compared. ``verified`` compares the final
latents of new prompts and noise with eager's, bit for bit. ``warm s`` is what the whole plan took; for compiled blocks
it depends on what the compiler's caches on disk hold.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from bcg.pipelines import WarmupPlan, _tiny, _tiny_encoders, family_of, runners_of, warm, wrap_pipeline
from bcg.pipelines.tiny_registry import TINY
from benchmarks import harness
from benchmarks.arms import start_compiler
from benchmarks.harness import Column, Deadline, Memory, Report, Turn, get, verified
from benchmarks.models import MODELS, Built, Config, Shape, build

PROMPT: Final = "a red fox in the snow at dawn"
FRESH: Final = (("a red cat in the snow at dusk", 101), ("a red cat in the snow at dark", 102))
"""Prompts of as many tokens as `PROMPT`, and seeds of the noise: their results are compared with eager's."""
CALLS: Final = 2
"""Pipeline calls of one turn, after one that does not count."""


# --------------------------------------------------------------------------------------------------- the pipelines


def _sd3_encoders(pipe: Any, config: Config) -> dict[str, nn.Module]:
    width = config["pooled_projection_dim"] // 2  # of both CLIPs alike; their states are padded to the width of T5's
    return {
        "text_encoder": _tiny.clip_text_model_with_projection(pipe.tokenizer, width),
        "text_encoder_2": _tiny.clip_text_model_with_projection(pipe.tokenizer_2, width),
        "text_encoder_3": _tiny.t5_encoder(pipe.tokenizer_3, config["joint_attention_dim"]),
    }


def _flux_encoders(pipe: Any, config: Config) -> dict[str, nn.Module]:
    return {
        "text_encoder": _tiny.clip_text_model(pipe.tokenizer, config["pooled_projection_dim"]),
        "text_encoder_2": _tiny.t5_encoder(pipe.tokenizer_2, config["joint_attention_dim"]),
    }


def _qwen_encoders(pipe: Any, config: Config) -> dict[str, nn.Module]:
    return {"text_encoder": _tiny_encoders.qwen25_vl(config["joint_attention_dim"])}


def _sana_encoders(pipe: Any, config: Config) -> dict[str, nn.Module]:
    return {"text_encoder": _tiny_encoders.gemma2_model(config["caption_channels"])}


def _wan_encoders(pipe: Any, config: Config) -> dict[str, nn.Module]:
    return {"text_encoder": _tiny_encoders.umt5_encoder(pipe.tokenizer, config["text_dim"])}


@dataclass(frozen=True)
class Recipe:
    """Say how to make a pipeline around a transformer, and how to call it.

    Attributes:
        tiny: The tiny checkpoint that has its tokenizers, its scheduler and an example call.
        encoders: Makes text encoders of the width that a transformer's config asks for.
        plain: Arguments of the example call that are left at the pipeline's own default.
        guidance: As a `WarmupPlan` says what the call asks for; None for the pipeline's default.
    """

    tiny: str
    encoders: Callable[[Any, Config], dict[str, nn.Module]]
    plain: tuple[str, ...] = ()
    guidance: bool | None = None


RECIPES: Final[dict[str, Recipe]] = {
    "sana": Recipe("sana", _sana_encoders),
    "sd35": Recipe("stable_diffusion_3", _sd3_encoders),
    "flux": Recipe("flux", _flux_encoders, plain=("true_cfg_scale", "negative_prompt")),
    "qwen": Recipe("qwen_image", _qwen_encoders, guidance=True),
    "wan": Recipe("wan", _wan_encoders),
}


def _quiet() -> None:
    """Keep the bars of reading a checkpoint away from the table."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


class Pipelines:
    """Make pipelines that share a transformer and text encoders.

    Args:
        built: The transformer.
    """

    def __init__(self, built: Built) -> None:
        self._built = built
        self._recipe = RECIPES[built.model.name]
        self._tiny = TINY[self._recipe.tiny]
        _quiet()
        with tempfile.TemporaryDirectory(prefix="bcg-pipeline-", ignore_cleanup_errors=True) as folder:
            self._tiny.build(Path(folder))
            self._base = self._tiny.load(Path(folder))
        with _tiny.seeded(0):
            encoders = self._recipe.encoders(self._base, built.model.size(built.tiny).config)
        self._shared: dict[str, Any] = {
            name: encoder.to(built.device, built.dtype).requires_grad_(False) for name, encoder in encoders.items()
        }

    def make(self) -> Any:
        """Make a pipeline with a scheduler of its own."""
        scheduler = type(self._base.scheduler).from_config(self._base.scheduler.config)
        parts = {"transformer": self._built.module, "scheduler": scheduler, "vae": None, **self._shared}
        pipe = type(self._base)(**{**self._base.components, **parts})
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def arguments(self, shape: Shape, steps: int, prompt: str, seed: int) -> dict[str, Any]:
        """Return the arguments of one call."""
        sizes: dict[str, Any] = {"height": shape.height, "width": shape.width, "steps": steps}
        if shape.frames > 1:
            sizes["num_frames"] = shape.frames
        arguments = self._tiny.example_call(prompt=prompt, seed=seed, **sizes)
        return {name: value for name, value in arguments.items() if name not in self._recipe.plain}

    def plan(self, pipe: Any, shape: Shape) -> WarmupPlan:
        """Say what will be served."""
        arguments = self.arguments(shape, 1, PROMPT, 0)
        text = family_of(pipe).text
        length = None
        if text is not None and text.varies:
            length = int(pipe.encode_prompt(prompt=PROMPT)[0].shape[1])
        return WarmupPlan(
            resolutions=[(shape.height, shape.width)],
            num_frames=[shape.frames if shape.frames > 1 else None],
            guidance=[self._recipe.guidance],
            negative_prompts=[arguments.get("negative_prompt")],
            text_lengths=[length],
            arguments={name: value for name, value in arguments.items() if name in _SIGNED},
        )


_SIGNED: Final = ("use_resolution_binning", "complex_human_instruction")
"""Arguments of an example call that decide about shapes and are no field of a plan."""


# -------------------------------------------------------------------------------------------------------- the arms


@dataclass(frozen=True)
class Arm:
    """Hold one pipeline, and what preparing it told."""

    name: str
    pipe: Any
    exact: bool
    facts: dict[str, Any]
    shortfalls: tuple[str, ...] = ()

    def counts(self) -> tuple[int, int]:
        """Return how many denoiser calls were replayed and how many ran eagerly."""
        stats = [runner.stats for runner in runners_of(self.pipe).values()]
        return sum(one.replays for one in stats), sum(one.eager_calls for one in stats)


OPTIONS: Final[dict[str, dict[str, Any] | None]] = {"eager": None, "bcg": {}, "bcg_blocks": {"compile": "blocks"}}
"""Options of `wrap_pipeline` for each arm; eager is not wrapped."""


def prepare(name: str, pipelines: Pipelines, shape: Shape) -> Arm:
    """Make an arm, and warm it where it is bcg's."""
    pipe, options = pipelines.make(), OPTIONS[name]
    if options is None:
        return Arm(name, pipe, True, {})
    wrap_pipeline(pipe, **options)
    report = warm(pipe, pipelines.plan(pipe, shape), progress=False)
    facts = {
        "warm_s": report.total_s,
        "graphs": len(report.rows),
        "breaks": sum(row.breaks for row in report.rows),
        "entry_bytes": report.total_bytes,
    }
    return Arm(name, pipe, not options, facts, report.shortfalls)


@dataclass(frozen=True)
class Options:
    """Hold what the command line asked for."""

    device: torch.device
    tiny: bool
    arms: tuple[str, ...]
    loads: tuple[str, ...]
    steps: int
    budget_s: float
    deadline: Deadline


class ShapeRun:
    """Measure all arms of one pipeline at one shape.

    Args:
        pipelines: Makes the pipelines.
        built: The transformer.
        shape: The shape.
        options: What to measure.
    """

    def __init__(self, pipelines: Pipelines, built: Built, shape: Shape, options: Options) -> None:
        self._pipelines = pipelines
        self._built = built
        self._shape = shape
        self._options = options
        self._clock = harness.clock_for(built.device)
        self._rows = {name: self._row(name) for name in options.arms}

    def _row(self, name: str) -> dict[str, Any]:
        built = self._built
        return {
            "model": built.model.name,
            "parameters": built.parameters,
            "shape": self._shape.name,
            "load": self._shape.load,
            "steps": self._options.steps,
            "arm": name,
            "status": "ok",
        }

    def run(self) -> list[dict[str, Any]]:
        """Prepare, compare, time; what fails is a row that says so."""
        wants = [self._call(self._pipelines.make(), prompt, seed) for prompt, seed in FRESH]
        arms = []
        for name in self._options.arms:
            try:
                arm = prepare(name, self._pipelines, self._shape)
                self._compare(arm, wants)
                arms.append(arm)
            except Exception as error:  # an arm that cannot run this pipeline is a result
                self._rows[name]["status"] = f"error: {harness.one_line(error)}"
                self._clock.synchronize()  # raises where the device itself is out of order
        self._time(arms)
        for arm in arms:
            for runner in runners_of(arm.pipe).values():
                runner.reset()
        return list(self._rows.values())

    def _call(self, pipe: Any, prompt: str = PROMPT, seed: int = 0) -> Any:
        arguments = self._pipelines.arguments(self._shape, self._options.steps, prompt, seed)
        return pipe(**arguments, return_dict=False)[0]

    def _compare(self, arm: Arm, wants: Sequence[Any]) -> None:
        """Compare with eager, and look whether every call of the denoiser was replayed."""
        row = self._rows[arm.name]
        before, same = arm.counts(), harness.SAME
        for (prompt, seed), want in zip(FRESH, wants, strict=True):
            same = same & harness.compare(self._call(arm.pipe, prompt, seed), want)
        replays, eager_calls = (now - then for now, then in zip(arm.counts(), before, strict=True))
        row |= arm.facts | {"verified": same.exact, "max_rel_diff": same.max_rel_diff}
        if OPTIONS[arm.name] is not None:
            row |= {"replays": replays, "eager_calls": eager_calls}
        if eager_calls or (not replays and OPTIONS[arm.name] is not None):
            why = "; ".join(arm.shortfalls) or f"{eager_calls} of {eager_calls + replays} calls ran eagerly"
            row["status"] = f"not replayed: {why}"
        elif same.max_rel_diff is None or (arm.exact and not same.exact):
            row["status"] = "differs from eager"

    def _time(self, arms: Sequence[Arm]) -> None:
        """Time the arms in turns."""
        turns = {arm.name: Turn(lambda pipe=arm.pipe: self._call(pipe)) for arm in arms}  # type: ignore[misc]
        if not turns:
            return
        timings = harness.interleave(turns, self._clock, budget_s=self._options.budget_s, calls=CALLS)
        for name, timing in timings.items():
            spread = timing.spread("step_ms")  # one call among others, back to back
            self._rows[name] |= {
                "call_ms": {**asdict(spread), "iqr": spread.iqr},
                "per_s": 1e3 / spread.median,
            }


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Add to every timed row its speed over eager's of the same shape."""
    call_ms = {(row["model"], row["shape"], row["arm"]): get("call_ms", "median")(row) for row in rows}
    for row in rows:
        own, eager = get("call_ms", "median")(row), call_ms.get((row["model"], row["shape"], "eager"))
        if own is not None and eager is not None:
            row["speedup"] = eager / own


COLUMNS: Final = (
    Column("model", get("model"), text=True),
    Column("shape", get("shape"), text=True),
    Column("steps", get("steps")),
    Column("arm", get("arm"), text=True),
    Column("call ms", get("call_ms", "median"), "{:.1f}"),
    Column("IQR", get("call_ms", "iqr"), "{:.1f}"),
    Column("per second", get("per_s"), "{:.3f}"),
    Column("eager / arm", get("speedup"), "{:.2f}"),
    Column("warm s", get("warm_s"), "{:.1f}"),
    Column("graphs", get("graphs")),
    Column("replays", get("replays")),
    Column("verified", verified, text=True),
    Column("status", get("status"), text=True),
)


def measure(name: str, options: Options) -> tuple[list[dict[str, Any]], str]:
    """Build one model and its pipelines, measure them, and free them.

    Returns:
        The rows, and a note on the time that it took.
    """
    begin = time.perf_counter()
    built = build(name, options.device, tiny=options.tiny)
    pipelines = Pipelines(built)
    rows: list[dict[str, Any]] = []
    for shape in built.shapes:
        if shape.load in options.loads and not options.deadline.passed:
            rows += ShapeRun(pipelines, built, shape, options).run()
    add_ratios(rows)
    title = built.model.title
    del built, pipelines
    torch.compiler.reset()  # compiled code holds on to the module
    Memory.now(options.device)
    return rows, f"{title}: {time.perf_counter() - begin:.0f} s in all."


def _parser() -> Any:
    parser = harness.parser("Time whole pipeline calls, from the prompt to the final latents.")
    parser.add_argument(
        "--models", type=harness.choice_list(*RECIPES), default=["sd35", "flux", "qwen", "sana"], help="which models"
    )
    parser.add_argument(
        "--shapes", choices=("launch", "compute", "all"), default="launch", help="launch-bound, compute-bound or both"
    )
    parser.add_argument("--arms", type=harness.choice_list(*OPTIONS), default=list(OPTIONS), help="which arms")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps of a call")
    return parser


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark from its command line, and return what was measured."""
    arguments = sys.argv[1:] if arguments is None else arguments
    asked = _parser().parse_args(arguments)
    harness.quiet_diffusers()
    options = Options(
        device=torch.device(asked.device),
        tiny=asked.tiny,
        arms=tuple(asked.arms),
        loads=("launch", "compute") if asked.shapes == "all" else (asked.shapes,),
        steps=asked.steps,
        budget_s=asked.budget,
        deadline=Deadline(asked.time_box),
    )
    report = Report(
        "Whole pipeline calls", harness.machine(options.device), harness.command_line("pipeline", arguments)
    )
    if "bcg_blocks" in options.arms:
        start_compiler(options.device)
    try:
        for name in asked.models:
            if options.deadline.passed:
                report.notes.append(f"{MODELS[name].title}: skipped, the time box is used up.")
                continue
            rows, note = measure(name, options)
            report.rows += rows
            report.notes.append(note)
            report.write(asked.json)
            print(note, file=sys.stderr, flush=True)
    finally:
        report.write(asked.json)
        report.show(COLUMNS)
    return report


if __name__ == "__main__":
    main()
