"""Tests of the module-state key: every change is seen, every way back finds the old key, nothing else moves it."""

from __future__ import annotations

import functools
import gc
import math
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from bcg import _dict_epoch, _state_walk, _state_watch, _torch, module_state, probes
from bcg.module_state import ModuleState, StateKey, describe_difference


class Processor:
    """A plain object as diffusers' attention processors are."""

    _attention_backend: str | None = None

    def __init__(self) -> None:
        self.scale = [1.0, 0.5]

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.scale[0]


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 2


@dataclass
class Options:
    gain: float = 1.0
    inner: Any = None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.processor = Processor()
        self.slotted = Slotted()
        self.options = Options(inner=Options())
        self.scaling = {"default": 1.0}
        self.active = ["default"]
        self.names = {"a", "b"}
        self.pair = ([1, 2], "x")
        self.empty_list: list[Any] = []
        self.empty_dict: dict[Any, Any] = {}
        self.flag = True
        self.count = 1
        self.threshold = math.nan
        self.text = "plain"
        self.dtype_used = torch.float32
        self.freqs = [torch.zeros(3)]
        self.hook_like: Callable[[], int] = make_closure([0])

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.processor(self.norm(self.linear(value)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.activation = nn.functional.silu
        self.act_module = nn.SiLU()
        self.config = types.SimpleNamespace(num_frame_per_block=1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = self.act_module(self.activation(block(value)))
        return value


def make_closure(held: Any) -> Callable[[], int]:
    def inner() -> int:
        return len(held)

    return inner


def rescale(module: Any, args: Any, output: Any) -> Any:
    return output * 2


def set_attribute(owner: Callable[[Any], Any], name: str, value: Any) -> Callable[[Any], Callable[[], Any]]:
    """Make a change that sets an attribute and gives back what undoes it."""

    def change(model: Any) -> Callable[[], Any]:
        target = owner(model)
        old = getattr(target, name)
        setattr(target, name, value(model) if isinstance(value, types.LambdaType) else value)
        return lambda: setattr(target, name, old)

    return change


def edit(apply: Callable[[Any], Any], undo: Callable[[Any], Any]) -> Callable[[Any], Callable[[], Any]]:
    """Make a change from two functions of the first block."""

    def change(model: Any) -> Callable[[], Any]:
        apply(model.blocks[0])
        return lambda: undo(model.blocks[0])

    return change


def set_data(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Callable[[], Any]]:
    def change(model: Any) -> Callable[[], Any]:
        weight = model.blocks[0].linear.weight
        old = weight.data
        weight.data = make(old)
        return lambda: setattr(weight, "data", old)

    return change


def register(method: str, hook: Any = rescale, **options: Any) -> Callable[[Any], Callable[[], Any]]:
    def change(model: Any) -> Callable[[], Any]:
        handle = getattr(model.blocks[1].linear, method)(hook, **options)
        return lambda: handle.remove()

    return change


def global_hook(model: Any) -> Callable[[], Any]:
    handle = nn.modules.module.register_module_forward_hook(rescale)
    return lambda: handle.remove()


def swap_class(model: Any) -> Callable[[], Any]:
    class OtherSiLU(nn.SiLU):
        pass

    model.act_module.__class__ = OtherSiLU
    return lambda: setattr(model.act_module, "__class__", nn.SiLU)


def patch_class_forward(model: Any) -> Callable[[], Any]:
    old = Block.forward
    Block.forward = lambda self, value: value  # type: ignore[method-assign]
    return lambda: setattr(Block, "forward", old)


def patch_class_call(model: Any) -> Callable[[], Any]:
    old = Processor.__call__
    Processor.__call__ = lambda self, value: value  # type: ignore[method-assign]
    return lambda: setattr(Processor, "__call__", old)


def override_forward(model: Any) -> Callable[[], Any]:
    block: Any = model.blocks[0]
    block.forward = functools.partial(Block.forward, block)
    return lambda: delattr(block, "forward")


def leave_own_forward_behind(model: Any) -> Callable[[], Any]:
    """Undo an override as hook libraries do: the class's own method stays as an instance attribute."""
    block: Any = model.blocks[0]
    old = block.forward
    block.forward = make_closure(3)
    return lambda: setattr(block, "forward", old)


def swap_submodule(model: Any) -> Callable[[], Any]:
    old = model.blocks[0]
    model.blocks[0] = Block()
    return lambda: model.blocks.__setitem__(0, old)


def swap_parameter(model: Any) -> Callable[[], Any]:
    linear: Any = model.blocks[0].linear
    old = linear.weight
    linear.weight = nn.Parameter(old.detach().clone())
    return lambda: setattr(linear, "weight", old)


def parametrize(model: Any) -> Callable[[], Any]:
    linear: Any = model.blocks[0].linear
    nn.utils.parametrize.register_parametrization(linear, "weight", nn.Identity())
    return lambda: nn.utils.parametrize.remove_parametrizations(linear, "weight")


def add_to(name: str, key: Any, value: Any) -> Callable[[Any], Callable[[], Any]]:
    return edit(
        lambda block: getattr(block, name).__setitem__(key, value), lambda block: getattr(block, name).__delitem__(key)
    )


def first(model: Any) -> Any:
    return model.blocks[0]


CHANGES: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "training": edit(lambda block: block.eval(), lambda block: block.train()),
    "bool": set_attribute(first, "flag", False),
    "bool to int": set_attribute(first, "flag", 1),
    "int": set_attribute(first, "count", 2),
    "int to float": set_attribute(first, "count", 1.0),
    "int to bool": set_attribute(first, "count", True),
    "NaN to number": set_attribute(first, "threshold", 0.0),
    "string": set_attribute(first, "text", "other"),
    "string to None": set_attribute(first, "text", None),
    "dtype": set_attribute(first, "dtype_used", torch.float16),
    "number to tensor": set_attribute(first, "count", lambda model: torch.tensor(1)),
    "config value": set_attribute(lambda model: model.config, "num_frame_per_block", 5),
    "new attribute": edit(lambda block: setattr(block, "extra", 1), lambda block: delattr(block, "extra")),
    "attribute removed": edit(lambda block: delattr(block, "text"), lambda block: setattr(block, "text", "plain")),
    "dict value": edit(
        lambda block: block.scaling.update(default=0.5), lambda block: block.scaling.update(default=1.0)
    ),
    "dict value to equal": edit(
        lambda block: block.scaling.update(default=True), lambda block: block.scaling.update(default=1.0)
    ),
    "dict key": add_to("scaling", "second", 1.0),
    "empty dict filled": add_to("empty_dict", "a", 1),
    "list element": edit(
        lambda block: block.active.__setitem__(0, "other"), lambda block: block.active.__setitem__(0, "default")
    ),
    "list grows": edit(lambda block: block.active.append("b"), lambda block: block.active.pop()),
    "empty list filled": edit(lambda block: block.empty_list.append(None), lambda block: block.empty_list.pop()),
    "list in tuple": edit(lambda block: block.pair[0].append(3), lambda block: block.pair[0].pop()),
    "set": edit(lambda block: block.names.add("c"), lambda block: block.names.remove("c")),
    "processor": set_attribute(first, "processor", lambda model: Options()),
    "processor attribute": edit(
        lambda block: setattr(block.processor, "_attention_backend", "flash"),
        lambda block: delattr(block.processor, "_attention_backend"),
    ),
    "processor's list": edit(
        lambda block: block.processor.scale.__setitem__(0, 0.0),
        lambda block: block.processor.scale.__setitem__(0, 1.0),
    ),
    "nested dataclass": set_attribute(lambda model: first(model).options.inner, "gain", 0.25),
    "slot": set_attribute(lambda model: first(model).slotted, "factor", 3),
    "function": set_attribute(lambda model: model, "activation", lambda model: nn.functional.gelu),
    "closure": set_attribute(first, "hook_like", lambda model: make_closure([0, 1])),
    "class of a submodule": swap_class,
    "forward of a class": patch_class_forward,
    "__call__ of a class": patch_class_call,
    "forward override": override_forward,
    "forward override put back": leave_own_forward_behind,
    "compiled call": edit(
        lambda block: setattr(block, "_compiled_call_impl", make_closure(4)),
        lambda block: delattr(block, "_compiled_call_impl"),
    ),
    "forward hook": register("register_forward_hook"),
    "forward hook with kwargs": register("register_forward_hook", with_kwargs=True),
    "forward hook always called": register("register_forward_hook", always_call=True),
    "forward pre-hook": register("register_forward_pre_hook"),
    "forward pre-hook with kwargs": register("register_forward_pre_hook", with_kwargs=True),
    "global forward hook": global_hook,
    "weight transposed in place": set_data(lambda weight: weight.t()),
    "weight moved": set_data(lambda weight: weight.clone()),
    "weight dtype": set_data(lambda weight: weight.half()),
    "weight cut": set_data(lambda weight: weight[:2]),
    "parameter object": swap_parameter,
    "parametrization": parametrize,
    "submodule": swap_submodule,
    "submodule added": edit(
        lambda block: block.add_module("extra", nn.Identity()), lambda block: block._modules.pop("extra")
    ),
    "submodule added to a leaf": edit(
        lambda block: block.linear.add_module("extra", nn.Identity()),
        lambda block: block.linear._modules.pop("extra"),
    ),
    "submodule to None": edit(
        lambda block: block.__dict__.update(kept=block._modules["norm"]) or block._modules.update(norm=None),
        lambda block: block._modules.update(norm=block.__dict__.pop("kept")),
    ),
    "buffer added": edit(
        lambda block: block.register_buffer("extra", torch.zeros(2)), lambda block: block._buffers.pop("extra")
    ),
    "parameter added to a leaf": edit(
        lambda block: block.norm.register_parameter("extra", nn.Parameter(torch.zeros(2))),
        lambda block: block.norm._parameters.pop("extra"),
    ),
    "tensor in a list": edit(lambda block: block.freqs.insert(0, torch.zeros(3)), lambda block: block.freqs.pop(0)),
}


@pytest.fixture(params=["versions", "values"])
def proof(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with every way to prove that nothing changed: torch's accelerators, and plain Python."""
    if request.param == "values":
        monkeypatch.setattr(_torch, "dict_version_function", lambda: None)
        monkeypatch.setattr(_torch, "tensor_guard", lambda tensors: None)
        monkeypatch.setattr(_dict_epoch, "epoch", lambda: None)
    return str(request.param)


def stable_key(state: ModuleState) -> StateKey:
    """Return the key after enough calls that every lazily built accelerator is in use."""
    keys = {id(state.key()) for _ in range(4)}
    assert len(keys) == 1
    return state.key()


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen_and_the_way_back_finds_the_same_key(name: str, proof: str) -> None:
    model: Any = Model()
    state = ModuleState(model)
    before = stable_key(state)
    undo = CHANGES[name](model)
    try:
        changed = stable_key(state)
        assert changed != before
        assert describe_difference(before, changed)
        assert ModuleState(model).key() == changed, "a fresh walk agrees"
    finally:
        undo()
    assert stable_key(state) is before
    assert not describe_difference(before, state.key())


def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    walk = _state_walk.Walk

    def counting(root: nn.Module) -> Any:
        counted.append(1)
        return walk(root)

    monkeypatch.setattr(module_state, "Walk", counting)
    return counted


def test_forwards_and_modes_change_nothing_and_cost_no_walk(monkeypatch: pytest.MonkeyPatch, proof: str) -> None:
    model: Any = Model().eval()
    state = ModuleState(model)
    counted = walks(monkeypatch)
    before = state.key()
    first = len(counted)  # one, or two where other threads could have changed the module meanwhile
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.enable_grad()):
        with mode:
            model(torch.randn(3, 4))
            assert state.key() is before
    model.requires_grad_(False)
    assert state.key() is before
    assert len(counted) == first > 0


def test_content_and_load_state_dict_are_not_in_the_key(proof: str) -> None:
    model: Any = Model()
    state = ModuleState(model)
    before = state.key()
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    assert state.key() is before


def test_a_hook_registered_anew_gives_the_same_key() -> None:
    model: Any = Model()
    state = ModuleState(model)
    with_hook = []
    for _ in range(2):
        handle = model.act_module.register_forward_hook(rescale)
        with_hook.append(state.key())
        handle.remove()
    assert with_hook[0] is with_hook[1]


def test_a_closure_made_anew_around_the_same_is_the_same() -> None:
    model: Any = Model()
    model.picked = make_closure(5)
    state = ModuleState(model)
    before = state.key()
    model.picked = make_closure(5)
    assert state.key() is before


def test_a_written_closure_variable_is_seen() -> None:
    count = 0

    def counting(*args: Any) -> None:
        nonlocal count
        count += 1

    model: Any = Model()
    model.act_module.register_forward_pre_hook(counting)
    state = ModuleState(model)
    before = state.key()
    model(torch.randn(3, 4))
    assert state.key() != before


def test_nan_and_signed_zero() -> None:
    model: Any = Model()
    state = ModuleState(model)
    before = state.key()
    model.blocks[0].threshold = float("nan")
    assert state.key() is before
    model.blocks[0].threshold = 0.0
    zero = state.key()
    model.blocks[0].threshold = -0.0
    assert state.key() != zero


def test_cycles_and_shared_objects_end() -> None:
    model: Any = Model()
    loop: dict[str, Any] = {}
    loop["self"] = [loop, model]
    model.loop = loop
    model.also = model.blocks[0].processor
    state = ModuleState(model)
    before = state.key()
    assert state.key() is before
    model.blocks[0].processor.scale[0] = 7.0
    assert state.key() != before


def test_the_same_module_twice_is_not_two_modules() -> None:
    shared, separate = nn.Sequential(), nn.Sequential()
    layer = nn.SiLU()
    for name in ("a", "b"):
        shared.add_module(name, layer)
        separate.add_module(name, nn.SiLU())
    assert ModuleState(shared).key() != ModuleState(separate).key()


class Raising:
    """An object whose every question fails."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no")


class RaisingEquality:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


ODD_VALUES: dict[str, Callable[[], Any]] = {
    "every question fails": Raising,
    "equality fails": RaisingEquality,
    "meta tensor": lambda: torch.empty(2, device="meta"),
    "sparse tensor": lambda: torch.zeros(2).to_sparse(),
    "generator": lambda: iter("ab"),
    "object": object,
    "uninitialized": nn.UninitializedParameter,
    "odd keys": lambda: {Raising: 1, (1, 2): 2, None: [3]},
}


@pytest.mark.parametrize("make", ODD_VALUES.values(), ids=ODD_VALUES)
def test_key_never_raises(make: Callable[[], Any]) -> None:
    model: Any = Model()
    state = ModuleState(model)
    before = state.key()
    model.__dict__["odd"] = make()
    changed = state.key()
    assert changed != before
    assert state.key() is changed
    describe_difference(before, changed)


def test_values_are_compared_without_running_tensor_operations() -> None:
    model: Any = Model()
    model.maybe = 1.0
    state = ModuleState(model)
    before = stable_key(state)

    class Untouchable(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") in ("eq", "__eq__", "__bool__", "ne"):
                raise AssertionError("compared")
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    model.maybe = torch.tensor(1.0).as_subclass(Untouchable)
    assert state.key() != before


def test_keys_keep_no_tensor_and_no_module_alive(proof: str) -> None:
    model: Any = Model()
    state = ModuleState(model)
    added: Any = Block()
    model.blocks.append(added)
    with_block = state.key()
    dead = [weakref.ref(added), weakref.ref(added.linear.weight), weakref.ref(added.freqs[0])]
    del added
    del model.blocks[2]
    if proof == "values":
        state.key()  # the plain proof holds what it compares until the next key
    gc.collect()
    assert [reference() for reference in dead] == [None, None, None]
    assert state.key() != with_block


def test_a_removed_module_is_freed_before_the_next_key() -> None:
    model: Any = Model()
    state = ModuleState(model)
    model.extra = nn.Linear(2, 2)
    stable_key(state)
    weight = weakref.ref(model.extra.weight)
    del model.extra
    gc.collect()
    assert weight() is None


def test_the_state_is_collected_with_its_module() -> None:
    model: Any = Model()
    state = ModuleState(model)
    state.key()
    dead = weakref.ref(model)
    del model, state
    gc.collect()
    assert dead() is None


def test_the_table_of_states_is_bounded_and_keeps_the_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_state, "MAX_STATES", 3)
    model: Any = Model()
    state = ModuleState(model)
    keys = []
    for number in (0, 1, 2, 0, 3):
        model.number = number
        keys.append(state.key())
    assert keys[3] is keys[0]
    assert len(state._states) == 3
    model.number = 0
    assert state.key() is keys[0]
    model.number = 1
    assert state.key() == keys[1]
    assert state.key() is not keys[1]


def test_keys_of_two_states_share_what_is_the_same() -> None:
    model: Any = Model()
    state = ModuleState(model)
    before = state.key()
    model.number = 1
    after = state.key()
    same = [path for path in before._records if before._records[path] is after._records[path]]
    assert len(same) == len(before._records) - 1


def test_modules_in_plain_attributes_are_walked() -> None:
    model: Any = Model()
    hidden: Any = nn.Linear(2, 2)
    model.hidden = [hidden]
    state = ModuleState(model)
    before = state.key()
    hidden.scale = 0.5
    assert describe_difference(before, state.key()) == ["hidden[0].scale: expected nothing, got 0.5"]


def test_refusal_is_found_once_for_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(module: nn.Module) -> str:
        asked.append(1)
        return "no"

    monkeypatch.setattr(probes, "refusal", refuse)
    model: Any = Model()
    state = ModuleState(model)
    assert [state.refusal(), state.refusal()] == ["no", "no"]
    model.number = 1
    assert state.refusal() == "no"
    del model.number
    assert state.refusal() == "no"
    assert len(asked) == 2


def test_differences_name_path_and_values() -> None:
    model: Any = Model()
    state = ModuleState(model)
    before = state.key()
    model.blocks[0].scaling["default"] = 0.5
    model.blocks[1].linear.weight.data = model.blocks[1].linear.weight.data.clone()
    model.blocks[1].linear.bias.data = torch.zeros(4, dtype=torch.float16)
    model.blocks.append(nn.Identity())
    lines = describe_difference(before, state.key())
    assert "blocks.0.scaling['default']: expected 1.0, got 0.5" in lines
    assert "blocks.1.linear.weight moved in memory" in lines
    assert "blocks.1.linear.bias: dtype expected torch.float32, got torch.float16" in lines
    assert "blocks.2: module added" in lines


def test_many_differences_are_counted() -> None:
    model: Any = Model()
    state = ModuleState(model)
    before = state.key()
    for number in range(80):
        setattr(model, f"added_{number}", number)
    lines = describe_difference(before, state.key())
    assert len(lines) == module_state.MAX_DIFFERENCES + 1
    assert lines[-1] == "... and 30 more differences"


def test_what_another_thread_writes_between_a_walk_and_its_watch_is_seen_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = nn.Linear(2, 2)
    state = ModuleState(module)
    watch = module_state.Watch

    def late(*args: Any) -> Any:
        module.scale = 0.5  # type: ignore[assignment]
        return watch(*args)

    monkeypatch.setattr("threading.active_count", lambda: 2)
    monkeypatch.setattr(module_state, "Watch", late)
    before = state.key()
    monkeypatch.setattr(module_state, "Watch", watch)
    assert describe_difference(before, state.key()) == ["scale: expected nothing, got 0.5"]
    assert state.key() is state.key()


# --- private accelerators ---------------------------------------------------------------------------------------------


def test_dict_versions_grow_with_every_write() -> None:
    version = _torch.dict_version_function()
    if version is None:
        pytest.skip("this torch has no dict versions")
    probe = {"a": 1}
    seen = [version(probe)]
    for write in (lambda: probe.update(a=2), lambda: probe.update(b=1), lambda: probe.pop("b"), probe.clear):
        write()
        seen.append(version(probe))
    assert seen == sorted(set(seen))


def test_tensor_guard_sees_layouts() -> None:
    tensor = nn.Parameter(torch.zeros(2, 3))
    guard = _torch.tensor_guard([tensor])
    if guard is None:
        pytest.skip("this torch has no tensor guards")
    assert guard(tensor)
    tensor.data = tensor.data.t()
    assert not guard(tensor)


def test_the_epoch_counts_writes_and_falls_back_to_versions() -> None:
    watched: dict[str, int] = {"a": 1}
    check = _state_watch.DictCheck([watched], [{}])
    other = {"b": 1}
    counter = _dict_epoch.epoch()
    if counter is None:
        pytest.skip("this Python has no dict watchers")
    counter.watch([other])
    other["b"] = 2
    assert check.unchanged()
    watched["a"] = 2
    assert not check.unchanged()


def test_a_removed_module_dies_at_once_though_its_class_is_checked_in_every_call() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    state = ModuleState(model)
    for _ in range(3):
        state.key()
    removed = weakref.ref(model[1][0])
    del model[1][0]
    assert removed() is None


def test_a_list_is_made_once_until_the_next_write_and_holds_its_owner_weakly() -> None:
    counter = _dict_epoch.epoch()
    if counter is None:
        pytest.skip("this Python has no dict watchers")
    watched: dict[str, int] = {"a": 1}
    counter.watch([watched])
    owner = nn.Identity()
    first = counter.until_written(owner, lambda: [*watched])
    assert counter.until_written(owner, lambda: [*watched]) is first
    watched["b"] = 2
    assert counter.until_written(owner, lambda: [*watched]) == ["a", "b"]
    alive = weakref.ref(owner)
    del owner
    assert alive() is None


@pytest.fixture(autouse=True)
def no_global_hooks() -> Iterator[None]:
    yield
    assert not any(_torch.global_forward_hooks().values())
