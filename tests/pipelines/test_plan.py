"""The warmup plan: what it means, where it comes from, and that every mistake in one is told."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bcg
from bcg.pipelines import WarmupPlan, WarmupRequest
from bcg.pipelines.plan import parse_resolution


def test_requests_are_every_combination_and_the_largest_is_first() -> None:
    plan = WarmupPlan(
        resolutions=["256x256", (512, 768)], batch_sizes=(1, 2), num_frames=(5, 9), guidance=(True, False)
    )
    requests = plan.expand()
    assert len(requests) == 2**4
    order = [request.size for request in requests]
    assert order == sorted(order, reverse=True)
    first = requests[0]
    assert (first.height, first.width, first.num_frames, first.batch_size, first.guidance) == (512, 768, 9, 2, True)


def test_longer_text_comes_first_among_equal_sizes() -> None:
    plan = WarmupPlan(resolutions=["64x64"], text_lengths=(10, 30, 20))
    assert [request.text_length for request in plan.expand()] == [30, 20, 10]


def test_the_same_request_is_run_once_but_on_is_not_a_scale_of_one() -> None:
    again = WarmupRequest(height=64, width=64, guidance=True)
    plan = WarmupPlan(resolutions=["64x64", "64x64"], guidance=(True, 1.0), requests=[again])
    assert [repr(request.guidance) for request in plan.expand()] in (["True", "1.0"], ["1.0", "True"])


def test_requests_of_their_own_are_added() -> None:
    plan = WarmupPlan(requests=[{"height": 64, "width": 32, "adapters": {"style": 0.5}}])
    assert plan.expand() == (WarmupRequest(height=64, width=32, adapters=(("style", 0.5),)),)
    assert WarmupPlan().expand() == ()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, None),
        ("style", (("style", 1.0),)),
        (["style", "ink"], (("style", 1.0), ("ink", 1.0))),
        ({"style": 0.5}, (("style", 0.5),)),
        ([["style", 0.5]], (("style", 0.5),)),
        ({}, ()),
    ],
)
def test_adapters_are_names_or_weights(given: Any, meant: Any) -> None:
    assert WarmupPlan(resolutions=["8x8"], adapters=[given]).adapters == (meant,)


FULL = WarmupPlan(
    resolutions=[(64, 32)],
    num_frames=(None, 5),
    batch_sizes=(1, 2),
    guidance=(True, 2.5, None),
    negative_prompts=(None, "blurry", 7),
    text_lengths=(None, 12),
    adapters=[None, {"style": 0.5}, {}],
    steps=4,
    arguments={"cfg_trunc_ratio": 0.5},
    requests=[WarmupRequest(height=8, width=8, adapters=(("ink", 1.0),), arguments={"skip": [1, 2]})],
)


def test_json_gives_the_plan_back(tmp_path: Path) -> None:
    FULL.save(tmp_path / "plan.json")
    assert WarmupPlan.load(tmp_path / "plan.json") == FULL
    assert WarmupPlan.load(tmp_path / "plan.json").expand() == FULL.expand()


def test_yaml_gives_the_plan_back(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(FULL.to_dict()))
    assert WarmupPlan.load(tmp_path / "plan.yaml") == FULL


def test_without_a_yaml_library_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = builtins.__import__

    def without_yaml(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return honest(name, *args, **kwargs)

    (tmp_path / "plan.yml").write_text("resolutions: [8x8]")
    monkeypatch.setattr(builtins, "__import__", without_yaml)
    with pytest.raises(bcg.PlanError, match="pip install pyyaml"):
        WarmupPlan.load(tmp_path / "plan.yml")


def test_what_is_not_said_is_not_written() -> None:
    assert WarmupPlan(resolutions=["64x32"]).to_dict() == {"resolutions": [[64, 32]]}
    json.dumps(FULL.to_dict())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"resolution": ["8x8"]}, "has no field resolution: it has resolutions"),
        ({"resolutions": "8x8"}, "give a list"),
        ({"resolutions": ["8"]}, "give height and width"),
        ({"resolutions": [[8, 8, 8]]}, "give height and width"),
        ({"resolutions": [[8, 0]]}, "width=0"),
        ({"batch_sizes": []}, "batch_sizes is empty"),
        ({"batch_sizes": [True]}, "batch_sizes=True"),
        ({"batch_sizes": [None]}, "batch_sizes=None"),
        ({"num_frames": [-1]}, "num_frames=-1"),
        ({"steps": 0}, "steps=0"),
        ({"guidance": ["yes"]}, "guidance: 'yes'"),
        ({"negative_prompts": [1.5]}, "negative_prompts: 1.5"),
        ({"adapters": [[["style", "much"]]]}, "adapters"),
        ({"arguments": ["cfg"]}, "arguments must be a mapping"),
        ({"requests": [{"hieght": 8}]}, "WarmupRequest has no field hieght"),
        ({"requests": [{"height": 0}]}, "height=0"),
        ({"requests": ["8x8"]}, "a request must be a mapping"),
    ],
)
def test_mistakes_are_told(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(bcg.PlanError, match=told):
        WarmupPlan.from_dict(fields)


@pytest.mark.parametrize(("name", "text"), [("plan.json", "{"), ("plan.yaml", "a: [")])
def test_a_broken_file_is_told_by_its_name(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(bcg.PlanError, match=name):
        WarmupPlan.load(tmp_path / name)


def test_a_file_that_holds_no_mapping_is_told(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[1]")
    with pytest.raises(bcg.PlanError, match="must be a mapping"):
        WarmupPlan.load(tmp_path / "plan.json")


def test_height_comes_first() -> None:
    assert parse_resolution("1024x768") == parse_resolution((1024, 768)) == (1024, 768)


def test_a_request_names_itself() -> None:
    request = WarmupRequest(
        height=64, width=32, num_frames=5, batch_size=2, guidance=2.5, negative_prompt=7, text_length=12, adapters=(),
        arguments={"mu": 1.0},
    )  # fmt: skip
    assert str(request) == (
        "64x32, 5 frames, batch 2, guidance 2.5, negative prompt of 7 tokens, 12 tokens, no adapters, mu=1.0"
    )
    assert str(WarmupRequest(guidance=False)) == "default size, guidance off"


class _Unknown:
    """A pipeline that no family knows."""

    default_sample_size = 16
    vae_scale_factor = 8

    def __call__(
        self, prompt: str, height: int | None = None, width: int = 64, true_cfg_scale: float = 4.0
    ) -> None: ...


def test_an_unknown_pipelines_plan_comes_from_its_own_numbers() -> None:
    plan = WarmupPlan.for_pipeline(_Unknown(), steps=2)
    assert plan.resolutions == ((128, 64),)
    assert plan.negative_prompts == (None, " "), "true guidance is on only with a negative prompt"
    assert plan.steps == 2


def test_a_known_pipelines_plan_is_what_its_models_were_published_for() -> None:
    class WanPipeline(SimpleNamespace):
        def __call__(self, prompt: str, height: int = 1, width: int = 1, num_frames: int = 1) -> None: ...

    plan = WarmupPlan.for_pipeline(WanPipeline())
    assert (480, 832) in plan.resolutions
    assert plan.num_frames == (81,)
    assert WarmupPlan.for_pipeline(WanPipeline(), resolutions=["16x16"]).resolutions == ((16, 16),)
