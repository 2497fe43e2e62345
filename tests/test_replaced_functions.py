"""A function that is replaced after a warm-up is seen: the very next call is right, and the way back replays.

The pieces that a forward calls by name stand in this file, so that a test replaces a global of it as users replace
``torch.nn.functional.scaled_dot_product_attention`` or a function of diffusers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bcg
from bcg import _dict_epoch, _state_functions, _torch
from bcg.functions import observed, redirected
from bcg.module_state import ModuleState, describe_difference

calls_made = 0
halfway: Any = None  # a kernel that may be installed later


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=["fast", "plain"])
def proof(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with and without counters and versions of dicts."""
    if request.param == "plain":
        monkeypatch.setattr(_torch, "dict_version_function", lambda: None)
        monkeypatch.setattr(_dict_epoch, "epoch", lambda: None)
        monkeypatch.setattr(_dict_epoch, "functions_epoch", lambda: None)
    return str(request.param)


# -- what a model is made of -------------------------------------------------------------------------------------------


def rotate(x: Tensor) -> Tensor:
    return deeper(x) + 1


def deeper(x: Tensor) -> Tensor:
    return x * 2


def count_up() -> None:
    global calls_made
    calls_made += 1


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@decorated
def behind_a_decorator(x: Tensor) -> Tensor:
    return in_a_closure(x)


def in_a_closure(x: Tensor) -> Tensor:
    return x - 3


@functools.lru_cache
def table_size(size: int) -> int:
    return behind_a_cache(size)


def behind_a_cache(size: int) -> int:
    return size


def in_a_lambda(x: Tensor) -> Tensor:
    return x * 1.5


def of_a_processor(x: Tensor) -> Tensor:
    return x / 4


def of_a_hook(x: Tensor) -> Tensor:
    return x + 7


def first_backend(x: Tensor) -> Tensor:
    return from_a_table(x)


def from_a_table(x: Tensor) -> Tensor:
    return x * 5


class Registry:
    _backends: ClassVar[dict[str, Callable[..., Any]]] = {"first": first_backend}
    _checks: ClassVar[dict[str, Any]] = {"first": 1}

    @classmethod
    def active(cls) -> Callable[..., Any]:
        return cls._backends["first"]


class Shape:
    """Made anew in each forward."""

    def __init__(self, x: Tensor) -> None:
        self.factor = made_with(x)

    def times(self, x: Tensor) -> Tensor:
        return x * self.factor


def made_with(x: Tensor) -> int:
    return len(x.shape)


class Processor:
    def __call__(self, x: Tensor) -> Tensor:
        return of_a_processor(x)


class Base(nn.Module):
    @property
    def offset(self) -> float:
        return math.fabs(-2.0)

    def helper(self, x: Tensor) -> Tensor:
        return self.static(x) + self.offset

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x * 3


class Model(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.SiLU()
        self.norm = nn.LayerNorm(4)
        self.processor = Processor()

    def forward(self, x: Tensor) -> Tensor:
        x = rotate(self.norm(self.act(self.linear(x))))
        x = F.gelu(x) + torch.nn.functional.softsign(x) + torch.sigmoid(x)
        x = behind_a_decorator(x) * table_size(4)
        x = torch.stack([*map(lambda part: in_a_lambda(part), x.unbind())])
        if halfway is not None:
            x = halfway(x)
        x = Shape(x).times(Registry.active()(self.processor(x)))
        return self.helper(x)


def hook(module: Any, args: Any, output: Any) -> Any:
    return of_a_hook(output)


def make() -> Model:
    torch.manual_seed(0)
    model = Model()
    model.linear.register_forward_hook(hook)
    return model


def doubled(old: Any) -> Any:
    return lambda *args, **kwargs: old(*args, **kwargs) * 2


def check(runner: Any, counted: str) -> None:
    """Two fresh inputs give what eager gives, and both calls are of one kind."""
    for _ in range(2):
        before = getattr(runner.stats, counted)
        x = torch.randn(3, 4)
        assert torch.equal(runner(x), runner.transformer(x))
        assert getattr(runner.stats, counted) == before + 1


def warmed(model: Any) -> Any:
    runner = bcg.wrap(model)
    with bcg.warmup():
        runner(torch.randn(3, 4))
    assert runner.stats.captures == 1
    check(runner, "replays")
    return runner


@contextlib.contextmanager
def standing(owner: Any, name: Any, value: Any) -> Iterator[None]:
    """Let a value stand for a name of a module or class, or in a dict."""
    entries = owner if isinstance(owner, dict) else vars(owner)
    was_there, old = name in entries, entries.get(name)
    put: Callable[[Any, Any], None] = functools.partial(setattr, owner)
    take: Callable[[Any], None] = functools.partial(delattr, owner)
    if isinstance(owner, dict):
        put, take = owner.__setitem__, owner.__delitem__
    put(name, value)
    try:
        yield
    finally:
        if was_there:
            put(name, old)
        else:
            take(name)


HERE = globals()
REPLACED: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "a global function": (HERE, "rotate", doubled),
    "a function that a global function calls": (HERE, "deeper", doubled),
    "an attribute of a module under a short name": (F, "gelu", doubled),
    "an attribute of a module under a long name": (F, "softsign", doubled),
    "a function of torch": (torch, "sigmoid", doubled),
    "what torch's layers call": (F, "linear", doubled),
    "what torch's functions call": (torch, "layer_norm", doubled),
    "a module under a short name": (
        HERE, "F", lambda old: types.SimpleNamespace(gelu=lambda x: x * 3, softsign=old.softsign),
    ),
    "a function behind a decorator": (HERE, "in_a_closure", doubled),
    "a function behind a cache": (HERE, "table_size", doubled),
    "a function called in a lambda": (HERE, "in_a_lambda", doubled),
    "a function of a processor": (HERE, "of_a_processor", doubled),
    "a function of a hook": (HERE, "of_a_hook", doubled),
    "an entry of a registry": (Registry._backends, "first", doubled),
    "a function that an entry of a registry calls": (HERE, "from_a_table", doubled),
    "a method": (Base, "helper", lambda old: lambda self, x: old(self, x) * 2),
    "a method that a subclass gets": (Model, "helper", lambda old: lambda self, x: x),
    "a static method": (Base, "static", lambda old: staticmethod(lambda x: x * 4)),
    "a class method": (Registry, "active", lambda old: classmethod(lambda cls: doubled(first_backend))),
    "a property": (Base, "offset", lambda old: property(lambda self: 9.0)),
    "a class": (HERE, "Shape", lambda old: type("Other", (old,), {"times": lambda self, x: x * 11})),
    "a function of a constructor": (HERE, "made_with", doubled),
    "nothing by a function": (HERE, "halfway", lambda old: lambda x: x * 13),
    "a function by an object that is called": (HERE, "rotate", lambda old: Processor()),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACED)
def test_a_replaced_function_is_never_replayed_and_the_way_back_finds_the_old_graph(name: str, proof: str) -> None:
    owner, attribute, replace = REPLACED[name]
    runner = warmed(make())
    state = ModuleState(runner.transformer)
    before = state.key()
    old = (owner if isinstance(owner, dict) else vars(owner)).get(attribute)
    with standing(owner, attribute, replace(old)):
        check(runner, "eager_calls")
        changed = state.key()
        assert changed != before and state.key() is changed
        with bcg.warmup():
            runner(torch.randn(3, 4))
        check(runner, "replays")
    check(runner, "replays")
    assert state.key() is before
    assert runner.stats.captures == 2


def test_a_difference_names_the_function() -> None:
    model = make()
    state = ModuleState(model)
    before = state.key()
    with standing(F, "gelu", first_backend):
        (line,) = describe_difference(before, state.key())
    assert line == "<functions>.torch.nn.functional.gelu: expected gelu, got first_backend"


@pytest.mark.parametrize(
    ("owner", "attribute", "value"),
    [
        (HERE, "calls_made", 5),
        (HERE, "halfway", None),
        (HERE, "never_used_anywhere", doubled),
        (HERE, "count_up", doubled),
        (Registry, "times_asked", 3),
        (Registry._checks, "first", 2),
        (Model, "never_used_anywhere", doubled),
        (torch, "never_used_anywhere", doubled),
    ],
    ids=str,
)
def test_a_write_that_changes_no_used_function_goes_on_replaying(owner: Any, attribute: str, value: Any) -> None:
    runner = warmed(make())
    key = ModuleState(runner.transformer)
    before = key.key()
    with standing(owner, attribute, value):
        check(runner, "replays")
        assert key.key() is before
    check(runner, "replays")
    assert key.key() is before


def test_a_write_that_changes_no_used_function_costs_no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ModuleState(make())
    before = state.key()
    monkeypatch.setattr(state, "_walk", None)
    for _ in range(3):
        count_up()
        assert state.key() is before


def test_a_walk_for_another_reason_does_not_look_for_functions_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make()
    state = ModuleState(model)
    state.key()
    monkeypatch.setattr(_state_functions, "_Search", None)
    model.flag = 1
    state.key()
    del model.flag
    state.key()


def test_functions_that_a_capture_stands_in_for_are_those_behind_them() -> None:
    state = ModuleState(make())
    before = state.key()
    with observed([rotate], lambda *_: None), redirected((F.gelu, F.silu), (deeper, torch.sin)):
        assert rotate.__name__ == "rotate" and hasattr(rotate, "_bcg_dispatcher")
        assert state.key() is before
        assert ModuleState(make()).key()._records["<functions>"] == before._records["<functions>"]
        with standing(HERE, "in_a_lambda", first_backend):
            assert state.key() != before
        assert state.key() is before
    assert state.key() is before


class Other:
    """What happens in another thread while one captures; in a class, where it is no state of the module."""

    serving: Any = None
    stood: tuple[bool, ...] = ()

    @staticmethod
    def replay() -> None:
        with torch.no_grad():
            x = torch.full((3, 4), float(len(Other.stood)))  # random numbers would be missed by the capture
            assert torch.equal(Other.serving(x), Other.serving.transformer(x))
            Other.stood += (hasattr(rotate, "_bcg_dispatcher"),)


class ServingMeanwhile:
    """A processor in which another thread is served."""

    def __call__(self, x: Tensor) -> Tensor:
        thread = threading.Thread(target=Other.replay)
        thread.start()
        thread.join()
        return x * 5


def test_a_capture_in_another_thread_does_not_stop_replays() -> None:
    Other.serving, Other.stood = warmed(make()), ()
    model: Any = make()
    model.processor = ServingMeanwhile()
    capturing = bcg.wrap(model, eager_functions=(f"{__name__}:rotate",))
    with bcg.warmup():
        capturing(torch.randn(3, 4))
    assert capturing.stats.captures == 1
    assert any(Other.stood), "nothing stood for rotate in a capture"
    assert Other.serving.stats.replays == 2 + len(Other.stood)


def test_a_function_that_was_replaced_is_not_held_longer_than_to_the_next_walk() -> None:
    state = ModuleState(make())
    state.key()
    replacement = doubled(first_backend)
    alive = weakref.ref(replacement)
    with standing(HERE, "rotate", replacement):
        state.key()
    del replacement
    state.key()
    gc.collect()
    assert alive() is None


def test_a_function_at_the_address_of_a_dead_one_is_another() -> None:
    state = ModuleState(make())
    keys = []
    for _ in range(30):
        with standing(HERE, "rotate", doubled(first_backend)):
            keys.append(state.key())
        state.key()
        gc.collect()
    assert len(set(keys)) == len(keys)


def test_code_without_end_is_followed_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = _state_functions.Functions([Model], [], id).entries
    monkeypatch.setattr(_state_functions, "MAX_CODES", 3)
    assert 0 < len(_state_functions.Functions([Model], [], id).entries) < len(everything)


def test_what_cannot_be_read_is_left_out() -> None:
    class Meta(type):
        @property
        def __mro__(cls) -> Any:
            raise RuntimeError("closed")

    class Odd(metaclass=Meta):
        pass

    found = _state_functions.Functions([Odd, Model], [], id)
    assert found.entries and found.unchanged()


# -- diffusers ---------------------------------------------------------------------------------------------------------


def tiny_flux() -> Any:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ).eval()


def flux_call() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 6, 16),
        "encoder_hidden_states": torch.randn(1, 4, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.rand(1),
        "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(4, 3),
        "return_dict": False,
    }


def flux_check(runner: Any, counted: str) -> None:
    for _ in range(2):
        before, call = getattr(runner.stats, counted), flux_call()
        assert torch.equal(runner(**call)[0], runner.transformer(**call)[0])
        assert getattr(runner.stats, counted) == before + 1


@pytest.mark.parametrize(
    ("module", "name", "replace"),
    [
        ("torch.nn.functional", "scaled_dot_product_attention", doubled),
        ("torch.nn.functional", "silu", doubled),
        ("diffusers.models.transformers.transformer_flux", "apply_rotary_emb", lambda old: lambda x, *_, **__: x),
        ("diffusers.models.transformers.transformer_flux", "dispatch_attention_fn", doubled),
        ("diffusers.models.embeddings", "get_timestep_embedding", doubled),
        ("diffusers.models.attention_dispatch", "the native backend", doubled),
    ],
)
def test_a_function_replaced_under_a_diffusers_transformer_is_seen(module: str, name: str, replace: Any) -> None:
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    owner: Any = __import__(module, fromlist=["_"])
    attribute: Any = name
    if name == "the native backend":
        owner, attribute = dispatch._AttentionBackendRegistry._backends, dispatch.AttentionBackendName.NATIVE
    old = owner[attribute] if isinstance(owner, dict) else getattr(owner, name)
    runner = bcg.wrap(tiny_flux())
    with bcg.warmup():
        runner(**flux_call())
    flux_check(runner, "replays")
    with standing(owner, attribute, replace(old)):
        flux_check(runner, "eager_calls")
    flux_check(runner, "replays")
