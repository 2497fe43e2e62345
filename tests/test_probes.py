"""Tests of what bcg knows of diffusers, peft and accelerate, on their real objects."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bcg import probes
from bcg.module_state import ModuleState, StateKey, describe_difference

diffusers = pytest.importorskip("diffusers")
accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
attention_dispatch = pytest.importorskip("diffusers.models.attention_dispatch")

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]


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


def tiny_z_image() -> Any:
    return diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    ).eval()


def call(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output = model(
            hidden_states=torch.randn(1, 12, 16),
            timestep=torch.tensor([0.5]),
            pooled_projections=torch.randn(1, 32),
            encoder_hidden_states=torch.randn(1, 7, 32),
            txt_ids=torch.zeros(7, 3),
            img_ids=torch.zeros(12, 3),
            joint_attention_kwargs={},
            return_dict=False,
        )
    return output[0]  # type: ignore[no-any-return]


def add_lora(model: Any, name: str, rank: int = 2) -> None:
    model.add_adapter(
        peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=ATTENTION, init_lora_weights=False), adapter_name=name
    )


def lora_state(model: Any, name: str) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(model, adapter_name=name)
    return {f"transformer.{key}": tensor.clone() for key, tensor in state.items()}


@pytest.fixture
def model() -> Any:
    return tiny_flux()


@pytest.fixture
def state(model: Any) -> ModuleState:
    return ModuleState(model)


@pytest.fixture(autouse=True)
def same_backend() -> Iterator[None]:
    registry = attention_dispatch._AttentionBackendRegistry
    before = registry._active_backend
    yield
    registry._active_backend = before


# --- keys -------------------------------------------------------------------------------------------------------------


def test_calls_do_not_change_the_key(model: Any, state: ModuleState) -> None:
    before = state.key()
    for _ in range(2):
        call(model)
        assert state.key() is before


def test_z_image_caches_its_frequencies_in_a_list_of_tensors() -> None:
    model = tiny_z_image()
    state = ModuleState(model)
    before = state.key()
    model.rope_embedder(torch.zeros(4, 3, dtype=torch.int32))
    filled = state.key()
    assert filled != before
    model.rope_embedder(torch.zeros(4, 3, dtype=torch.int32))
    assert state.key() is filled
    model.rope_embedder.freqs_cis[0] = model.rope_embedder.freqs_cis[0].clone()
    assert any("moved in memory" in line for line in describe_difference(filled, state.key()))


def test_cache_context_without_hooks_does_not_change_the_key(model: Any, state: ModuleState) -> None:
    before = state.key()
    with model.cache_context("cond"):
        assert state.key() is before
    assert state.key() is before


def test_adapters_switched_back_and_forth_find_their_keys(model: Any, state: ModuleState) -> None:
    base = state.key()
    add_lora(model, "a")
    add_lora(model, "b")
    seen: dict[str, StateKey] = {}
    for name in ("a", "b", "a", "b"):
        model.set_adapters([name])
        assert seen.setdefault(name, state.key()) is state.key()
    assert len({base, *seen.values()}) == 3


def test_adapter_weights_and_disabling_are_in_the_key(model: Any, state: ModuleState) -> None:
    add_lora(model, "default")
    model.set_adapters(["default"], weights=[1.0])
    whole = state.key()
    model.set_adapters(["default"], weights=[0.5])
    half = state.key()
    assert "transformer_blocks.0.attn.to_q.scaling['default']: expected 1.0, got 0.5" in describe_difference(
        whole, half
    )
    model.disable_adapters()
    disabled = state.key()
    assert len({whole, half, disabled}) == 3
    model.enable_adapters()
    assert state.key() is half
    model.set_adapters(["default"], weights=[1.0])
    assert state.key() is whole


def test_the_scale_of_one_call_is_gone_after_it(model: Any, state: ModuleState) -> None:
    from diffusers.utils.peft_utils import scale_lora_layers, unscale_lora_layers

    add_lora(model, "default")
    before = state.key()
    scale_lora_layers(model, 0.5)
    assert state.key() != before
    unscale_lora_layers(model, 0.5)
    assert state.key() is before


@pytest.mark.parametrize("safe", [False, True])
def test_fusing_is_in_the_key(model: Any, state: ModuleState, safe: bool) -> None:
    add_lora(model, "default")
    apart = []
    for _ in range(2):  # diffusers notes the first fusion in attributes that stay
        model.fuse_lora(safe_fusing=safe)
        fused = state.key()
        model.unfuse_lora()
        apart.append(state.key())
        assert apart[-1] != fused
    if not safe:  # a safe fusion leaves the weights somewhere else
        assert apart[0] is apart[1]


def test_unloading_frees_the_adapter_and_loading_again_is_another_state(model: Any, state: ModuleState) -> None:
    before = state.key()
    add_lora(model, "default")
    weights = lora_state(model, "default")
    loaded = state.key()
    dead = [weakref.ref(part) for name, part in model.named_parameters() if "lora_" in name]
    assert dead
    model.unload_lora()
    gc.collect()
    assert not any(reference() is not None for reference in dead)
    unloaded = state.key()
    assert not any("to_q" in line for line in describe_difference(before, unloaded))
    keep = [torch.empty_like(tensor) for tensor in weights.values()]  # no address of the old adapter comes back
    model.load_lora_adapter(weights, prefix="transformer")
    assert state.key() not in (loaded, unloaded)
    del keep


def test_hotswap_keeps_the_key(model: Any, state: ModuleState) -> None:
    model.enable_lora_hotswap(target_rank=4)
    source = tiny_flux()
    add_lora(source, "default", rank=2)
    weights = lora_state(source, "default")
    model.load_lora_adapter(dict(weights), prefix="transformer", adapter_name="default")
    before = state.key()
    output = [parameter.clone() for name, parameter in model.named_parameters() if "lora_B" in name]
    other = {name: tensor * 2 + 1 for name, tensor in weights.items()}
    model.load_lora_adapter(other, prefix="transformer", adapter_name="default", hotswap=True)
    swapped = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    assert not all(map(torch.equal, output, swapped)), "the weights are others"
    assert not describe_difference(before, state.key())
    assert state.key() is before


def test_fused_projections_are_in_the_key(model: Any, state: ModuleState) -> None:
    before = state.key()
    model.fuse_qkv_projections()
    fused = state.key()
    assert fused != before
    model.unfuse_qkv_projections()
    assert state.key() != fused


def test_attention_processors_are_in_the_key(model: Any, state: ModuleState) -> None:
    class Scaled(diffusers.models.transformers.transformer_flux.FluxAttnProcessor):  # type: ignore[misc, name-defined]
        scale = 1.0

    before = state.key()
    old = dict(model.attn_processors)
    assert old
    processor = Scaled()
    model.set_attn_processor(processor)
    scaled = state.key()
    processor.scale = 0.5
    assert len({before, scaled, state.key()}) == 3
    model.set_attn_processor(dict(old))  # diffusers empties the dict that it is given
    assert state.key() is before
    model.set_attn_processor({name: type(part)() for name, part in model.attn_processors.items()})
    assert state.key() is before, "new objects of the same kind do the same"


def test_the_attention_backend_is_in_the_key_of_every_module(model: Any, state: ModuleState) -> None:
    other = ModuleState(tiny_flux())
    before, other_before = state.key(), other.key()
    model.set_attention_backend("_native_math")
    assert state.key() != before
    assert other.key() != other_before, "diffusers changes a process-wide default too"
    registry = attention_dispatch._AttentionBackendRegistry
    assert probes.ambient_probes() == (registry._active_backend,)


def test_config_values_are_in_the_key(model: Any, state: ModuleState) -> None:
    before = state.key()
    model.register_to_config(num_frame_per_block=5)
    assert any("num_frame_per_block" in line for line in describe_difference(before, state.key()))


def test_moving_weights_is_seen_and_loading_in_place_is_not(model: Any, state: ModuleState) -> None:
    before = state.key()
    model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
    assert state.key() is before
    model.to(torch.bfloat16)
    half = state.key()
    assert any("expected torch.float32, got torch.bfloat16" in line for line in describe_difference(before, half))
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    assert state.key() != half


def test_layer_skip_hooks_put_on_again_give_the_same_key(model: Any, state: ModuleState) -> None:
    from diffusers.hooks import HookRegistry, LayerSkipConfig, apply_layer_skip

    before = state.key()
    skipped = []
    for _ in range(2):
        apply_layer_skip(model, LayerSkipConfig(indices=[0], fqn="transformer_blocks"))
        skipped.append(state.key())
        HookRegistry.check_if_exists_or_initialize(model).remove_hook("layer_skip_hook", recurse=True)
        for module in model.modules():
            if hasattr(module, "_diffusers_hook"):
                for name in list(module._diffusers_hook.hooks):
                    module._diffusers_hook.remove_hook(name, recurse=False)
        assert not describe_difference(before, state.key())
        assert state.key() is before
    assert skipped[0] is skipped[1]
    assert skipped[0] is not before


def test_user_hooks_are_in_the_key(model: Any, state: ModuleState) -> None:
    before = state.key()
    handle = model.single_transformer_blocks[1].attn.to_q.register_forward_hook(lambda *args: None)
    assert state.key() != before
    handle.remove()
    assert state.key() is before


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_plain_and_adapted_models_are_not_refused(model: Any) -> None:
    assert probes.refusal(model) is None
    with model.cache_context("cond"):
        assert probes.refusal(model) is None
    add_lora(model, "default")
    assert probes.refusal(model) is None


def cache_configs() -> dict[str, Callable[[], Any]]:
    now = {"current_timestep_callback": lambda: 500}
    return {
        "FirstBlockCache": lambda: diffusers.FirstBlockCacheConfig(threshold=0.1),
        "PyramidAttentionBroadcast": lambda: diffusers.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, **now
        ),
        "FasterCache": lambda: diffusers.FasterCacheConfig(
            spatial_attention_block_skip_range=2, tensor_format="BCHW", is_guidance_distilled=True, **now
        ),
        "MagCache": lambda: diffusers.MagCacheConfig(num_inference_steps=4, mag_ratios=torch.ones(4)),
        "TaylorSeer": lambda: diffusers.TaylorSeerCacheConfig(),
        "SeaCache": lambda: diffusers.SeaCacheConfig(),
    }


@pytest.mark.parametrize("name", cache_configs())
def test_step_caches_are_refused_until_they_are_disabled(name: str, model: Any, state: ModuleState) -> None:
    before = state.key()
    model.enable_cache(cache_configs()[name]())
    reason = state.refusal()
    assert reason is not None
    assert "disable_cache()" in reason
    assert "Hook" in reason
    assert state.key() != before
    model.disable_cache()
    assert state.refusal() is None
    assert not describe_difference(before, state.key())


def test_text_kv_cache_is_refused(model: Any) -> None:
    from diffusers.hooks import HookRegistry
    from diffusers.hooks.text_kv_cache import TextKVCacheTransformerHook

    hook = TextKVCacheTransformerHook.__new__(TextKVCacheTransformerHook)
    HookRegistry.check_if_exists_or_initialize(model).register_hook(hook, "text_kv_cache_transformer")
    reason = probes.refusal(model)
    assert reason is not None
    assert "TextKVCacheTransformerHook on the module itself" in reason


def test_an_unknown_stateful_hook_is_refused_by_the_general_rule(model: Any) -> None:
    from diffusers.hooks import HookRegistry, ModelHook

    class Unheard(ModelHook):  # type: ignore[misc]
        _is_stateful = True

    HookRegistry.check_if_exists_or_initialize(model.transformer_blocks[1]).register_hook(Unheard(), "unheard")
    reason = probes.refusal(model)
    assert reason is not None
    assert "Unheard on submodule 'transformer_blocks.1'" in reason


def test_a_stateless_hook_is_not_refused(model: Any) -> None:
    from diffusers.hooks import HookRegistry, ModelHook

    HookRegistry.check_if_exists_or_initialize(model).register_hook(ModelHook(), "nothing")
    assert probes.refusal(model) is None


def test_layerwise_casting_is_refused(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    reason = probes.refusal(model)
    assert reason is not None
    assert "LayerwiseCastingHook" in reason
    assert "compute dtype" in reason


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offloading_is_refused(model: Any, kind: str) -> None:
    options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    model.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type=kind, **options)
    reason = probes.refusal(model)
    assert reason is not None
    assert "Offloading" in reason


def offload_by_accelerate() -> dict[str, Callable[[Any], Any]]:
    def sequential(model: Any) -> None:
        from accelerate.hooks import CpuOffload, SequentialHook, add_hook_to_module

        add_hook_to_module(model, SequentialHook(SequentialHook(CpuOffload("cpu"))))

    return {
        "cpu_offload": lambda model: accelerate.cpu_offload(model, torch.device("cpu")),
        "cpu_offload_with_hook": lambda model: accelerate.cpu_offload_with_hook(model, torch.device("cpu")),
        "dispatch_model": lambda model: accelerate.dispatch_model(
            model,
            {name: "disk" if name == "proj_out" else "cpu" for name, _ in model.named_children()},
            main_device="cpu",
            state_dict=model.state_dict(),
            offload_dir=None,
            offload_index={},
            force_hooks=True,
        ),
        "sequential": sequential,
    }


@pytest.mark.parametrize("name", ["cpu_offload", "cpu_offload_with_hook", "sequential"])
def test_offloading_by_accelerate_is_refused(name: str, model: Any, state: ModuleState) -> None:
    before = state.key()
    assert state.refusal() is None
    offload_by_accelerate()[name](model)
    reason = state.refusal()
    assert reason is not None
    assert "offload" in reason.lower()
    assert state.key() != before
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert probes.refusal(model) is None


def test_a_model_dispatched_by_a_device_map_is_refused(model: Any) -> None:
    device_map = {name: "cpu" for name, _ in model.named_children()}
    accelerate.dispatch_model(model, device_map, main_device="cpu", force_hooks=True)
    reason = probes.refusal(model)
    assert reason is not None
    assert "AlignDevicesHook" in reason


def test_a_model_spread_over_devices_is_refused() -> None:
    mapped: Any = nn.Linear(2, 2)
    mapped.hf_device_map = {"": 0}
    assert probes.refusal(mapped) is None
    mapped.hf_device_map = {"a": 0, "b": "cpu"}
    reason = probes.refusal(mapped)
    assert reason is not None
    assert "spread over 0, cpu" in reason


def test_weights_on_meta_are_refused() -> None:
    reason = probes.refusal(nn.Linear(2, 2, device="meta"))
    assert reason is not None
    assert "meta device" in reason


def test_without_diffusers_there_are_no_ambient_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "diffusers.models.attention_dispatch")
    assert probes.ambient_probes() == ()
