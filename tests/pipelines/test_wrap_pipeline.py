"""What people do to a pipeline still works on a wrapped one: moving, saving, converting, LoRA, offload, callbacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import bcg
from bcg.pipelines import from_pipe, runners_of, unwrap_pipeline, wrap_pipeline
from bcg.pipelines.tiny_registry import TINY

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")

PROMPT = "a red fox in the snow"
OTHER_PROMPT = "a fox red the in snow"  # as many tokens
QUICK = {"flux": {"max_sequence_length": 64}}  # nothing here depends on the 512 tokens of a usual prompt


class Checkpoint(NamedTuple):
    """A tiny checkpoint on disk, with two LoRA files beside it."""

    name: str
    folder: Path
    adapters: tuple[Path, Path]

    def load(self) -> Any:
        pipe = TINY[self.name].load(self.folder)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def draw(self, pipe: Any, prompt: str = PROMPT, dtype: torch.dtype = torch.float32, **more: Any) -> torch.Tensor:
        call = {**TINY[self.name].example_call(prompt=prompt, seed=1, dtype=dtype), **QUICK.get(self.name, {}), **more}
        return torch.as_tensor(pipe(**call, return_dict=False)[0])

    def warmed(self) -> Any:
        """A wrapped pipeline that is warm for one prompt length."""
        pipe = wrap_pipeline(self.load())
        with bcg.warmup():
            self.draw(pipe)
        return pipe


@pytest.fixture(scope="module", params=["flux", "qwen_image", "wan"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return _checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def wan22(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return _checkpoint("wan22", tmp_path_factory.mktemp("wan22"))


def _checkpoint(name: str, folder: Path) -> Checkpoint:
    TINY[name].build(folder)
    adapters = tuple(_save_lora(name, folder, seed) for seed in (1, 2))
    return Checkpoint(name, folder, (adapters[0], adapters[1]))


def _save_lora(name: str, folder: Path, seed: int) -> Path:
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipe = TINY[name].load(folder)
    torch.manual_seed(seed)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    pipe.transformer.add_adapter(config)
    path = folder / f"lora_{seed}"
    type(pipe).save_lora_weights(path, transformer_lora_layers=get_peft_model_state_dict(pipe.transformer))
    return path


def replays(pipe: Any, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """The result of a call, and whether graphs served all of it."""
    before = [runner.stats for runner in runners_of(pipe).values()]
    result = call()
    after = [runner.stats for runner in runners_of(pipe).values()]
    return result, all(
        now.replays - then.replays == now.calls - then.calls for then, now in zip(before, after, strict=True)
    )


# -- wrapping and unwrapping -------------------------------------------------------------------------------------------


def test_wrapping_returns_the_pipeline_and_unwrapping_gives_the_modules_back(checkpoint: Checkpoint) -> None:
    pipe = checkpoint.load()
    module = pipe.transformer
    assert wrap_pipeline(pipe) is pipe
    assert list(runners_of(pipe)) == ["transformer"]
    assert pipe.transformer is not module
    assert bcg.unwrap(pipe.transformer) is module
    assert unwrap_pipeline(pipe) is pipe
    assert pipe.transformer is module
    assert runners_of(pipe) == {}


def test_wrapping_changes_no_class(checkpoint: Checkpoint) -> None:
    pipe = checkpoint.load()
    kinds = [type(pipe), type(pipe.transformer), type(pipe.vae)]
    before = [dict(vars(kind)) for kind in kinds]
    wrap_pipeline(pipe, components=("transformer", "vae.decode", "text_encoder"))
    assert type(pipe) is kinds[0]
    assert [dict(vars(kind)) for kind in kinds] == before


def test_wrapping_again_takes_new_options_and_wraps_once(checkpoint: Checkpoint) -> None:
    pipe = wrap_pipeline(wrap_pipeline(checkpoint.load()), max_entries=3)
    runner = pipe.transformer
    assert runner._self_config.max_entries == 3
    assert type(bcg.unwrap(runner)) is runner.__class__


def test_named_components_alone_are_wrapped_and_unwrapped(checkpoint: Checkpoint) -> None:
    pipe = checkpoint.load()
    decoder = pipe.vae.decoder
    wrap_pipeline(pipe, components=("vae.decode", "text_encoder"))
    assert set(runners_of(pipe)) == {"vae.decode", "text_encoder"}
    assert bcg.unwrap(pipe.vae.decoder) is decoder
    unwrap_pipeline(pipe)
    assert pipe.vae.decoder is decoder
    assert runners_of(pipe) == {}


@pytest.mark.parametrize("name", ["transformer_9", "scheduler", "vae.encode", "unet.decode"])
def test_a_component_that_is_not_there_is_named_with_those_that_are(checkpoint: Checkpoint, name: str) -> None:
    pipe = checkpoint.load()
    with pytest.raises(bcg.ConfigError, match=rf"'{name}'.*transformer, .*vae\.decode"):
        wrap_pipeline(pipe, components=("transformer", name))
    assert runners_of(pipe) == {}, "nothing is wrapped where something is wrong"


def test_a_pipeline_without_a_denoiser_lists_what_it_has() -> None:
    class Upscaler:
        def __init__(self) -> None:
            self.components = {"enlarger": nn.Linear(2, 2), "scheduler": object()}
            self.enlarger = self.components["enlarger"]

    with pytest.raises(bcg.ConfigError, match=r"none of the denoisers transformer, .*unet.*it has enlarger"):
        wrap_pipeline(Upscaler())


def test_a_wrong_option_leaves_the_pipeline_as_it_was(checkpoint: Checkpoint) -> None:
    pipe = checkpoint.load()
    with pytest.raises(bcg.ConfigError, match="max_entris"):
        wrap_pipeline(pipe, max_entris=3)
    assert runners_of(pipe) == {}


def test_any_pipeline_with_a_unet_is_wrapped() -> None:
    class Painter:
        unet = nn.Linear(2, 2)

    assert list(runners_of(wrap_pipeline(Painter()))) == ["unet"]


def test_all_denoisers_of_a_pipeline_share_one_pool() -> None:
    class Ideogram4Pipeline:
        def __init__(self) -> None:
            self.transformer, self.unconditional_transformer = nn.Linear(2, 2), nn.Linear(2, 2)

    runners = runners_of(wrap_pipeline(Ideogram4Pipeline()))
    assert list(runners) == ["transformer", "unconditional_transformer"]
    assert len({id(runner.pool) for runner in runners.values()}) == 1


def test_a_missing_transformer_is_left_out(wan22: Checkpoint) -> None:
    pipe = wan22.load()
    pipe.transformer_2 = None
    assert list(runners_of(wrap_pipeline(pipe))) == ["transformer"]


# -- moving, saving, converting ----------------------------------------------------------------------------------------


def test_to_moves_the_weights_and_old_graphs_do_not_serve(checkpoint: Checkpoint) -> None:
    # Wan's ``to`` would cast what from_pretrained keeps in float32; both pipelines go the same way here.
    pipe, plain = checkpoint.warmed(), checkpoint.load()
    for each in (pipe, plain):
        each.to(torch.bfloat16)
    assert pipe.transformer.dtype == torch.bfloat16
    want = checkpoint.draw(plain, dtype=torch.bfloat16)
    got, replayed = replays(pipe, lambda: checkpoint.draw(pipe, dtype=torch.bfloat16))
    assert torch.equal(got, want) and not replayed
    with bcg.warmup():
        checkpoint.draw(pipe, dtype=torch.bfloat16)
    got, replayed = replays(pipe, lambda: checkpoint.draw(pipe, dtype=torch.bfloat16))
    assert torch.equal(got, want) and replayed


def test_save_and_load_give_the_same_pipeline(checkpoint: Checkpoint, tmp_path: Path) -> None:
    pipe = wrap_pipeline(checkpoint.load(), components=("transformer", "vae.decode", "text_encoder"))
    pipe.save_pretrained(tmp_path)
    index, original = (
        json.loads((folder / "model_index.json").read_text()) for folder in (tmp_path, checkpoint.folder)
    )
    assert {key: value for key, value in index.items() if key != "_name_or_path"} == original
    weights = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.safetensors")}
    assert weights == {
        path.relative_to(checkpoint.folder)
        for path in checkpoint.folder.rglob("*.safetensors")
        if not path.parent.name.startswith("lora")
    }
    again = type(pipe).from_pretrained(tmp_path)
    assert runners_of(again) == {}
    assert torch.equal(checkpoint.draw(again), checkpoint.draw(checkpoint.load()))


CONVERTED = {
    "flux": "FluxImg2ImgPipeline",
    "qwen_image": "QwenImageImg2ImgPipeline",
    "wan": "WanVideoToVideoPipeline",
}


def test_from_pipe_takes_the_runner_and_its_graphs_along(checkpoint: Checkpoint) -> None:
    pipe = checkpoint.warmed()
    kind = getattr(diffusers, CONVERTED[checkpoint.name])
    other = from_pipe(kind, pipe)
    assert type(other) is kind
    assert other.transformer is pipe.transformer
    back = from_pipe(type(pipe), other)
    back.set_progress_bar_config(disable=True)
    got, replayed = replays(back, lambda: checkpoint.draw(back, OTHER_PROMPT))
    assert replayed
    assert torch.equal(got, checkpoint.draw(checkpoint.load(), OTHER_PROMPT))


def test_from_pipe_of_an_unwrapped_pipeline_is_that_of_diffusers(checkpoint: Checkpoint) -> None:
    pipe = checkpoint.load()
    other = from_pipe(getattr(diffusers, CONVERTED[checkpoint.name]), pipe)
    assert other.transformer is pipe.transformer
    assert runners_of(other) == {}


def test_from_pipe_takes_both_transformers_along(wan22: Checkpoint) -> None:
    pipe = wrap_pipeline(wan22.load())
    other = from_pipe(diffusers.WanImageToVideoPipeline, pipe)
    assert runners_of(other).keys() == {"transformer", "transformer_2"}
    assert other.transformer_2 is pipe.transformer_2


def test_from_pipe_lets_the_caller_replace_a_component(wan22: Checkpoint) -> None:
    other = from_pipe(diffusers.WanImageToVideoPipeline, wrap_pipeline(wan22.load()), transformer_2=None)
    assert other.transformer_2 is None


def test_from_pipe_of_diffusers_still_leaves_a_runner_behind(wan22: Checkpoint) -> None:
    """Why `bcg.pipelines.from_pipe` is there; where this fails, diffusers has changed and it may go."""
    assert diffusers.WanImageToVideoPipeline.from_pipe(wrap_pipeline(wan22.load())).transformer is None


def test_a_runner_handed_to_from_pipe_of_diffusers_is_taken(checkpoint: Checkpoint) -> None:
    pipe = wrap_pipeline(checkpoint.load())
    kind = getattr(diffusers, CONVERTED[checkpoint.name])
    assert kind.from_pipe(pipe, transformer=pipe.transformer).transformer is pipe.transformer


def test_auto_pipelines_take_the_runner_along_by_themselves(tmp_path: Path) -> None:
    TINY["flux"].build(tmp_path)
    pipe = wrap_pipeline(TINY["flux"].load(tmp_path))
    other = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    assert type(other).__name__ == "FluxImg2ImgPipeline"
    assert other.transformer is pipe.transformer


# -- LoRA --------------------------------------------------------------------------------------------------------------

LORA: list[tuple[str, Callable[[Any, Checkpoint], Any]]] = [
    ("load", lambda pipe, at: pipe.load_lora_weights(at.adapters[0], adapter_name="one")),
    ("load another", lambda pipe, at: pipe.load_lora_weights(at.adapters[1], adapter_name="two")),
    ("two at once", lambda pipe, _: pipe.set_adapters(["one", "two"], [0.5, 0.7])),
    ("one of them", lambda pipe, _: pipe.set_adapters("two")),
    ("disable", lambda pipe, _: pipe.disable_lora()),
    ("enable", lambda pipe, _: pipe.enable_lora()),
    ("fuse", lambda pipe, _: pipe.fuse_lora()),
    ("unfuse", lambda pipe, _: pipe.unfuse_lora()),
    ("fuse safely", lambda pipe, _: pipe.fuse_lora(safe_fusing=True)),
    ("unfuse again", lambda pipe, _: pipe.unfuse_lora()),
    ("delete one", lambda pipe, _: pipe.delete_adapters("two")),
    ("unload", lambda pipe, _: pipe.unload_lora_weights()),
    ("load again", lambda pipe, at: pipe.load_lora_weights(at.adapters[0], adapter_name="one")),
]


def test_every_lora_method_has_its_effect_before_and_after_a_new_warm_up(checkpoint: Checkpoint) -> None:
    pipe, plain = checkpoint.warmed(), checkpoint.load()
    base = checkpoint.draw(plain)
    for name, change in LORA:
        for each in (pipe, plain):
            change(each, checkpoint)
        want = checkpoint.draw(plain)
        # Apart from the rounding of weights that were fused and put back.
        assert torch.allclose(want, base, atol=1e-4) == (name in {"disable", "unload"}), name
        assert torch.equal(checkpoint.draw(pipe), want), name
        with bcg.warmup():
            checkpoint.draw(pipe)
        got, replayed = replays(pipe, lambda: checkpoint.draw(pipe))
        assert torch.equal(got, want), name
        assert replayed, name
        assert pipe.get_list_adapters() == plain.get_list_adapters(), name


def test_adapters_that_were_warmed_are_switched_without_captures(checkpoint: Checkpoint) -> None:
    pipe, plain = wrap_pipeline(checkpoint.load()), checkpoint.load()
    for each in (pipe, plain):
        for name, path in zip(("one", "two"), checkpoint.adapters, strict=True):
            each.load_lora_weights(path, adapter_name=name)
    with bcg.warmup():
        for name in ("one", "two"):
            pipe.set_adapters(name)
            checkpoint.draw(pipe)
    for name in ("one", "two", "one"):
        for each in (pipe, plain):
            each.set_adapters(name)
        got, replayed = replays(pipe, lambda: checkpoint.draw(pipe, OTHER_PROMPT))
        assert replayed, name
        assert torch.equal(got, checkpoint.draw(plain, OTHER_PROMPT)), name


# -- offload, callbacks, interrupt -------------------------------------------------------------------------------------


def test_model_offload_makes_calls_run_eagerly_and_its_end_makes_them_replay(checkpoint: Checkpoint) -> None:
    pipe = checkpoint.warmed()
    want = checkpoint.draw(checkpoint.load())
    pipe.enable_model_cpu_offload(device="cpu")
    before = pipe.transformer.stats
    assert torch.equal(checkpoint.draw(pipe), want)
    now = pipe.transformer.stats
    assert now.refusals - before.refusals == now.calls - before.calls > 0
    assert "offload" in pipe.transformer.refusals[0]
    with bcg.warmup():
        assert torch.equal(checkpoint.draw(pipe), want)
    assert pipe.transformer.stats.captures == before.captures
    pipe.remove_all_hooks()
    with bcg.warmup():
        checkpoint.draw(pipe)
    got, replayed = replays(pipe, lambda: checkpoint.draw(pipe))
    assert torch.equal(got, want) and replayed


def test_a_callback_sees_and_may_change_the_latents(checkpoint: Checkpoint) -> None:
    def run(pipe: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        seen: list[torch.Tensor] = []

        def callback(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            seen.append(tensors["latents"].clone())
            return {"latents": tensors["latents"] * 0.5}

        return checkpoint.draw(pipe, callback_on_step_end=callback), seen

    pipe = checkpoint.warmed()
    want, expected = run(checkpoint.load())
    before = pipe.transformer.stats
    got, seen = run(pipe)
    assert pipe.transformer.stats.replays - before.replays == pipe.transformer.stats.calls - before.calls
    assert torch.equal(got, want)
    assert len(seen) == len(expected) == 2
    assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))


def test_latents_that_a_callback_keeps_are_not_overwritten_by_later_steps(checkpoint: Checkpoint) -> None:
    kept: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []

    def callback(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        kept.append(tensors["latents"])
        copies.append(tensors["latents"].clone())
        return {}

    checkpoint.draw(checkpoint.warmed(), callback_on_step_end=callback)
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))


def test_an_interrupt_stops_the_steps_and_the_next_call_is_whole(checkpoint: Checkpoint) -> None:
    def interrupt(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = True
        return {}

    pipe, plain = checkpoint.warmed(), checkpoint.load()
    assert torch.equal(
        checkpoint.draw(pipe, callback_on_step_end=interrupt), checkpoint.draw(plain, callback_on_step_end=interrupt)
    )
    got, replayed = replays(pipe, lambda: checkpoint.draw(pipe))
    assert replayed
    assert torch.equal(got, checkpoint.draw(plain))
