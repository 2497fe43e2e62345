"""The families' data agrees with diffusers: classes, inputs, lengths, sizes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from bcg.pipelines import Family, Request, family_of
from bcg.pipelines.families import BY_PIPELINE, FAMILIES, GENERIC
from bcg.pipelines.tiny_registry import TINY

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture(params=list(BY_NAME))
def family(request: pytest.FixtureRequest) -> Family:
    return BY_NAME[request.param]


def denoiser_parameters(pipeline: str) -> set[str]:
    """Parameters of all denoisers that a pipeline declares."""
    hints = getattr(diffusers, pipeline)._get_signature_types()
    kinds = {kind for name in GENERIC.denoisers for kind in hints.get(name, ()) if hasattr(kind, "forward")}
    assert kinds, f"{pipeline} declares no denoiser"
    return {parameter for kind in kinds for parameter in inspect.signature(kind.forward).parameters}


def test_no_name_and_no_pipeline_is_in_two_families() -> None:
    assert len(BY_NAME) == len(FAMILIES)
    assert len(BY_PIPELINE) == sum(len(family.pipelines) for family in FAMILIES)


def test_every_pipeline_is_there_in_diffusers(family: Family) -> None:
    assert [name for name in family.pipelines if not hasattr(diffusers, name)] == []


def test_inputs_are_parameters_of_the_denoiser(family: Family) -> None:
    assert family.text is not None
    for pipeline in family.pipelines:
        parameters = denoiser_parameters(pipeline)
        for stream in family.text.streams:
            mask = () if stream.mask is None else (stream.mask.partition(".")[0],)
            assert {*stream.names, *stream.joint_names, *mask} <= parameters, pipeline


def test_a_family_has_a_recipe_or_a_reason(family: Family) -> None:
    assert family.text is not None
    assert family.text.is_exact == (family.text_reason is None)
    assert family.text.is_exact or len(family.text.reason or "") > 20
    told_by_mask = all(stream.mask for stream in family.text.streams)
    assert not family.text.is_exact or told_by_mask or family.name == "Ernie-Image"


def test_a_length_varies_or_is_known(family: Family) -> None:
    assert family.text is not None
    assert family.text.varies == (family.text.default_length is None)


def test_fixed_lengths_are_those_of_the_pipelines(family: Family) -> None:
    assert family.text is not None
    default = inspect.signature(getattr(diffusers, family.pipelines[0]).__call__).parameters.get("max_sequence_length")
    if default is None or family.text.varies:
        pytest.skip("the pipeline takes no length, or pads to none")
    clip_tokens = 77 if family.name == "Stable Diffusion 3" else 0
    assert family.text.default_length == default.default + clip_tokens


def test_sizes_are_multiples_of_a_patch(family: Family) -> None:
    for request in family.default_requests:
        assert request.height % 16 == request.width % 16 == 0
        assert request.num_frames is None or request.num_frames > 1


def test_videos_have_frames_and_pictures_have_none(family: Family) -> None:
    takes_frames = "num_frames" in inspect.signature(getattr(diffusers, family.pipelines[0]).__call__).parameters
    for request in family.default_requests:
        assert (request.num_frames is not None) == takes_frames or family.name in {"Sana-Video"}


@pytest.mark.parametrize("name", list(TINY))
def test_every_tiny_pipeline_is_in_a_family_by_object_and_by_class(name: str) -> None:
    kind = getattr(diffusers, TINY[name].pipeline_class)
    assert TINY[name].pipeline_class in family_of(kind).pipelines
    assert family_of(object.__new__(kind)) is family_of(kind)


def test_a_subclass_is_in_the_family_of_its_base() -> None:
    class MyPipeline(diffusers.QwenImagePipeline):  # type: ignore[misc,name-defined]
        pass

    assert family_of(MyPipeline).name == "Qwen-Image"


def test_an_unknown_pipeline_is_generic_and_says_why_it_is_not_padded() -> None:
    class MyPipeline:
        pass

    assert family_of(MyPipeline()) is GENERIC
    assert "no exact way" in (GENERIC.text_reason or "")


def test_data_cannot_be_changed_by_accident() -> None:
    with pytest.raises(AttributeError):
        GENERIC.name = "other"  # type: ignore[misc]
    assert hash(Request(height=16, width=16)) == hash(Request(height=16, width=16))


def test_masks_have_dtypes_that_hold_zero_and_one() -> None:
    streams: list[Any] = [stream for family in FAMILIES if family.text for stream in family.text.streams]
    assert {stream.mask_dtype for stream in streams} <= {torch.bool, torch.int64}
