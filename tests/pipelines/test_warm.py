"""Warming up: what the report says will replay does, and what it says will not does not; nothing is captured later."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import bcg
from bcg.pipelines import ShortfallError, WarmupPlan, WarmupRequest, runners_of, warm, wrap_pipeline
from bcg.pipelines._requests import CallBuilder
from bcg.pipelines._warm import _time
from bcg.pipelines.tiny_registry import TINY
from bcg.pools import is_working
from warming import check_warmed

PROMPTS = (
    "a red fox",
    "a lighthouse in a storm",
    "tulips",
)

Loader = Callable[..., Any]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """Reads a tiny checkpoint, which is written once, as a new pipeline."""
    folders: dict[str, Path] = {}

    def from_disk(name: str, **options: Any) -> Any:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            TINY[name].build(folders[name])
        pipe = TINY[name].load(folders[name], **options)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return from_disk


@pytest.fixture
def flux(load: Loader) -> Any:
    return wrap_pipeline(load("flux"))


def small(name: str, **fields: Any) -> WarmupPlan:
    """A plan of one size, that of the example call."""
    call = TINY[name].example_call(prompt="", seed=0)
    return WarmupPlan(
        resolutions=[(call["height"], call["width"])], num_frames=[call.get("num_frames")], **{"steps": 2, **fields}
    )


def count(pipe: Any, counter: str) -> int:
    return sum(int(getattr(runner.stats, counter)) for runner in runners_of(pipe).values())


def served(pipe: Any, call: Callable[[], Any]) -> tuple[int, int, int]:
    """Make a call; return how many denoiser calls it made, how many replayed, and how many captured."""
    counters = ("calls", "replays", "captures")
    before = [count(pipe, counter) for counter in counters]
    call()
    calls, replays, captures = (count(pipe, name) - old for name, old in zip(counters, before, strict=True))
    return calls, replays, captures


@pytest.mark.parametrize("name", list(TINY))
def test_ten_new_prompts_replay_as_the_report_said(name: str, load: Loader) -> None:
    check_warmed(load(name), TINY[name], "cpu")


def test_both_denoisers_are_reached_with_as_many_steps_as_that_takes(load: Loader) -> None:
    pipe = wrap_pipeline(load("wan22"))
    report = warm(pipe, small("wan22", steps=1), progress=False)
    assert report.complete
    (outcome,) = report.outcomes
    assert outcome.steps > 1
    assert all(outcome.calls.values()) and set(outcome.calls) == {"transformer", "transformer_2"}
    assert {row.component for row in report.rows} == {"transformer", "transformer_2"}


def test_a_denoiser_that_no_step_reaches_is_noted(load: Loader) -> None:
    pipe = load("wan22")
    pipe.register_to_config(boundary_ratio=0.0)
    report = warm(wrap_pipeline(pipe), small("wan22"), progress=False)
    assert report.complete, "what is called replays"
    assert any(note.startswith("transformer_2 was never called") for note in report.notes)


def test_the_report_says_what_compiled_blocks_would_do(flux: Any) -> None:
    report = warm(flux, small("flux"), progress=False)
    assert sum(note.startswith("transformer runs the kernels of eager") for note in report.notes) == 1


def test_the_other_dtype_of_a_first_step_is_captured_too(load: Loader) -> None:
    """HunyuanVideo in bfloat16 passes a float32 timestep in the first step only."""
    pipe = wrap_pipeline(load("hunyuan_video", dtype=torch.bfloat16))
    report = warm(pipe, small("hunyuan_video", guidance=[False]), progress=False)
    assert report.complete
    assert len({row.signature for row in report.rows}) == 2
    call = {
        **TINY["hunyuan_video"].example_call(prompt="a fox", seed=1),
        "true_cfg_scale": 1.0,
        "num_inference_steps": 5,
    }
    assert served(pipe, lambda: pipe(**call)) == (5, 5, 0)


def test_both_sides_of_a_truncated_guidance_are_captured(load: Loader) -> None:
    """Skip-layer guidance of Stable Diffusion 3 adds a call of half the batch in some steps."""
    pipe = wrap_pipeline(load("stable_diffusion_3"))
    more = {"skip_guidance_layers": [1], "skip_layer_guidance_stop": 0.5}
    report = warm(pipe, small("stable_diffusion_3", guidance=[True], arguments=more), progress=False)
    assert report.complete
    assert len(report.rows) == 2
    call = {**TINY["stable_diffusion_3"].example_call(prompt="a fox", seed=1), **more, "num_inference_steps": 8}
    calls, replays, captures = served(pipe, lambda: pipe(**call))
    assert calls > 8 and replays == calls and captures == 0


def test_batches_and_sizes_of_the_plan_replay_and_others_do_not(flux: Any) -> None:
    plan = WarmupPlan(resolutions=["32x32", "64x32"], batch_sizes=[1, 2], steps=2)
    report = warm(flux, plan, progress=False)
    assert [outcome.request.height for outcome in report.outcomes] == [64, 64, 32, 32], "the largest first"
    assert report.covers(height=64, width=32, batch_size=2) and not report.covers(height=96, width=32)
    for height, batch_size, replay in ((64, 2, True), (32, 1, True), (96, 1, False)):
        calls, replays, captures = served(
            flux, lambda h=height, b=batch_size: flux(["a fox"] * b, height=h, width=32, num_inference_steps=2)  # type: ignore[misc]
        )  # fmt: skip
        assert (replays == calls, captures) == (replay, 0)


def test_text_of_another_length_replays_with_buckets(load: Loader) -> None:
    pipe = wrap_pipeline(load("qwen_image"), text_buckets=(32, 64))
    plan = WarmupPlan.for_pipeline(pipe, resolutions=["32x48"], guidance=[True], negative_prompts=[" "], steps=2)
    assert plan.text_lengths == (32, 64)
    report = warm(pipe, plan, strict=True, progress=False)
    assert report.covers(text_length=20) and not report.covers(text_length=65)
    for prompt in PROMPTS:
        call = TINY["qwen_image"].example_call(prompt=prompt, seed=0)
        assert served(pipe, lambda call=call: pipe(**call)) == (4, 4, 0)  # type: ignore[misc]


# --- a dummy run, and a full one -------------------------------------------------------------------------------------


@pytest.fixture
def encoder_calls(flux: Any) -> Iterator[dict[str, int]]:
    """Count the calls of the other components."""
    calls = {"text_encoder": 0, "text_encoder_2": 0, "vae": 0}
    handles = []

    def counting(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    for name in ("text_encoder", "text_encoder_2"):
        handles.append(getattr(flux, name).register_forward_pre_hook(counting(name)))
    handles.append(flux.vae.decoder.register_forward_pre_hook(counting("vae")))
    yield calls
    for handle in handles:
        handle.remove()


def test_a_dummy_run_encodes_two_short_prompts_and_decodes_nothing(flux: Any, encoder_calls: dict[str, int]) -> None:
    plan = WarmupPlan(resolutions=["32x32", "32x48", "64x32"], guidance=[True, False], steps=1)
    warm(flux, plan, progress=False)
    assert encoder_calls["vae"] == 0
    assert encoder_calls["text_encoder_2"] <= 3, "two probes and the negative prompt, not one for each request"


def test_a_full_run_runs_everything(flux: Any, encoder_calls: dict[str, int]) -> None:
    assert warm(flux, WarmupPlan(resolutions=["32x32"], steps=1), full=True, progress=False).complete
    assert encoder_calls["vae"] == 2 and encoder_calls["text_encoder_2"] >= 2


def test_pipelines_that_take_no_embeddings_get_text_of_the_lengths_asked_for(load: Loader) -> None:
    pipe = wrap_pipeline(load("kandinsky5"))
    report = warm(pipe, small("kandinsky5", guidance=[False], text_lengths=[9]), progress=False)
    assert report.complete and report.text_lengths == (9,)


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_adapters(load: Loader) -> Any:
    peft = pytest.importorskip("peft")
    pipe = load("flux")
    for name in ("ink", "style"):
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_k"], init_lora_weights=False)
        pipe.transformer.add_adapter(config, adapter_name=name)
    pipe.set_adapters("ink", 0.25)
    return wrap_pipeline(pipe)


def adapter_state(pipe: Any) -> list[Any]:
    layers = [module for module in pipe.transformer.modules() if hasattr(module, "lora_A")]
    states: list[Any] = [(layer.active_adapters, dict(layer.scaling), layer._disable_adapters) for layer in layers]
    return [*states, [parameter.requires_grad for parameter in pipe.transformer.parameters()]]


def test_adapters_are_active_for_their_pass_and_put_back(with_adapters: Any) -> None:
    pipe = with_adapters
    before = adapter_state(pipe)
    plan = WarmupPlan(resolutions=["32x32"], adapters=[None, {"style": 0.5}, ["ink", "style"], {}], steps=1)
    report = warm(pipe, plan, progress=False)
    assert report.complete and len(report.rows) == 4
    assert adapter_state(pipe) == before

    def serve() -> Any:
        return pipe("a fox", height=32, width=32, num_inference_steps=2, output_type="latent")

    assert served(pipe, serve) == (2, 2, 0)
    pipe.set_adapters("style", 0.5)
    assert served(pipe, serve) == (2, 2, 0)
    pipe.set_adapters("style", 0.75)
    assert served(pipe, serve) == (2, 0, 0), "a weight that is not in the plan"
    pipe.set_adapters(["ink", "style"])
    assert served(pipe, serve) == (2, 2, 0)


def test_adapters_that_are_not_loaded_are_told_before_anything_runs(with_adapters: Any, flux: Any) -> None:
    plan = WarmupPlan(resolutions=["32x32"], adapters=["oil"])
    with pytest.raises(bcg.PlanError, match=r"not loaded: oil.*loaded are: ink, style"):
        warm(with_adapters, plan, progress=False)
    with pytest.raises(bcg.PlanError, match="loaded are: none"):
        warm(flux, plan, progress=False)
    assert count(flux, "calls") == count(with_adapters, "calls") == 0


# --- what cannot be, and what fell short -----------------------------------------------------------------------------


def test_more_signatures_than_entries_are_an_error_before_anything_is_captured(load: Loader) -> None:
    pipe = wrap_pipeline(load("flux"), max_entries=3)
    sizes = [f"{height}x32" for height in range(32, 112, 16)]
    with pytest.raises(bcg.PlanError, match=r"max_entries=3 .* 4 after 4 of 5 requests.*max_entries=8"):
        warm(pipe, WarmupPlan(resolutions=sizes, steps=1), progress=False)
    assert count(pipe, "captures") == count(pipe, "calls") == 0
    assert set(runners_of(pipe)) == {"transformer"}, "the runner is back in its place"


def test_requests_that_share_signatures_fit(load: Loader) -> None:
    """A scale is no part of a signature: many requests, one entry."""
    pipe = wrap_pipeline(load("flux"), max_entries=1)
    plan = WarmupPlan(resolutions=["32x32"], guidance=[1.5, 2.5, 3.5], steps=1)
    assert warm(pipe, plan, strict=True, progress=False).complete


def test_strict_raises_with_the_report_and_lax_reports(load: Loader) -> None:
    """Two lengths of text are two variants of one signature in Lumina 2."""
    plan = small("lumina2", guidance=[False], text_lengths=[50, 60], steps=1)
    pipe = wrap_pipeline(load("lumina2"), max_variants=1)
    report = warm(pipe, plan, progress=False)
    assert [outcome.will_replay for outcome in report.outcomes] == [True, False]
    assert "50 tokens" in report.shortfalls[0] and "other values in its guards" in report.shortfalls[0]
    assert report.covers(text_length=60) and not report.covers(text_length=50)
    with pytest.raises(ShortfallError, match="50 tokens") as caught:
        warm(wrap_pipeline(load("lumina2"), max_variants=1), plan, strict=True, progress=False)
    assert not caught.value.report.complete


def test_a_runner_that_is_switched_off_is_a_shortfall(flux: Any) -> None:
    runners_of(flux)["transformer"].reset("switched off")
    report = warm(flux, WarmupPlan(resolutions=["32x32"], steps=1), progress=False)
    assert report.shortfalls == ("32x32: 0 of 1 calls replayed",)


def test_a_request_that_the_pipeline_refuses_is_a_shortfall_and_the_others_go_on(load: Loader) -> None:
    pipe = wrap_pipeline(load("stable_diffusion_3"))
    report = warm(pipe, WarmupPlan(resolutions=["35x32", "32x32"], guidance=[False], steps=1), progress=False)
    assert [outcome.will_replay for outcome in report.outcomes] == [False, True]
    assert "ValueError" in report.shortfalls[0]


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (WarmupPlan(), "the plan is empty"),
        (WarmupPlan(resolutions=["32x32"], arguments={"colour": 1}), "FluxPipeline takes no colour"),
    ],
)
def test_plans_that_cannot_be_run_are_told(flux: Any, plan: WarmupPlan, told: str) -> None:
    with pytest.raises(bcg.PlanError, match=told):
        warm(flux, plan, progress=False)
    assert count(flux, "calls") == 0


def test_a_pipeline_without_runners_is_told(load: Loader) -> None:
    with pytest.raises(bcg.PlanError, match="call wrap_pipeline"):
        warm(load("flux"), WarmupPlan(resolutions=["32x32"]))


def test_a_guider_of_the_pipelines_own_cannot_be_planned(load: Loader) -> None:
    pipe = wrap_pipeline(load("hunyuan_video15"))
    with pytest.raises(bcg.PlanError, match="takes no guidance in its calls"):
        warm(pipe, small("hunyuan_video15", guidance=[True]), progress=False)


# --- around it -------------------------------------------------------------------------------------------------------


def test_the_report_is_json_and_text(flux: Any) -> None:
    report = warm(flux, WarmupPlan(resolutions=["32x32"], guidance=[True, False], steps=1), progress=False)
    found = json.loads(report.to_json())
    assert found["complete"] and found["shortfalls"] == []
    assert found["outcomes"][0]["request"]["height"] == 32 and found["outcomes"][0]["will_replay"]
    (row,) = report.rows
    assert row.verified == "exact" and row.segments == 1 and row.bytes > 0 and row.capture_s > 0
    assert row.eager_ms is not None and row.replay_ms is not None
    assert report.total_bytes >= row.bytes and report.total_s > 0
    assert str(report).splitlines()[-1].startswith("2 of 2 requests replay; 1 graphs, ")
    assert "transformer: 32x32, guidance on" in str(report)


def test_it_leaves_nothing_behind(flux: Any, capsys: pytest.CaptureFixture[str]) -> None:
    generator, bar = torch.get_rng_state(), dict(flux._progress_bar_config)
    report = warm(flux, WarmupPlan(resolutions=["32x32"], steps=1), progress=False)
    assert torch.equal(torch.get_rng_state(), generator)
    assert flux._progress_bar_config == bar
    assert report.complete and not bcg.in_warmup()
    assert capsys.readouterr().out == ""
    (entry,) = runners_of(flux)["transformer"].entries.values()
    assert entry.hits == 2, "timing does not count"


def test_a_second_warm_up_captures_nothing_and_says_the_same(flux: Any, caplog: pytest.LogCaptureFixture) -> None:
    plan = WarmupPlan(resolutions=["32x32"], steps=1)
    warm(flux, plan, progress=False)
    captures = count(flux, "captures")
    caplog.clear()
    report = warm(flux, plan, progress=False)
    assert report.complete and count(flux, "captures") == captures
    assert len(report.rows) == 1 and not caplog.records


def test_a_progress_bar_names_what_runs(flux: Any, capsys: pytest.CaptureFixture[str]) -> None:
    warm(flux, WarmupPlan(resolutions=["32x32"], steps=1), progress=True)
    assert "Warmed up" in capsys.readouterr().out


def test_text_is_found_for_every_length_it_can_have(load: Loader) -> None:
    builder = CallBuilder(load("qwen_image"))
    for length in (12, 17, 40):
        assert builder.counted_length(builder._text_of_length(length)) == length
    with pytest.raises(bcg.PlanError, match="no text of 1 tokens"):
        builder._text_of_length(1)


def test_steps_reach_both_sides_of_every_late_argument(load: Loader) -> None:
    builder = CallBuilder(load("lumina2"))
    assert builder.steps(WarmupRequest(steps=2)) == 2
    assert builder.steps(WarmupRequest(steps=2, arguments={"cfg_trunc_ratio": 0.1})) == 11
    assert builder.steps(WarmupRequest(steps=2, arguments={"cfg_trunc_ratio": 1.0})) == 2


def test_timing_leaves_the_random_numbers_of_other_threads_alone_and_works_in_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = bcg.wrap(torch.nn.Linear(4, 4).requires_grad_(False))
    assert runner.capture(torch.ones(2, 4))
    [entry] = runner.entries.values()
    drawn = []

    def elapsed_ms(entry: Any, call: Any) -> float:
        assert is_working()  # a wrapped module inside would otherwise wait for locks in the wrong order
        call()
        drawn.append(torch.rand(1).item())  # stands for a thread that serves
        return 1.0

    monkeypatch.setattr("bcg.pipelines._warm._elapsed_ms", elapsed_ms)
    assert _time(runner, entry) == (1.0, 1.0)
    assert torch.rand(1).item() not in drawn
