"""A runner stands in for its module wherever anyone looks: types, attributes, copies, pickles, garbage."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.proxy import ModuleProxy


class Model(nn.Module):
    kind = "class attribute"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))
        self.scale = 2.0

    @property
    def size(self) -> int:
        return 4

    def forward(self, hidden: Tensor, shift: float = 0.0, *, flag: bool = False) -> Tensor:
        return self.linear(hidden) * self.scale + self.table + shift

    def helper(self) -> Any:
        return self


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def runner(model: Model) -> Any:
    runner = bcg.wrap(model)
    runner.capture(torch.ones(1, 4))
    return runner


def check_serves(runner: Any, module: nn.Module) -> None:
    """The runner replays after a capture, with the module's own results."""
    for _ in range(2):
        x = torch.randn(1, 4)
        assert runner.capture(x)
        before = runner.stats.replays
        assert torch.equal(runner(x), module(x))
        assert runner.stats.replays == before + 1


# -- types -------------------------------------------------------------------------------------------------------------


def test_a_runner_is_an_instance_of_its_modules_class_and_of_its_own(runner: Any) -> None:
    assert isinstance(runner, Model)
    assert isinstance(runner, nn.Module)
    assert isinstance(runner, bcg.BreakableCudaGraphRunner)
    assert isinstance(runner, bcg.BaseRunner)
    assert not isinstance(runner, nn.Linear)
    assert runner.__class__ is Model
    assert issubclass(runner.__class__, nn.Module)
    assert type(runner) is bcg.BreakableCudaGraphRunner


def test_a_runner_equals_and_hashes_as_its_module(runner: Any, model: Model) -> None:
    assert runner == model
    assert hash(runner) == hash(model)


@pytest.mark.parametrize("wrong", [None, 3, lambda x: x, Model, torch.ones(2), [nn.Linear(1, 1)]], ids=repr)
def test_what_is_no_module_is_refused_with_its_type(wrong: Any) -> None:
    with pytest.raises(bcg.NotAModuleError, match=type(wrong).__name__) as caught:
        bcg.wrap(wrong)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("make", [nn.Module, nn.ModuleList, lambda: nn.ModuleDict({"a": nn.ReLU()})])
def test_a_module_that_cannot_be_called_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(bcg.NotAModuleError, match="has no forward"):
        bcg.wrap(make())


def test_a_forward_set_on_the_instance_makes_a_module_callable() -> None:
    module = nn.Module()
    module.forward = lambda x: x * 2  # type: ignore[method-assign]
    check_serves(bcg.wrap(module), module)


def test_unwrap_gives_the_module_and_leaves_other_modules_alone(runner: Any, model: Model) -> None:
    assert bcg.unwrap(runner) is model
    assert bcg.unwrap(model) is model
    assert runner.transformer is model


def test_a_runner_is_wrapped_anew_around_the_module_and_not_around_itself(runner: Any, model: Model) -> None:
    second = bcg.wrap(runner, max_entries=3)
    assert bcg.unwrap(second) is model
    assert not isinstance(second.__wrapped__, ModuleProxy)
    assert (len(second.entries), len(runner.entries)) == (0, 1)


# -- attributes --------------------------------------------------------------------------------------------------------


def test_attributes_are_read_from_the_module(runner: Any, model: Model) -> None:
    assert runner.scale == 2.0
    assert runner.size == 4
    assert runner.kind == "class attribute"
    assert runner.linear is model.linear
    assert runner.table is model.table
    assert runner.helper() is model
    assert hasattr(runner, "linear")
    assert not hasattr(runner, "missing")
    with pytest.raises(AttributeError, match="missing"):
        _ = runner.missing


def test_attributes_are_written_to_the_module(runner: Any, model: Model) -> None:
    runner.scale = 3.0
    runner.extra = "new"
    runner.linear = nn.Linear(4, 4)
    runner.register_buffer("more", torch.ones(1))
    assert (model.scale, model.extra) == (3.0, "new")
    assert model._modules["linear"] is runner.linear
    assert "more" in dict(model.named_buffers())
    check_serves(runner, model)


def test_attributes_are_deleted_from_the_module(runner: Any, model: Model) -> None:
    runner.extra = 1
    del runner.extra
    assert not hasattr(model, "extra")
    with pytest.raises(AttributeError):
        del runner.missing


def test_the_runners_own_attributes_do_not_reach_the_module(runner: Any, model: Model) -> None:
    assert runner._self_config.max_entries == 32
    assert not [name for name in (*vars(model), *dir(model)) if name.startswith("_self_")]


def test_the_signature_of_forward_is_the_modules(runner: Any, model: Model) -> None:
    assert inspect.signature(runner.forward) == inspect.signature(model.forward)
    assert list(inspect.signature(runner.forward).parameters) == ["hidden", "shift", "flag"]


def test_lists_of_parameters_and_state_are_the_modules(runner: Any, model: Model) -> None:
    assert list(runner.state_dict()) == list(model.state_dict())
    assert [id(p) for p in runner.parameters()] == [id(p) for p in model.parameters()]
    assert [name for name, _ in runner.named_modules()] == ["", "linear"]
    other = Model()
    runner.load_state_dict(other.state_dict())
    assert torch.equal(model.linear.weight, other.linear.weight)
    check_serves(runner, other)


def test_a_runner_registers_as_a_submodule(runner: Any, model: Model) -> None:
    class Pipeline(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    pipeline = Pipeline(runner)
    assert list(pipeline.state_dict()) == [f"inner.{name}" for name in model.state_dict()]
    assert dict(pipeline.named_modules())["inner.linear"] is model.linear
    assert type(pipeline.inner) is bcg.BreakableCudaGraphRunner
    for _ in range(2):
        x = torch.randn(1, 4)
        before = runner.stats.replays
        assert torch.equal(pipeline(x), model(x))
        assert runner.stats.replays == before + 1
    pipeline.double()
    assert model.linear.weight.dtype == torch.float64


def test_hooks_registered_through_the_runner_run(runner: Any, model: Model) -> None:
    handle = runner.register_forward_hook(lambda module, args, output: output * 10)
    x = torch.randn(1, 4)
    with_hook = runner(x)
    handle.remove()
    assert torch.equal(with_hook, model(x) * 10)
    check_serves(runner, model)


CHAINED: dict[str, Callable[[Any], Any]] = {
    "to": lambda r: r.to("cpu"),
    "to dtype": lambda r: r.to(torch.float64),
    "eval": lambda r: r.eval(),
    "train": lambda r: r.train(False),
    "double": lambda r: r.double(),
    "bfloat16": lambda r: r.bfloat16(),
    "half": lambda r: r.half(),
    "float": lambda r: r.float(),
    "cpu": lambda r: r.cpu(),
    "requires_grad_": lambda r: r.requires_grad_(False),
    "apply": lambda r: r.apply(lambda _: None),
    "type": lambda r: r.type(torch.float64),
    "share_memory": lambda r: r.share_memory(),
}


@pytest.mark.parametrize("name", CHAINED)
def test_methods_that_return_the_module_return_the_runner(name: str, runner: Any) -> None:
    assert CHAINED[name](runner) is runner


def test_a_moved_module_is_served_in_its_new_dtype(runner: Any, model: Model) -> None:
    runner.to(torch.float64)
    for _ in range(2):
        x = torch.randn(1, 4, dtype=torch.float64)
        assert runner.capture(x)
        assert torch.equal(runner(x), model(x))
    assert runner(x).dtype == torch.float64
    runner.to(torch.float32)
    check_serves(runner, model)


def test_the_repr_says_the_class_graphs_breaks_and_replays(runner: Any) -> None:
    runner(torch.ones(1, 4))
    assert repr(runner) == "BreakableCudaGraphRunner(Model, 1 graphs, 0 breaks, 1 replays)"
    assert repr(bcg.EagerRunner(Model())) == "EagerRunner(Model)"


# -- copies ------------------------------------------------------------------------------------------------------------


def by_pickle(runner: Any) -> Any:
    return pickle.loads(pickle.dumps(runner))


def by_torch_save(runner: Any) -> Any:
    file = io.BytesIO()
    torch.save(runner, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save], ids=lambda f: f.__name__)
def test_a_deep_copy_has_a_module_of_its_own_and_no_graphs(
    duplicate: Callable[[Any], Any], runner: Any, model: Model
) -> None:
    twin = duplicate(runner)
    assert type(twin) is bcg.BreakableCudaGraphRunner
    assert bcg.unwrap(twin) is not model
    assert (len(twin.entries), twin.stats.calls) == (0, 0)
    assert len(runner.entries) == 1
    twin.linear.weight.zero_()
    twin.scale = 5.0
    assert bool(model.linear.weight.abs().sum() > 0)
    assert model.scale == 2.0
    check_serves(twin, bcg.unwrap(twin))
    check_serves(runner, model)
    assert not torch.equal(twin(torch.ones(1, 4)), runner(torch.ones(1, 4)))


def test_a_shallow_copy_shares_the_weights_and_no_graphs(runner: Any, model: Model) -> None:
    twin = copy.copy(runner)
    assert bcg.unwrap(twin) is not model
    assert twin.linear is model.linear
    assert len(twin.entries) == 0
    check_serves(twin, model)
    check_serves(runner, model)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, by_pickle], ids=lambda f: f.__name__)
def test_a_copy_keeps_the_config(duplicate: Callable[[Any], Any]) -> None:
    runner = bcg.wrap(Model(), max_entries=3, verify="close")
    assert duplicate(runner)._self_config == runner._self_config


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, by_pickle], ids=lambda f: f.__name__)
def test_a_copy_of_an_eager_runner_keeps_its_config(duplicate: Callable[[Any], Any]) -> None:
    runner = bcg.EagerRunner(Model(), bcg.RunnerConfig(max_entries=3))
    twin = duplicate(runner)
    assert type(twin) is bcg.EagerRunner
    assert twin._self_config == runner._self_config
    assert bcg.unwrap(twin) is not bcg.unwrap(runner)


def always() -> bool:
    return True


def doubled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(arg * 2 for arg in args), kwargs


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, by_pickle, by_torch_save], ids=lambda f: f.__name__)
def test_a_copy_keeps_what_its_host_gave(duplicate: Callable[[Any], Any], model: Model) -> None:
    runner = bcg.wrap(
        model, capture_when=always, barrier=gc.isenabled, capture_context=torch.no_grad, prepare=doubled, max_entries=3
    )
    twin = duplicate(runner)
    assert twin._self_capture_when is always
    assert twin._self_seams == runner._self_seams
    assert twin._self_config == runner._self_config
    assert twin.pool is not runner.pool
    x = torch.randn(1, 4)
    for _ in range(2):
        assert torch.equal(twin(x), model(x * 2)), "arguments are prepared as the runner's are"
    assert (twin.stats.capture_calls, twin.stats.replays) == (1, 1)


def test_a_callable_that_cannot_be_pickled_is_not_lost_without_a_word(model: Model) -> None:
    runner = bcg.wrap(model, prepare=lambda args, kwargs: (args, kwargs))
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(runner)
    assert type(pickle.loads(pickle.dumps(bcg.unwrap(runner)))) is Model


def test_a_deep_copy_of_a_tree_keeps_one_runner_one(runner: Any) -> None:
    one, other = copy.deepcopy([runner, runner])
    assert one is other


def test_a_deep_copy_of_a_parent_module_has_a_runner_inside(runner: Any, model: Model) -> None:
    parent = nn.Sequential(runner)
    twin = copy.deepcopy(parent)
    assert type(twin[0]) is bcg.BreakableCudaGraphRunner
    assert bcg.unwrap(twin[0]) is not model


# -- garbage -----------------------------------------------------------------------------------------------------------


def test_a_deleted_runner_frees_its_module_and_its_graphs() -> None:
    module = Model()
    runner = bcg.wrap(module)
    with bcg.warmup():
        for size in (1, 2):
            runner(torch.randn(size, 4))
            runner(torch.randn(size, 4))
    runner.explain(torch.ones(7, 4))
    entries = list(runner.entries.values())
    dead = [weakref.ref(thing) for thing in (module, module.linear.weight, entries[0], entries[1].graph)]
    del module, runner, entries
    gc.collect()
    assert [reference() for reference in dead] == [None] * 4


def test_a_runner_whose_capture_was_rejected_frees_its_module() -> None:
    class Growing(Model):
        def forward(self, hidden: Tensor, shift: float = 0.0, *, flag: bool = False) -> Tensor:
            self.scale += 1
            return hidden * self.scale

    module = Growing()
    runner = bcg.wrap(module)
    assert not runner.capture(torch.ones(1, 4))
    dead = weakref.ref(module)
    del module, runner
    gc.collect()
    assert dead() is None


def test_a_runner_keeps_none_of_its_callers_tensors_alive(runner: Any) -> None:
    x = torch.randn(3, 4)
    with bcg.warmup():
        y = runner(x)
    z = runner(x)
    dead = [weakref.ref(tensor) for tensor in (x, y, z)]
    del x, y, z
    assert [reference() for reference in dead] == [None] * 3


def test_reset_frees_the_entries(runner: Any) -> None:
    [entry] = runner.entries.values()
    dead = weakref.ref(entry)
    del entry
    runner.reset()
    gc.collect()
    assert dead() is None
