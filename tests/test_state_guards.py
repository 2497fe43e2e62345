"""Each guard of the module state alone: changes that no other guard sees. `scripts/mutate` turns them off in turn."""

from __future__ import annotations

import enum
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg import _dict_epoch, _torch, probes
from bcg.interception import HostGuard
from bcg.module_state import ModuleState
from bcg.source import where


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Number(float):
    """A float that is none."""


class Options(dict):  # type: ignore[type-arg]
    """A dict with an attribute."""

    def __init__(self, limit: int, **items: Any) -> None:
        super().__init__(items)
        self.limit = limit


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: int) -> None:
        self.factor = factor


class Counter:
    def __init__(self, start: int) -> None:
        self.start = start

    def count(self) -> int:
        return self.start


class Pair(Tensor):
    """A tensor made of two others, as quantised weights are."""

    left: Tensor
    right: Tensor
    scale: float

    @staticmethod
    def __new__(cls, left: Tensor, right: Tensor, scale: float = 1.0) -> Pair:
        made: Pair = Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)  # type: ignore[attr-defined]
        return made

    def __init__(self, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
        self.left, self.right, self.scale = left, right, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["left", "right"], self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Identity())
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def of_same_name(factor: int) -> type[nn.Module]:
    return type("Same", (Root,), {"factor": factor})


def weighted(weight: float) -> Callable[[float], float]:
    def function(value: float, by: float = weight) -> float:
        return value * by

    return function


def keyword_weighted(weight: float) -> Callable[..., float]:
    def function(value: float, *, by: float = weight) -> float:
        return value * by

    return function


def marked(mark: int) -> Callable[[], int]:
    def function() -> int:
        return function.mark  # type: ignore[attr-defined,no-any-return]

    function.mark = mark  # type: ignore[attr-defined]
    return function


LEFT, RIGHT, OTHER = torch.ones(2), torch.ones(2), torch.ones(2)

# Two values of an attribute that must give two states.
VALUES: dict[str, tuple[Any, Any]] = {
    "numbers": (1.5, 2.5),
    "a number and a bool": (1, True),
    "numbers of a subclass": (Number(1.0), Number(2.0)),
    "members of an enum": (Kind.ONE, Kind.TWO),
    "classes": (Root, nn.Identity),
    "items of a dict": ({"a": 1}, {"a": 2}),
    "orders of a dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "elements of a list": ([1], [2]),
    "elements of a set": ({1}, {2}),
    "elements of a tuple": ((1,), (2,)),
    "attributes of a dict": (Options(1, a=1), Options(2, a=1)),
    "attributes of an object": (Counter(1), Counter(2)),
    "slots of an object": (Slotted(1), Slotted(2)),
    "codes of functions": (lambda value: value, lambda value: value + 1),
    "defaults of a function": (weighted(1.0), weighted(2.0)),
    "keyword defaults of a function": (keyword_weighted(1.0), keyword_weighted(2.0)),
    "attributes of a function": (marked(1), marked(2)),
    "objects of a bound method": (Counter(1).count, Counter(2).count),
    "arguments of a partial": (functools.partial(max, 1), functools.partial(max, 2)),
    "keywords of a partial": (functools.partial(max, key=1), functools.partial(max, key=2)),
    "functions of a partial": (functools.partial(max, 1), functools.partial(min, 1)),
    "parts of a wrapper tensor": (Pair(LEFT, RIGHT), Pair(LEFT, OTHER)),
    "contexts of a wrapper tensor": (Pair(LEFT, RIGHT, 1.0), Pair(LEFT, RIGHT, 2.0)),
    "devices of tensors without elements": (torch.empty(0), torch.empty(0, device="meta")),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_two_values_of_an_attribute_are_two_states(name: str) -> None:
    module: Any = Root()
    state = ModuleState(module)
    one, other = VALUES[name]
    keys = []
    for value in (one, other, one):
        module.__dict__["value"] = value
        keys.append(state.key())
    assert keys[0] != keys[1]
    assert keys[0] is keys[2]


@pytest.mark.parametrize("place", ["root", "submodule"])
def test_a_class_of_the_same_name_and_forward_is_another(place: str) -> None:
    root: Any = of_same_name(1)()
    root.inner.add_module("same", of_same_name(1)())
    state = ModuleState(root)
    changing = root if place == "root" else root.inner.same
    before, old = state.key(), type(changing)
    for _ in range(3):
        assert state.key() is before
    changing.__class__ = of_same_name(2)
    assert state.key() != before
    changing.__class__ = old
    assert state.key() is before


def test_a_module_that_is_in_two_places_or_in_one() -> None:
    root: Any = Root()
    root.inner.add_module("again", root.inner[0])
    state = ModuleState(root)
    before = state.key()
    root.inner._modules["again"] = None
    assert state.key() != before
    root.inner._modules["again"] = root.inner[0]
    assert state.key() is before


@pytest.mark.parametrize("method", ["register_forward_hook", "register_forward_pre_hook"])
def test_one_hook_with_and_without_keyword_arguments(method: str) -> None:
    def hook(*args: Any) -> None:
        return None

    root = Root()
    state = ModuleState(root)
    keys = []
    for with_kwargs in (False, True, False):
        handle = getattr(root.inner, method)(hook, with_kwargs=with_kwargs)
        keys.append(state.key())
        handle.remove()
    assert keys[0] != keys[1]
    assert keys[0] is keys[2]


def test_an_object_at_the_address_of_a_dead_one_is_another() -> None:
    class Closed:
        """Known by identity alone."""

        __slots__ = ("__weakref__",)
        __module__ = "torch.pretended"

    root: Any = Root()
    state = ModuleState(root)
    keys = []
    for _ in range(50):
        root.value = Closed()
        keys.append((id(root.value), state.key()))
        del root.value
        gc.collect()
    addresses = [address for address, _ in keys]
    assert len(set(addresses)) < len(addresses), "an address came back"
    assert len({id(key) for _, key in keys}) == len(keys)
    assert len({key for _, key in keys}) == len(keys)


@pytest.fixture(params=["versions", "values"])
def _proof(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with and without torch's accelerators of the fast check."""
    if request.param == "values":
        monkeypatch.setattr(_torch, "dict_version_function", lambda: None)
        monkeypatch.setattr(_torch, "tensor_guard", lambda tensors: None)
        monkeypatch.setattr(_dict_epoch, "epoch", lambda: None)


def set_default_of_a_slot(root: Any) -> None:
    root.slotted.factor = 5


def write_a_cell(root: Any) -> None:
    root.cell_owner.__closure__[0].cell_contents = 7


def fill_an_empty_set(root: Any) -> None:
    root.empty_set.add(1)


def shorten_a_list(root: Any) -> None:
    root.numbers.pop()


def replace_an_element(root: Any) -> None:
    root.numbers[0] = 9


def view_a_buffer(root: Any) -> None:
    root.table.data = root.table.data.view(3, 2)


def cut_a_buffer(root: Any) -> None:
    root.table.data = root.table.data[:, :2]


def cast_a_buffer(root: Any) -> None:
    root.table.data = root.table.data.view(torch.int32)


def move_a_buffer(root: Any) -> None:
    root.table.data = root.table.data.clone()


IN_PLACE = [
    set_default_of_a_slot, write_a_cell, fill_an_empty_set, shorten_a_list, replace_an_element, view_a_buffer,
    cut_a_buffer, cast_a_buffer, move_a_buffer,
]  # fmt: skip


@pytest.mark.usefixtures("_proof")
@pytest.mark.parametrize("change", IN_PLACE, ids=lambda change: change.__name__)
def test_a_change_that_writes_to_no_dict_is_seen_by_the_fast_check(change: Callable[[Any], None]) -> None:
    held = 3
    root: Any = Root()
    root.register_buffer("table", torch.zeros(2, 3))
    root.slotted, root.numbers, root.empty_set = Slotted(1), [1, 2], set()
    root.cell_owner = lambda: held
    state = ModuleState(root)
    before = state.key()
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            assert state.key() is before
    change(root)
    assert state.key() != before


# -- adapters ----------------------------------------------------------------------------------------------------------


def adapted(wrap: bool) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    model = nn.Sequential(nn.Linear(4, 4))
    if wrap:
        made = peft.get_peft_model(model, config, adapter_name="a")
        made.add_adapter("b", config)
        return made
    peft.inject_adapter_in_model(config, model, adapter_name="a")
    peft.inject_adapter_in_model(config, model, adapter_name="b")
    layer_of(model).set_adapter("a")
    return model


def layer_of(model: nn.Module) -> Any:
    return next(module for module in model.modules() if hasattr(module, "scaling"))


def test_the_scale_of_an_adapter_counts_while_it_is_active() -> None:
    model = adapted(wrap=False)
    layer, state = layer_of(model), ModuleState(model)
    before = state.key()
    layer.scaling["b"] = 0.5
    assert state.key() == before, "nothing reads it"
    layer.scaling["a"] = 0.25
    assert state.key() != before
    layer.scaling["a"] = 1.0 * layer.lora_alpha["a"] / layer.r["a"]
    assert state.key() == before
    layer.set_adapter(["a", "b"])
    both = state.key()
    layer.scaling["b"] = 0.75
    assert state.key() != both


def test_all_scales_count_where_adapters_are_merged() -> None:
    """A forward with disabled adapters takes the merged ones out again, by their scale."""
    model = adapted(wrap=False)
    layer, state = layer_of(model), ModuleState(model)
    layer.merge()
    layer.set_adapter("b")
    before = state.key()
    layer.scaling["a"] = 0.5
    assert state.key() != before


def test_all_scales_count_where_a_call_may_name_its_adapters() -> None:
    model = adapted(wrap=True)
    layer, state = layer_of(model), ModuleState(model)
    before = state.key()
    layer.scaling["b"] = 0.5
    assert state.key() != before


# -- refusals ----------------------------------------------------------------------------------------------------------


class StateManager:
    """Of the name of diffusers' class."""


def registry_with(hook: Any) -> nn.Module:
    registry = type("HookRegistry", (), {})()
    registry.hooks = {"one": hook}
    module: Any = nn.Linear(2, 2)
    module._diffusers_hook = registry
    return nn.Sequential(module)


def named(name: str, **attributes: Any) -> Any:
    hook = type(name, (), {})()
    hook.__dict__.update(attributes)
    return hook


HOOKS: dict[str, tuple[Any, str]] = {
    "stateful": (named("Unheard", _is_stateful=True), "disable_cache"),
    "holds a state manager": (named("Unheard", states=StateManager()), "disable_cache"),
    "step cache by name": (named("MagCacheBlockHook"), "disable_cache"),
    "says that it offloads": (named("Unheard", offload=True), "offload"),
    "group offload by name": (named("GroupOffloadingHook"), "offload"),
    "layerwise casting": (named("LayerwiseCastingHook"), "compute dtype"),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_refused_by_each_rule_alone(name: str) -> None:
    hook, word = HOOKS[name]
    reason = probes.refusal(registry_with(hook))
    assert reason is not None
    assert word in reason
    assert probes.refusal(registry_with(named("Unheard"))) is None


def test_the_hooks_of_a_registry_are_state_and_an_empty_registry_is_none() -> None:
    model: Any = registry_with(named("Unheard", strength=1.0))
    registry, state = model[0]._diffusers_hook, ModuleState(model)
    before = state.key()
    registry.hooks["one"].strength = 2.0
    assert state.key() != before
    del registry.hooks["one"]
    empty = state.key()
    assert empty != before
    del model[0]._diffusers_hook
    assert state.key() is empty


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_hook_of_accelerate_is_found_inside_of_sequential_hooks(depth: int) -> None:
    hook = named("CpuOffload")
    for _ in range(depth):
        hook = named("SequentialHook", hooks=[hook])
    module: Any = nn.Linear(2, 2)
    module._hf_hook = hook
    reason = probes.refusal(nn.Sequential(module))
    assert reason is not None
    assert "CpuOffload on submodule '0'" in reason


def test_weights_on_two_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        device = torch.device("cuda", 1)

    module = nn.Linear(2, 2)
    monkeypatch.setattr(module, "parameters", lambda: iter([torch.ones(1), Elsewhere()]))
    reason = probes.refusal(module)
    assert reason is not None
    assert "spread over cpu, cuda:1" in reason


# -- host guards -------------------------------------------------------------------------------------------------------


@pytest.fixture
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.usefixtures("_no_grad")
@pytest.mark.parametrize("size", [4, 1 << 19], ids=["by content", "by version"])
def test_a_host_tensor_whose_content_was_baked_is_checked_in_every_replay(size: int) -> None:
    """On the tape device memory is host memory, so that no forward makes such a guard: this one is made by hand."""
    host = torch.ones(size)
    runner = bcg.wrap(nn.Linear(2, 2))
    x = torch.randn(1, 2)
    assert runner.capture(x)
    [entry] = runner.entries.values()
    entry.host_guards = (HostGuard.of(host, where()),)
    runner(x)
    assert runner.stats.replays == 1
    host[0] = 2
    assert torch.equal(runner(x), runner.transformer(x))
    assert (runner.stats.replays, runner.stats.guard_misses) == (1, 1)
