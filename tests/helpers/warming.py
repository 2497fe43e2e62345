"""Warm a pipeline by a plan and serve prompts, on any device: what the report says beforehand is what happens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from bcg.pipelines import WarmupPlan, WarmupReport, WarmupRequest, runners_of, warm, wrap_pipeline
from bcg.pipelines._requests import CallBuilder
from bcg.pipelines.tiny_registry import TinyPipeline


def _orders(words: str, count: int) -> list[str]:
    """The same words in other orders: other texts of as many tokens, whatever the tokenizer, since the first stays."""
    first, *rest = words.split()
    return [" ".join((first, *order)) for order in itertools.islice(itertools.permutations(rest), count)]


PROMPTS: Final = (
    *_orders("a red fox in the snow", 5),
    *_orders("a lighthouse at dawn", 3),
    *_orders("a blue plum", 2),
)
"""Ten prompts of three lengths, which are in the plan."""
UNPLANNED_PROMPT: Final = "a clockmaker and two herons under the stars of a long cold night"
"""One of a length that is not, longer than the others and than the negative prompt."""

_PLANNED_OTHERWISE: Final = frozenset(
    {"generator", "guidance_scale", "height", "image", "negative_prompt", "num_frames", "num_inference_steps",
     "output_type", "prompt", "true_cfg_scale", "width"}
)  # fmt: skip
_SEED: Final = 1


@dataclass(frozen=True)
class Served:
    """What one request came to.

    Attributes:
        calls: Calls of the denoisers.
        replays: How many of them replayed.
        captures: Entries that were captured meanwhile.
        image: The result, in latent space.
    """

    calls: int
    replays: int
    captures: int
    image: torch.Tensor


def check_warmed(pipe: Any, tiny: TinyPipeline, device: str) -> WarmupReport:
    """Warm up by a plan, and serve ten new prompts and one of an unplanned length.

    Each draws what it draws unwrapped, bit for bit; those of the plan replay in every call of a denoiser, and the other
    one where the report says so.

    Args:
        pipe: A tiny pipeline, not wrapped yet, on ``device``.
        tiny: What it is.
        device: Where it is.

    Returns:
        The report.
    """
    brings_embeddings = "prompt_embeds" in _call(pipe, tiny, device, PROMPTS[0])
    prompts = PROMPTS if brings_embeddings else (*PROMPTS, UNPLANNED_PROMPT)
    want = [_draw(pipe, tiny, device, prompt) for prompt in prompts]
    wrap_pipeline(pipe)
    lengths = {} if brings_embeddings else _lengths(pipe, tiny, device, prompts)
    report = warm(pipe, plan_of(pipe, tiny, device, lengths), strict=True, progress=False)
    for prompt, expected in zip(prompts, want, strict=True):
        served = _serve(pipe, tiny, device, prompt)
        foretold = report.covers(text_length=lengths.get(prompt))
        assert foretold or prompt == UNPLANNED_PROMPT, f"{prompt!r} is of a length in the plan"
        assert torch.equal(served.image, expected), f"another image of {prompt!r} than unwrapped"
        assert served.captures == 0 and served.calls > 0
        assert (served.replays == served.calls) == foretold, f"{prompt!r}: {served.replays} of {served.calls} replayed"
    assert report.covers(text_length=lengths.get(UNPLANNED_PROMPT)) or report.notes, "it names what will not replay"
    return report


def plan_of(pipe: Any, tiny: TinyPipeline, device: str, lengths: Mapping[str, int | None]) -> WarmupPlan:
    """Plan what the example call asks for: its size, its guidance and its further arguments.

    Args:
        pipe: The pipeline.
        tiny: What it is.
        device: Where it is.
        lengths: Tokens of the prompts, those of the plan among them; empty where the calls bring embeddings.
    """
    call = _call(pipe, tiny, device, PROMPTS[0])
    scale = call.get("true_cfg_scale", call.get("guidance_scale"))
    fields: dict[str, Any] = {"num_frames": call.get("num_frames"), "guidance": scale, "steps": 2}
    if not lengths:
        requests = [
            WarmupRequest(height=call["height"], width=call["width"], arguments=arguments, **fields)
            for arguments in _embeddings_of_each_length(pipe, tiny, device)
        ]
        return WarmupPlan(requests=requests)
    return WarmupPlan(
        resolutions=[(call["height"], call["width"])],
        num_frames=[fields["num_frames"]],
        guidance=[scale],
        negative_prompts=[call.get("negative_prompt")],
        text_lengths=sorted({length for prompt, length in lengths.items() if prompt in PROMPTS and length}) or [None],
        steps=fields["steps"],
        arguments=_further(call),
    )


def _lengths(pipe: Any, tiny: TinyPipeline, device: str, prompts: Sequence[str]) -> dict[str, int | None]:
    """Tokens of each prompt; None where the pipeline makes one shape of all, and a plan need not say any."""
    builder = CallBuilder(pipe, arguments=_further(_call(pipe, tiny, device, PROMPTS[0])))
    is_fixed = builder.text_kind == "fixed"
    return {prompt: None if is_fixed else builder.counted_length(prompt) for prompt in prompts}


def _embeddings_of_each_length(pipe: Any, tiny: TinyPipeline, device: str) -> Iterator[dict[str, Any]]:
    calls = [_further(_call(pipe, tiny, device, prompt)) for prompt in PROMPTS]
    yield from {call["prompt_embeds"].shape: call for call in calls}.values()


def _further(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name not in _PLANNED_OTHERWISE}


def _call(pipe: Any, tiny: TinyPipeline, device: str, prompt: str) -> dict[str, Any]:
    return tiny.example_call(prompt=prompt, seed=_SEED, device=device, dtype=pipe.dtype)


def _draw(pipe: Any, tiny: TinyPipeline, device: str, prompt: str) -> torch.Tensor:
    return torch.as_tensor(pipe(**_call(pipe, tiny, device, prompt), return_dict=False)[0])


def _serve(pipe: Any, tiny: TinyPipeline, device: str, prompt: str) -> Served:
    before = _counters(pipe)
    image = _draw(pipe, tiny, device, prompt)
    calls, replays, captures = (now - then for now, then in zip(_counters(pipe), before, strict=True))
    return Served(calls, replays, captures, image)


def _counters(pipe: Any) -> tuple[int, int, int]:
    stats = [runner.stats for runner in runners_of(pipe).values()]
    return sum(one.calls for one in stats), sum(one.replays for one in stats), sum(one.captures for one in stats)
