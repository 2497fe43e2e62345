"""After every operation of diffusers, peft, accelerate and torch that changes a model, the very next call is right.

Each test wraps a model, captures it, changes it while it is wrapped, and compares with eager bit for bit. Going back to
an earlier state finds its graph again wherever that graph is still valid.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.pipelines.tiny_registry import TINY

diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
attention_dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
transformer_flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
SCALE_ARGUMENT = {
    "flux": "joint_attention_kwargs",
    "stable_diffusion_3": "joint_attention_kwargs",
    "qwen_image": "attention_kwargs",
    "wan": "attention_kwargs",
}
FAMILIES = tuple(SCALE_ARGUMENT)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _same_backend() -> Iterator[None]:
    """Put back the process-wide attention backend, which `set_attention_backend` changes too."""
    registry = attention_dispatch._AttentionBackendRegistry
    before = registry._active_backend
    yield
    registry._active_backend = before


# -- one transformer ---------------------------------------------------------------------------------------------------


def tiny_flux() -> Any:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return model.eval().requires_grad_(False)


def inputs(model: Any, seed: int, **more: Any) -> dict[str, Any]:
    """Arguments of one call, in the dtype and on the device of the model."""
    made = torch.Generator().manual_seed(seed)
    device, dtype = model.device, model.dtype
    tensors = {
        "hidden_states": torch.randn(1, 12, 16, generator=made),
        "pooled_projections": torch.randn(1, 32, generator=made),
        "encoder_hidden_states": torch.randn(1, 8, 32, generator=made),
        "timestep": torch.rand(1, generator=made),
        "txt_ids": torch.zeros(8, 3),
        "img_ids": torch.zeros(12, 3),
    }
    given = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    return {**given, "return_dict": False, **more}


class Serving:
    """A wrapped model with one signature captured, and the same module to compare with."""

    def __init__(self, **more: Any) -> None:
        self.model = tiny_flux()
        self.runner: Any = bcg.wrap(self.model)
        self.more = more
        self._seeds = itertools.count(1)
        assert self.warm_up() == "capture"
        assert self.next() == "replay"

    def next(self) -> str:
        """Serve a call with new inputs, compare it with eager, and say how it was served."""
        call = inputs(self.model, next(self._seeds), **self._arguments())
        before = self.runner.stats
        got = self.runner(**call)[0]
        after = self.runner.stats
        want = self.model(**{**call, **self._arguments()})[0]
        assert torch.equal(got, want), "not what eager gives"
        how = {"replay": "replays", "capture": "capture_calls", "eager": "eager_calls"}
        [kind] = [kind for kind, name in how.items() if getattr(after, name) > getattr(before, name)]
        return kind

    def warm_up(self) -> str:
        with bcg.warmup():
            return self.next()

    def result(self) -> Tensor:
        """What the model gives, eagerly, for inputs that are always the same."""
        result: Tensor = self.model(**inputs(self.model, 0, **self._arguments()))[0]
        return result

    def _arguments(self) -> dict[str, Any]:
        return {name: value() for name, value in self.more.items()}


Change = Callable[[Any], Callable[[], Any] | None]


@dataclass(frozen=True)
class Case:
    """An operation and what is expected of it.

    Attributes:
        change: Does it to a wrapped model; returns what undoes it, where there is something.
        next: How the very next call is served.
        numbers: Whether the model computes other numbers afterwards.
        back: How the call after undoing it is served.
        again: How the call after doing it once more is served.
        captured: How a call in a warmup window is served after it.
    """

    change: Change
    next: str = "eager"
    numbers: bool = True
    back: str = "replay"
    again: str = "replay"
    captured: str = "capture"


def add_adapter(runner: Any, name: str = "one", seed: int = 3, rank: int = 2) -> None:
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, init_lora_weights=False)
    runner.add_adapter(config, adapter_name=name)


class ScaledProcessor(transformer_flux.FluxAttnProcessor):  # type: ignore[misc, name-defined]
    """The default one with another result."""

    scale = 0.5

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        return tuple(part * self.scale for part in result) if isinstance(result, tuple) else result * self.scale


def set_processor(runner: Any) -> Callable[[], Any]:
    old = dict(runner.attn_processors)
    runner.set_attn_processor(ScaledProcessor())
    return lambda: runner.set_attn_processor(dict(old))


def set_one_processor(runner: Any) -> Callable[[], Any]:
    attention = runner.transformer_blocks[1].attn
    old = attention.processor
    attention.set_processor(ScaledProcessor())
    return lambda: attention.set_processor(old)


def set_backend(runner: Any) -> Callable[[], Any]:
    active = attention_dispatch._AttentionBackendRegistry._active_backend

    def undo() -> None:
        runner.reset_attention_backend()
        attention_dispatch._AttentionBackendRegistry._active_backend = active

    runner.set_attention_backend("_native_math")
    return undo


def set_backend_of_another_model(runner: Any) -> Callable[[], Any]:
    return set_backend(tiny_flux())


def fuse_projections(runner: Any) -> Callable[[], Any]:
    runner.fuse_qkv_projections()
    return runner.unfuse_qkv_projections  # type: ignore[no-any-return]


def load_other_weights(runner: Any) -> Callable[[], Any]:
    before = {name: tensor.clone() for name, tensor in runner.state_dict().items()}
    runner.load_state_dict({name: tensor * 1.25 for name, tensor in before.items()})
    return lambda: runner.load_state_dict(before)


def assign_other_weights(runner: Any) -> Callable[[], Any]:
    before = dict(runner.state_dict())
    runner.load_state_dict({name: tensor * 1.25 for name, tensor in before.items()}, assign=True)
    return lambda: runner.load_state_dict(before, assign=True)


def replace_data(runner: Any) -> Callable[[], Any]:
    weight = runner.transformer_blocks[0].attn.to_q.weight
    old = weight.data
    weight.data = old * 2
    return lambda: setattr(weight, "data", old)


def replace_parameter(runner: Any) -> Callable[[], Any]:
    linear = runner.single_transformer_blocks[0].proj_out
    old = linear.weight
    linear.weight = nn.Parameter(old * 2, requires_grad=False)
    return lambda: setattr(linear, "weight", old)


def write_data(runner: Any) -> Callable[[], Any]:
    weight = runner.proj_out.weight
    weight.data.mul_(2)
    return lambda: weight.data.div_(2)


def to_bfloat16(runner: Any) -> Callable[[], Any]:
    runner.to(torch.bfloat16)
    return lambda: runner.to(torch.float32)


def add_hook(runner: Any) -> Callable[[], Any]:
    handle = runner.transformer_blocks[0].ff.register_forward_hook(lambda module, args, output: output * 2)
    return handle.remove  # type: ignore[no-any-return]


def add_hook_to_the_root(runner: Any) -> Callable[[], Any]:
    handle = runner.register_forward_hook(lambda module, args, output: (output[0] * 2,))
    return handle.remove  # type: ignore[no-any-return]


def add_pre_hook(runner: Any) -> Callable[[], Any]:
    handle = runner.proj_out.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return handle.remove  # type: ignore[no-any-return]


def add_global_hook(runner: Any) -> Callable[[], Any]:
    def double(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2 if type(module) is nn.GELU else None

    handle = nn.modules.module.register_module_forward_hook(double)
    return handle.remove  # type: ignore[no-any-return]


def override_forward(runner: Any) -> Callable[[], Any]:
    block = runner.transformer_blocks[1].ff
    old = block.forward
    block.forward = lambda *args, **kwargs: old(*args, **kwargs) * 2
    return lambda: delattr(block, "forward")


def replace_submodule(runner: Any) -> Callable[[], Any]:
    blocks = runner.transformer_blocks
    old = blocks[0]
    blocks[0] = blocks[1]
    return lambda: blocks.__setitem__(0, old)


def drop_a_block(runner: Any) -> Callable[[], Any]:
    blocks = runner.single_transformer_blocks
    dropped = blocks.pop(1)
    return lambda: blocks.append(dropped)


def skip_layers(runner: Any) -> Callable[[], Any]:
    from diffusers.hooks import HookRegistry
    from diffusers.hooks.layer_skip import LayerSkipConfig, _apply_layer_skip_hook

    _apply_layer_skip_hook(runner, LayerSkipConfig(indices=[1], fqn="transformer_blocks"), name="skip")
    registry = HookRegistry.check_if_exists_or_initialize(runner)
    return lambda: registry.remove_hook("skip", recurse=True)


def compile_a_block(runner: Any) -> Callable[[], Any]:
    block = runner.transformer_blocks[0]
    block.compile(backend="eager")

    def undo() -> None:
        block._compiled_call_impl = None

    return undo


def change_config(runner: Any) -> Callable[[], Any]:
    before = runner.config.guidance_embeds
    runner.register_to_config(guidance_embeds="not read")
    return lambda: runner.register_to_config(guidance_embeds=before)


def checkpointing(runner: Any) -> Callable[[], Any]:
    runner.enable_gradient_checkpointing()
    return runner.disable_gradient_checkpointing  # type: ignore[no-any-return]


def parallel_config(runner: Any) -> Callable[[], Any]:
    """Do to the model what `enable_parallelism` does before it puts hooks on, without ranks."""
    config = diffusers.ParallelConfig()
    runner._parallel_config = config

    def undo() -> None:
        runner._parallel_config = None

    return undo


CASES: dict[str, Case] = {
    "set_attn_processor": Case(set_processor),
    "a processor of one block": Case(set_one_processor),
    "set_attention_backend": Case(set_backend),
    "set_attention_backend of another model": Case(set_backend_of_another_model),
    "fuse_qkv_projections": Case(fuse_projections, numbers=False, back="eager", again="eager"),
    "load_state_dict": Case(load_other_weights, next="replay", captured="replay"),
    "load_state_dict(assign=True)": Case(assign_other_weights, again="eager"),
    "replaced .data": Case(replace_data, again="eager"),
    "written .data": Case(write_data, next="replay", captured="replay"),
    "replaced parameter": Case(replace_parameter, again="eager"),
    ".to(dtype)": Case(to_bfloat16, back="eager", again="eager"),
    "forward hook": Case(add_hook),
    "forward hook on the model": Case(add_hook_to_the_root),
    "forward pre-hook": Case(add_pre_hook),
    "global forward hook": Case(add_global_hook),
    "forward override": Case(override_forward),
    "replaced submodule": Case(replace_submodule),
    "dropped block": Case(drop_a_block),
    "layer-skip hook": Case(skip_layers),
    "compiled submodule": Case(compile_a_block, numbers=False, again="eager"),
    "config value": Case(change_config, numbers=False),
    "gradient checkpointing": Case(checkpointing, numbers=False, back="eager"),
    "parallel config": Case(parallel_config, numbers=False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_very_next_call_is_right_and_the_way_back_finds_the_old_graph(name: str) -> None:
    case, serving = CASES[name], Serving()
    before = serving.result()
    undo = case.change(serving.runner)
    try:
        assert serving.next() == case.next
        assert serving.warm_up() == case.captured
        assert serving.next() == "replay"
        assert torch.equal(serving.result(), before) != case.numbers
    finally:
        if undo is not None:
            undo()
    assert serving.next() == case.back
    undo = case.change(serving.runner)
    try:
        assert serving.next() == case.again
    finally:
        if undo is not None:
            undo()
    assert serving.next() == case.back


def test_the_attention_backend_of_a_with_block_counts_inside_of_it_alone() -> None:
    serving = Serving()
    for expected in ("eager", "eager"):
        with attention_dispatch.attention_backend("_native_math"):
            assert serving.next() == expected
        assert serving.next() == "replay"
    with attention_dispatch.attention_backend("_native_math"):
        assert serving.warm_up() == "capture"
        assert serving.next() == "replay"
    assert serving.next() == "replay"


def test_a_lora_scale_of_one_call_is_its_own_graph() -> None:
    scale = [1.0]
    serving = Serving(joint_attention_kwargs=lambda: {"scale": scale[0]})
    add_adapter(serving.runner)
    results = []
    for value in (1.0, 0.25):
        scale[0] = value
        assert serving.next() == "eager"
        assert serving.warm_up() == "capture"
        results.append(serving.result())
    assert not torch.equal(*results)
    for value in (1.0, 0.25, 1.0):
        scale[0] = value
        assert serving.next() == "replay"


def test_a_model_on_meta_runs_eagerly_and_is_captured_anew_when_it_is_back() -> None:
    serving = Serving()
    weights = {name: tensor.clone() for name, tensor in serving.model.state_dict().items()}
    serving.runner.to("meta")
    call = inputs(serving.model, 1)
    with bcg.warmup():
        assert serving.runner(**call)[0].is_meta
    assert serving.runner.stats.captures == 1
    serving.runner.to_empty(device="cpu")
    serving.runner.load_state_dict(weights)
    assert serving.next() == "eager"
    assert serving.warm_up() == "capture"
    assert serving.next() == "replay"


def test_a_model_moved_to_its_own_device_keeps_its_graphs() -> None:
    serving = Serving()
    serving.runner.to("cpu").to(torch.float32).eval()
    assert serving.next() == "replay"


def test_an_adapter_that_fails_to_load_leaves_the_next_call_right() -> None:
    serving = Serving()
    add_adapter(serving.runner)
    assert serving.warm_up() == "capture"
    with pytest.raises(Exception, match=r"size mismatch|shape"):
        serving.runner.load_lora_adapter(
            {
                "transformer.transformer_blocks.0.attn.to_q.lora_A.weight": torch.ones(2, 5),
                "transformer.transformer_blocks.0.attn.to_q.lora_B.weight": torch.ones(7, 2),
            },
            prefix="transformer",
            adapter_name="broken",
        )
    serving.next()
    serving.warm_up()
    assert serving.next() == "replay"


def test_parallelism_enabled_after_a_capture_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange is a stand-in of torch that leaves results undefined, so only how the call was served counts."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    serving = Serving()
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    try:
        monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cpu"))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
        before = serving.runner.stats
        serving.runner.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2))
        serving.runner(**inputs(serving.model, 1))
        assert serving.runner.stats.replays == before.replays
        assert serving.runner.stats.misses == before.misses + 1
        assert "_parallel_config" in serving.runner.explain(**inputs(serving.model, 1))
    finally:
        torch.distributed.destroy_process_group()


# -- whole pipelines ---------------------------------------------------------------------------------------------------


class Drawing:
    """A tiny pipeline with its denoiser wrapped, and the same pipeline without the runner to compare with."""

    def __init__(self, name: str, folder: Path, **call: Any) -> None:
        self.tiny = TINY[name]
        self.pipe = self.tiny.load(folder)
        self.pipe.set_progress_bar_config(disable=True)
        self.model = self.pipe.transformer.requires_grad_(False)
        self.runner: Any = bcg.wrap(self.model)
        self.pipe.transformer = self.runner
        self.call = call
        self._seeds = itertools.count(1)

    def draw(self, seed: int, **more: Any) -> Tensor:
        call = {**self.tiny.example_call(prompt="a red fox", seed=seed), **self.call, **more}
        return torch.as_tensor(self.pipe(**call, return_dict=False)[0])

    def draw_unwrapped(self, seed: int, **more: Any) -> Tensor:
        self.pipe.transformer = self.model
        try:
            return self.draw(seed, **more)
        finally:
            self.pipe.transformer = self.runner

    def next(self, **more: Any) -> str:
        """Draw from a new seed, compare with the unwrapped pipeline, and say how all calls were served."""
        seed, before = next(self._seeds), self.runner.stats
        got = self.draw(seed, **more)
        after = self.runner.stats
        assert torch.equal(got, self.draw_unwrapped(seed, **more)), "not what the unwrapped pipeline draws"
        calls = after.calls - before.calls
        assert calls >= 2
        if after.replays - before.replays == calls:
            return "replay"
        return "eager" if after.eager_calls - before.eager_calls == calls else "mixed"

    def warm_up(self, **more: Any) -> None:
        with bcg.warmup():
            self.next(**more)
        assert self.next(**more) == "replay"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a tiny checkpoint once."""
    folders: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            TINY[name].build(folders[name])
        return folders[name]

    return folder_of


def save_lora(drawing: Drawing, path: Path, seed: int, rank: int = 2) -> Path:
    """Write a LoRA as the pipeline's own training scripts do, as safetensors."""
    donor = drawing.tiny.load(Path(drawing.pipe.config._name_or_path))
    add_adapter(donor.transformer, "default", seed=seed, rank=rank)
    layers = peft.utils.get_peft_model_state_dict(donor.transformer)
    type(donor).save_lora_weights(path, transformer_lora_layers=layers)
    assert [file.suffix for file in path.iterdir()] == [".safetensors"]
    return path


@pytest.fixture(params=FAMILIES)
def drawing(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Drawing:
    drawing = Drawing(request.param, folder_of(request.param))
    drawing.warm_up()
    return drawing


def test_loras_loaded_switched_scaled_disabled_and_unloaded(drawing: Drawing, tmp_path: Path) -> None:
    pipe = drawing.pipe
    base = drawing.draw_unwrapped(0)
    pipe.load_lora_weights(save_lora(drawing, tmp_path / "a", 1), adapter_name="a")
    assert drawing.next() == "eager"
    assert not torch.equal(drawing.draw_unwrapped(0), base), "the LoRA changes the image"
    drawing.warm_up()
    pipe.load_lora_weights(save_lora(drawing, tmp_path / "b", 2), adapter_name="b")
    images = {}
    for adapters, weights in ((["a"], [1.0]), (["b"], [1.0]), (["a", "b"], [0.5, 0.25])):
        pipe.set_adapters(adapters, weights)
        assert drawing.next() == "eager"
        drawing.warm_up()
        images[tuple(adapters), tuple(weights)] = drawing.draw_unwrapped(0)
    assert not any(torch.equal(*pair) for pair in itertools.combinations(images.values(), 2))
    for (adapters, weights), image in images.items():
        pipe.set_adapters(list(adapters), list(weights))
        assert drawing.next() == "replay", "whatever scale the adapter that is off was left with"
        assert torch.equal(drawing.draw(0), image)
    pipe.disable_lora()
    assert drawing.next() == "eager"
    assert torch.equal(drawing.draw(0), base)
    pipe.enable_lora()
    assert drawing.next() == "replay"
    pipe.unload_lora_weights()
    drawing.next()
    assert torch.equal(drawing.draw(0), base)


def test_after_unloading_a_lora_the_graphs_from_before_it_serve_again(drawing: Drawing, tmp_path: Path) -> None:
    drawing.pipe.load_lora_weights(save_lora(drawing, tmp_path, 1), adapter_name="a")
    assert drawing.next() == "eager"
    drawing.pipe.unload_lora_weights()
    assert drawing.next() == "replay"


def test_a_lora_scale_given_to_the_pipeline_counts_for_that_call_alone(drawing: Drawing, tmp_path: Path) -> None:
    drawing.pipe.load_lora_weights(save_lora(drawing, tmp_path, 1))
    drawing.warm_up()
    scaled = {SCALE_ARGUMENT[drawing.tiny.name]: {"scale": 0.25}}
    assert not torch.equal(drawing.draw_unwrapped(0), drawing.draw_unwrapped(0, **scaled))
    assert drawing.next(**scaled) == "eager"
    assert drawing.next() == "replay"
    drawing.warm_up(**scaled)
    assert drawing.next() == "replay"


@pytest.mark.parametrize("safe", [False, True], ids=["plain", "safe"])
def test_a_fused_lora_and_the_way_back(drawing: Drawing, tmp_path: Path, safe: bool) -> None:
    pipe = drawing.pipe
    pipe.load_lora_weights(save_lora(drawing, tmp_path, 1))
    drawing.warm_up()
    pipe.fuse_lora(safe_fusing=safe)
    assert drawing.next() == "eager"
    drawing.warm_up()
    pipe.unfuse_lora()
    drawing.next()
    drawing.warm_up()
    pipe.fuse_lora(safe_fusing=safe)
    assert drawing.next() == ("eager" if safe else "replay"), "a safe fusion puts the weights somewhere else"
    pipe.unfuse_lora()
    pipe.fuse_lora(lora_scale=0.5, safe_fusing=safe)
    drawing.next()


def test_a_hotswapped_lora_is_served_by_the_same_graphs(drawing: Drawing, tmp_path: Path) -> None:
    pipe = drawing.pipe
    if not hasattr(pipe, "enable_lora_hotswap"):
        pytest.skip("this pipeline has no hotswap")
    pipe.enable_lora_hotswap(target_rank=4)
    pipe.load_lora_weights(save_lora(drawing, tmp_path / "a", 1, rank=2), adapter_name="default")
    drawing.warm_up()
    first = drawing.draw_unwrapped(0)
    pipe.load_lora_weights(save_lora(drawing, tmp_path / "b", 2, rank=4), adapter_name="default", hotswap=True)
    assert drawing.next() == "replay"
    assert not torch.equal(drawing.draw_unwrapped(0), first), "the LoRA was swapped"


# -- IP-Adapters -------------------------------------------------------------------------------------------------------


def test_an_ip_adapter_loaded_and_scaled(folder_of: Callable[[str], Path]) -> None:
    drawing = Drawing("flux", folder_of("flux"))
    drawing.warm_up()
    pipe, width = drawing.pipe, drawing.model.inner_dim
    text_width = drawing.model.config.joint_attention_dim
    made = torch.Generator().manual_seed(4)
    projections = {"to_k_ip": (width, text_width), "to_v_ip": (width, text_width)}
    weights = {
        f"{block}.{name}.weight": torch.randn(shape, generator=made)
        for block in range(len(drawing.model.transformer_blocks))
        for name, shape in projections.items()
    }
    biases = {name.replace("weight", "bias"): torch.zeros(width) for name in weights}
    image = {
        "proj.weight": torch.randn(4 * text_width, 6, generator=made),
        "proj.bias": torch.zeros(4 * text_width),
        "norm.weight": torch.ones(text_width),
        "norm.bias": torch.zeros(text_width),
    }
    pipe.load_ip_adapter(
        {"image_proj": image, "ip_adapter": {**weights, **biases}},
        weight_name="",
        image_encoder_pretrained_model_name_or_path=None,
    )
    embeds = {"ip_adapter_image_embeds": [torch.randn(1, 1, 6, generator=made)]}
    embeds["negative_ip_adapter_image_embeds"] = embeds["ip_adapter_image_embeds"]
    images = []
    for scale in (1.0, 0.5):
        pipe.set_ip_adapter_scale(scale)
        assert drawing.next(**embeds) == "eager"
        drawing.warm_up(**embeds)
        images.append(drawing.draw_unwrapped(0, **embeds))
    assert not torch.equal(*images)
    for scale in (1.0, 0.5, 1.0):
        pipe.set_ip_adapter_scale(scale)
        assert drawing.next(**embeds) == "replay"
    pipe.set_ip_adapter_scale([0.0, 1.0][: len(drawing.model.transformer_blocks)])
    assert drawing.next(**embeds) == "eager"


# -- what is refused ---------------------------------------------------------------------------------------------------


STEPS = 6


def step_callback(drawing: Drawing) -> Callable[[], float]:
    """Some caches ask in which timestep the pipeline is."""
    return lambda: float(drawing.pipe._current_timestep)


CACHES: dict[str, Callable[[Drawing], Any]] = {
    "FirstBlockCache": lambda drawing: diffusers.FirstBlockCacheConfig(threshold=0.5),
    "PyramidAttentionBroadcast": lambda drawing: diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=step_callback(drawing)
    ),
    "FasterCache": lambda drawing: diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        tensor_format="BCHW",
        is_guidance_distilled=True,
        current_timestep_callback=step_callback(drawing),
    ),
    "MagCache": lambda drawing: diffusers.MagCacheConfig(
        num_inference_steps=STEPS, mag_ratios=torch.ones(STEPS), threshold=0.5, retention_ratio=0.1
    ),
    "TaylorSeer": lambda drawing: diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=2),
    "SeaCache": lambda drawing: diffusers.SeaCacheConfig(),
}
# Computes every step where the pipeline does not tell it the step, as this one does not.
NEVER_SKIPS = {"SeaCache"}


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "run eagerly" in record.getMessage()]


@pytest.mark.parametrize("name", CACHES)
def test_a_step_cache_draws_over_all_steps_what_it_draws_unwrapped(
    name: str, folder_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """No warm-up forward may advance the cache's counters, neither when it is met in a window nor when it is served."""
    steps = {"num_inference_steps": STEPS, "true_cfg_scale": 1.0}
    drawing = Drawing("flux", folder_of("flux"))
    plain = drawing.draw_unwrapped(1, **steps)
    with bcg.warmup():
        drawing.draw(0, **steps)
    twin = Drawing("flux", folder_of("flux"))
    for each in (drawing, twin):
        each.runner.enable_cache(CACHES[name](each))
    captures = drawing.runner.stats.captures
    with caplog.at_level(logging.WARNING, "bcg"):
        for window in (True, False, True):
            want = twin.draw_unwrapped(1, **steps)
            if window:
                with bcg.warmup():
                    assert torch.equal(drawing.draw(1, **steps), want)
            else:
                assert torch.equal(drawing.draw(1, **steps), want)
    assert torch.equal(want, plain) == (name in NEVER_SKIPS), "the cache skips something"
    assert drawing.runner.stats.captures == captures
    [reason] = reasons(caplog)
    assert "disable_cache()" in reason
    drawing.runner.disable_cache()
    before = drawing.runner.stats.replays
    assert torch.equal(drawing.draw(1, **steps), plain)
    assert drawing.runner.stats.replays == before + STEPS


def layerwise_casting(drawing: Drawing) -> None:
    drawing.runner.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


def group_offload(drawing: Drawing) -> None:
    cpu = torch.device("cpu")
    drawing.runner.enable_group_offload(cpu, cpu, offload_type="leaf_level")


def block_offload(drawing: Drawing) -> None:
    cpu = torch.device("cpu")
    drawing.runner.enable_group_offload(cpu, cpu, offload_type="block_level", num_blocks_per_group=1)


def model_offload(drawing: Drawing) -> None:
    """What `enable_model_cpu_offload` does to a component, which itself refuses a machine without an accelerator."""
    from accelerate import cpu_offload_with_hook

    cpu_offload_with_hook(drawing.pipe.transformer, torch.device("cpu"))


def sequential_offload(drawing: Drawing) -> None:
    """What `enable_sequential_cpu_offload` does to a component, likewise."""
    from accelerate import cpu_offload

    cpu_offload(drawing.pipe.transformer, torch.device("cpu"))


REFUSED = [layerwise_casting, group_offload, block_offload, model_offload, sequential_offload]


@pytest.mark.parametrize("enable", REFUSED, ids=lambda enable: enable.__name__)
def test_a_module_whose_weights_move_runs_eagerly_in_a_window_and_while_serving(
    enable: Callable[[Drawing], None], folder_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    drawing = Drawing("flux", folder_of("flux"))
    drawing.warm_up()
    enable(drawing)
    twin = Drawing("flux", folder_of("flux"))
    enable(twin)
    forwards: list[int] = []
    drawing.model.time_text_embed.register_forward_hook(lambda *args: forwards.append(1))
    before = drawing.runner.stats
    with caplog.at_level(logging.WARNING, "bcg"):
        with bcg.warmup():
            assert torch.equal(drawing.draw(1), twin.draw_unwrapped(1))
        assert torch.equal(drawing.draw(2), twin.draw_unwrapped(2))
    after = drawing.runner.stats
    calls = after.calls - before.calls
    assert (after.eager_calls - before.eager_calls, after.captures - before.captures) == (calls, 0)
    assert len(forwards) == calls, "no forward but the calls themselves"
    assert len(reasons(caplog)) == 1


def test_group_offload_is_left_again(folder_of: Callable[[str], Path]) -> None:
    from diffusers.hooks import HookRegistry

    drawing = Drawing("flux", folder_of("flux"))
    drawing.warm_up()
    group_offload(drawing)
    assert drawing.next() == "eager"
    for module in drawing.model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        if isinstance(registry, HookRegistry):
            for name in list(registry.hooks):
                registry.remove_hook(name, recurse=False)
    drawing.next()
    drawing.warm_up()


# -- guiders -----------------------------------------------------------------------------------------------------------


def test_a_guider_that_skips_layers_around_one_call_of_each_step() -> None:
    """The three calls of a step have one signature; only the hooks tell the third."""
    serving = Serving()
    guider = diffusers.SkipLayerGuidance(
        skip_layer_guidance_start=0.0,
        skip_layer_guidance_stop=1.0,
        skip_layer_config=diffusers.LayerSkipConfig(indices=[0], fqn="transformer_blocks"),
    )

    def step(number: int, serve: Callable[[], str]) -> list[str]:
        guider.set_state(number, 10, torch.tensor(500))
        served = []
        for _ in range(3):
            guider.prepare_models(serving.runner)
            served.append(serve())
            guider.cleanup_models(serving.runner)
        return served

    assert step(3, serving.next) == ["replay", "replay", "eager"]
    with bcg.warmup():
        assert step(4, serving.next) == ["replay", "replay", "capture"]
    for number in (5, 6):
        assert step(number, serving.next) == ["replay"] * 3
