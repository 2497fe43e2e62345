"""Warm up a pipeline after a plan, and say what will replay, what it cost, and what will run eagerly and why.

Graphs die with their process, so a server is started in this one: --then package.module:function calls the function
with the warmed pipeline, and its result, if it is a number, is the exit status. With --strict the exit status is 1, and
no server is started, if any request of the plan will not replay; it is 2 if the plan cannot be run at all.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bcg.errors import BcgError, PlanError
from bcg.pipelines import WarmupPlan, warm, wrap_pipeline
from bcg.pipelines.plan import Adapters, parse_resolution

DEFAULT_WEIGHT = 1.0
GUIDANCE_WORDS = {"on": True, "off": False, "default": None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Warm up as the command line says; return the exit status."""
    options = _options(arguments)
    console = Console()
    try:
        server = _function(options.then)
        pipe = _load(options, console)
        plan = _plan(options, pipe)
        report = warm(pipe, plan, full=options.full, progress=console.is_terminal)
    except BcgError as error:
        print(error, file=sys.stderr)
        return 2
    console.print(report)
    if options.report:
        options.report.write_text(report.to_json() + "\n")
    if options.strict and not report.complete:
        return 1
    return 0 if server is None else _status(server(pipe))


def _status(result: Any) -> int:
    return result if isinstance(result, int) else 0


# --- options ---------------------------------------------------------------------------------------------------------


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder, or its id on the Hub")
    parser.add_argument("--pipeline", default="DiffusionPipeline", help="diffusers class that reads it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", type=_dtype, help="bfloat16 on a GPU, float32 elsewhere, if not given")
    parser.add_argument("--max-entries", type=int, help="graphs kept for each denoiser")
    parser.add_argument("--text-buckets", type=_list_of(int), help="pad text to these lengths where that is exact")
    parser.add_argument("--lora", action="append", default=[], metavar="PATH[:WEIGHT]", help="may be given repeatedly")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if anything in the plan will not replay")
    parser.add_argument("--full", action="store_true", help="run text encoder and VAE too")
    parser.add_argument("--report", type=Path, help="write the report here, as JSON")
    parser.add_argument("--then", metavar="MODULE:FUNCTION", help="call this with the warmed pipeline")
    _add_plan_options(parser)
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or (torch.bfloat16 if options.device.startswith("cuda") else torch.float32)
    given = [name for name in PLAN_OPTIONS if getattr(options, name) is not None]
    if options.plan and given:
        parser.error(f"--plan says all that --{given[0].replace('_', '-')} could say: give one of them")
    return options


PLAN_OPTIONS = ("resolutions", "num_frames", "batch_sizes", "guidance", "negative_prompts", "text_lengths", "steps")


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan", "a file, or lists separated by commas; by default the family's sizes")
    group.add_argument("--plan", type=Path, help="a JSON or YAML file with the fields of WarmupPlan")
    group.add_argument("--resolutions", type=_list_of(parse_resolution), help="height x width: 1024x1024,768x1344")
    group.add_argument("--frames", dest="num_frames", type=_list_of(int))
    group.add_argument("--batch-sizes", type=_list_of(int))
    group.add_argument("--guidance", type=_list_of(_guidance), help="on, off, default, or scales")
    group.add_argument("--negative-prompt", dest="negative_prompts", action="append", help="may be given repeatedly")
    group.add_argument("--text-lengths", type=_list_of(int), help="tokens, template included")
    group.add_argument("--steps", type=int)


def _list_of(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(read(part.strip()) for part in text.split(",") if part.strip())
        except PlanError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    parse.__name__ = "list"  # argparse names the type in its message
    return parse


def _guidance(text: str) -> bool | float | None:
    return GUIDANCE_WORDS[text] if text in GUIDANCE_WORDS else float(text)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{name} is not a torch dtype, such as bfloat16")
    return dtype


# --- steps -----------------------------------------------------------------------------------------------------------


def _function(name: str | None) -> Callable[[Any], Any] | None:
    """Find the server before anything is loaded: a typing error shall not cost a warm-up."""
    if name is None:
        return None
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"--then {name}: {error}. Give package.module:function.") from error
    if not callable(found):
        raise PlanError(f"--then {name} is a {type(found).__name__}, not a function of the pipeline.")
    return found  # type: ignore[no-any-return]


def _load(options: argparse.Namespace, console: Console) -> Any:
    import diffusers

    loader = getattr(diffusers, options.pipeline, None)
    if loader is None:
        raise PlanError(f"diffusers {diffusers.__version__} has no class {options.pipeline}.")
    _hide_bars()
    pipe = loader.from_pretrained(options.model, dtype=options.dtype).to(options.device)
    for path, name, _ in map(_lora, options.lora):
        pipe.load_lora_weights(path, adapter_name=name)
    console.print(f"Loaded {type(pipe).__name__}, {options.dtype} on {options.device}.")
    chosen = {} if options.max_entries is None else {"max_entries": options.max_entries}
    return wrap_pipeline(pipe, text_buckets=options.text_buckets, **chosen)


def _hide_bars() -> None:
    """Keep the libraries' own bars, one for each component, out of the output."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()


def _lora(text: str) -> tuple[str, str, float]:
    """Split a path from the weight behind it, and name the adapter after the file."""
    path, _, weight = text.rpartition(":")
    try:
        number = float(weight) if path else None
    except ValueError:
        number = None
    path = text if number is None else path
    return path, Path(path).stem.replace(".", "_"), DEFAULT_WEIGHT if number is None else number


def _plan(options: argparse.Namespace, pipe: Any) -> WarmupPlan:
    if options.plan:
        try:
            return WarmupPlan.load(options.plan)
        except OSError as error:
            raise PlanError(f"--plan: {error}") from error
    fields = {name: getattr(options, name) for name in PLAN_OPTIONS if getattr(options, name) is not None}
    adapters: list[Adapters] = [((name, weight),) for _, name, weight in map(_lora, options.lora)]
    if adapters:
        fields["adapters"] = [*adapters, ()]
    return WarmupPlan.for_pipeline(pipe, **fields)


if __name__ == "__main__":
    sys.exit(main())
