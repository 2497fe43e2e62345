"""Run a pipeline once, and say what a capture of each of its denoiser calls meets: hoists, guards and breaks.

Needs no GPU: the tape stands in for CUDA graphs, and what only a GPU meets, copies from host to device, is told too.

    scripts/inspect --pipeline lumina2                              a tiny checkpoint of the family, made from nothing
    scripts/inspect --model PATH_OR_ID --height 512 --width 512     a checkpoint of one's own
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import bcg
from bcg.pipelines.tiny_registry import TINY
from bcg.signature import CallBinder, Signature

DENOISERS = ("transformer", "transformer_2", "unconditional_transformer", "unet")
PROMPT = "a red fox in the snow"


@dataclass
class Recorder:
    """Stands before a module and keeps the first call of each signature.

    Attributes:
        module: The module.
        calls: Positional and keyword arguments, their tensors cloned, by signature.
    """

    module: nn.Module
    calls: dict[Signature | str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Keep a call, and pass it on."""
        call = CallBinder(self.module.forward).call(args, kwargs)
        if call is not None:
            key = call.signature if call.signature is not None else str(call.refusal)
            if key not in self.calls:
                self.calls[key] = call.rebuild([tensor.clone() for tensor in call.tensors])
        return args, kwargs


def main(arguments: Sequence[str] | None = None) -> int:
    """Inspect as the command line says; return the exit status, 1 where a call cannot be captured."""
    options = _options(arguments)
    console = Console()
    pipe, call = _load(options)
    pipe.set_progress_bar_config(disable=True)
    recorders = _record(pipe, call)
    reports = [
        (name, key, bcg.inspect(recorder.module, *args, **kwargs))
        for name, recorder in recorders.items()
        for key, (args, kwargs) in recorder.calls.items()
    ]
    for name, key, report in reports:
        console.print(f"[bold]{name}[/bold] {key.summary() if isinstance(key, Signature) else key}", highlight=False)
        console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    captured = sum(report.rejected is None for _, _, report in reports)
    console.print(f"{captured} of {len(reports)} signatures can be captured.")
    return int(captured < len(reports))


def _record(pipe: Any, call: Callable[[], Any]) -> dict[str, Recorder]:
    """Run the pipeline once with a recorder before each denoiser."""
    recorders: dict[str, Recorder] = {}
    for name in DENOISERS:
        module = getattr(pipe, name, None)
        if isinstance(module, nn.Module):
            recorders[name] = Recorder(bcg.unwrap(module))
            setattr(pipe, name, bcg.wrap(module, prepare=recorders[name].note))
    call()
    return recorders


def _load(options: argparse.Namespace) -> tuple[Any, Callable[[], Any]]:
    """Return a pipeline and a call of it."""
    if options.model is None:
        tiny = TINY[options.pipeline]
        folder = Path(tempfile.mkdtemp())
        tiny.build(folder)
        pipe = tiny.load(folder)
        return pipe, lambda: pipe(**tiny.example_call(prompt=options.prompt, seed=0))
    import diffusers

    pipe = getattr(diffusers, options.pipeline or "DiffusionPipeline").from_pretrained(options.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {name: getattr(options, name) for name in ("height", "width") if getattr(options, name) is not None}
    pipe.to(device)
    return pipe, lambda: pipe(options.prompt, num_inference_steps=options.steps, output_type="latent", **sizes)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder, or its id on the Hub")
    parser.add_argument(
        "--pipeline", help="with --model the diffusers class that reads it, else a tiny checkpoint's name"
    )
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.model is None and options.pipeline not in TINY:
        parser.error(f"name a checkpoint with --model, or one of {', '.join(TINY)} with --pipeline")
    return options


if __name__ == "__main__":
    sys.exit(main())
