"""One call has one signature however it is spelled; two calls that a graph could not serve alike have two."""

from __future__ import annotations

import enum
import functools
import gc
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bcg.errors import ConfigError
from bcg.signature import (
    Call,
    CallBinder,
    Signature,
    describe_difference,
    distance,
    register_key,
    unregister_key,
)


def forward(hidden_states: Any, timestep: Any = None, guidance: Any = None, *, kwargs: Any = None) -> None:
    """Stand for a transformer's forward."""


def variadic(first: Any, /, second: Any = 2, *more: Any, option: Any = 3, **others: Any) -> None:
    """Take everything that Python can take."""


BINDER = CallBinder(forward)


def call(*args: Any, **kwargs: Any) -> Call:
    made = BINDER.call(args, kwargs)
    assert made is not None
    return made


def sign(*args: Any, **kwargs: Any) -> Signature:
    made = call(*args, **kwargs)
    assert made.signature is not None, made.refusal
    return made.signature


def refusal(*args: Any, **kwargs: Any) -> str:
    made = call(*args, **kwargs)
    assert made.signature is None
    assert made.refusal is not None
    return made.refusal


def x(*shape: int) -> torch.Tensor:
    return torch.ones(*shape or (2, 3))


# --- binding


def test_positional_keyword_and_default_spellings_are_one_signature() -> None:
    spellings = [
        sign(x(), x(1)),
        sign(x(), timestep=x(1)),
        sign(timestep=x(1), hidden_states=x()),
        sign(x(), x(1), None),
        sign(hidden_states=x(), timestep=x(1), guidance=None, kwargs=None),
    ]
    assert len(set(spellings)) == 1
    assert {hash(signature) for signature in spellings} == {hash(spellings[0])}


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((1, 2, 3, 4), {}),
        ((1,), {"hidden_states": 1}),
        ((1,), {"unknown": 1}),
    ],
    ids=["missing", "too many", "twice", "unknown"],
)
def test_a_call_that_does_not_bind_is_none(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        forward(*args, **kwargs)
    assert BINDER.bind(args, kwargs) is None
    assert BINDER.call(args, kwargs) is None


@pytest.mark.parametrize(
    ("args", "kwargs", "bound"),
    [
        ((1,), {}, {"first": 1, "second": 2, "option": 3}),
        ((1, 5, 6, 7), {}, {"first": 1, "second": 5, "option": 3, "*args": (6, 7)}),
        ((1,), {"z": 1, "a": 2}, {"first": 1, "second": 2, "option": 3, "a": 2, "z": 1}),
        ((1,), {"option": 4, "second": 5}, {"first": 1, "second": 5, "option": 4}),
    ],
)
def test_variable_arguments_bind_in_one_order(args: Any, kwargs: Any, bound: dict[str, Any]) -> None:
    arguments = CallBinder(variadic).bind(args, kwargs)
    assert list((arguments or {}).items()) == list(bound.items())


@pytest.mark.parametrize("kwargs", [{"first": 1}, {"first": 2, "option": 1}])
def test_a_positional_only_parameter_is_not_bound_by_name(kwargs: dict[str, Any]) -> None:
    assert CallBinder(variadic).bind((), kwargs) is None
    assert CallBinder(variadic).bind((1,), kwargs) is None


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {}),
        ((1, 2), {"option": 3}),
        ((1, 2, 3, 4), {"z": 5, "a": 6}),
        ((1,), {"second": 2}),
    ],
)
def test_rebuild_keeps_the_callers_spelling(args: Any, kwargs: Any) -> None:
    made = CallBinder(variadic).call(args, kwargs)
    assert made is not None
    assert made.rebuild([]) == (args, kwargs)


def test_rebuild_puts_other_tensors_into_new_containers() -> None:
    tensor, other, options = x(), x(), {"mask": [x(1)]}
    made = call(tensor, guidance=tensor, kwargs=options)
    args, kwargs = made.rebuild([other, x(2)])
    assert args[0] is kwargs["guidance"] is other
    assert kwargs["kwargs"] is not options
    assert kwargs["kwargs"]["mask"][0].shape == (2,)


def test_a_call_without_tensors_holds_none_alive_and_can_rebuild() -> None:
    tensor = x()
    gone = weakref.ref(tensor)
    kept = call(tensor, 1, kwargs={"mask": tensor}).without_tensors()
    del tensor
    gc.collect()
    assert gone() is None
    args, kwargs = kept.rebuild([x(1)])
    assert args[1] == 1
    assert args[0] is kwargs["kwargs"]["mask"]


def test_decorators_are_looked_through() -> None:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        forward(*args, **kwargs)

    assert CallBinder(wrapper).bind((1,), {}) == BINDER.bind((1,), {})


def test_the_forward_of_a_diffusers_transformer_binds() -> None:
    diffusers = pytest.importorskip("diffusers")
    arguments = CallBinder(diffusers.FluxTransformer2DModel.forward).bind((None, 1), {"return_dict": False})
    assert arguments is not None
    assert list(arguments)[:2] == ["self", "hidden_states"]
    assert "joint_attention_kwargs" in arguments


def test_a_function_without_a_readable_signature_takes_anything() -> None:
    made = CallBinder(torch._C._nn.gelu).call((x(), 1), {"b": 2, "a": 3})
    assert made is not None
    assert list(made.arguments) == ["*args", "a", "b"]
    assert made.rebuild(made.tensors)[1] == {"b": 2, "a": 3}


def test_the_binder_fits_until_forward_is_another_function() -> None:
    module = torch.nn.Linear(2, 2)
    binder = CallBinder(module.forward)
    assert binder.fits(module.forward)
    assert binder.fits(torch.nn.Linear(3, 3).forward)
    module.forward = lambda input: input  # type: ignore[method-assign]
    assert not binder.fits(module.forward)


# --- tensors


@pytest.mark.parametrize(
    "other",
    [x(3, 2), x(6), x().double(), x().to("meta"), x(3, 2).t(), None, 1.0],
    ids=["shape", "rank", "dtype", "device", "transposed", "none", "number"],
)
def test_another_kind_of_tensor_is_another_signature(other: object) -> None:
    assert sign(x()) != sign(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: x(2, 6)[:, ::2],
        lambda: x(2, 4)[:, :3],
        lambda: torch.ones(1).expand(2, 3),
        lambda: x(3, 4)[:, :2].t(),
        lambda: torch.ones(8).as_strided((2, 3), (1, 1)),
    ],
    ids=["step", "slice", "expanded", "transposed slice", "overlapping"],
)
def test_a_tensor_that_is_not_dense_counts_as_contiguous(make: Callable[[], torch.Tensor]) -> None:
    assert sign(make()) == sign(x())


@pytest.mark.parametrize(
    "shape", [(1, 4, 6), (2, 1, 3), (4, 1), (1, 1), (0, 3), (), (2, 1, 1, 3), (2, 3, 4, 5)], ids=str
)
def test_the_static_stride_keeps_the_order_of_dimensions_of_a_dense_tensor(shape: tuple[int, ...]) -> None:
    for dimensions in itertools.permutations(range(len(shape))):
        view = torch.ones(shape).permute(dimensions)
        (spec,) = sign(view).tensor_specs
        static = torch.empty_strided(spec.shape, spec.stride)
        assert static.is_contiguous() == view.is_contiguous()
        assert sign(static) == sign(view)
        if view.numel():
            assert [s for s, n in zip(spec.stride, view.shape, strict=True) if n > 1] == [
                s for s, n in zip(view.stride(), view.shape, strict=True) if n > 1
            ]


def test_strides_of_single_element_dimensions_do_not_count() -> None:
    odd = torch.ones(6).as_strided((1, 2, 3), (77, 3, 1))
    assert sign(odd) == sign(x(1, 2, 3))
    odd_transposed = torch.ones(6).as_strided((1, 3, 2), (77, 1, 3))
    assert sign(odd_transposed) == sign(x(1, 2, 3).transpose(1, 2))


def test_a_tensor_spec_describes_the_static_input() -> None:
    (spec,) = sign(x(3, 2).t()).tensor_specs
    assert (spec.shape, spec.dtype, spec.device, spec.stride) == ((2, 3), torch.float32, "cpu", (1, 2))


def test_tensor_values_do_not_count() -> None:
    assert sign(torch.zeros(2)) == sign(torch.ones(2))


def test_required_gradients_count_only_where_gradients_are_on() -> None:
    wants = x().requires_grad_()
    assert sign(wants) != sign(x())
    with torch.no_grad():
        assert sign(wants) == sign(x())


def test_lazy_conjugates_and_parameters_are_told_apart() -> None:
    value = torch.ones(2, dtype=torch.complex64)
    with torch.no_grad():
        assert len({sign(value), sign(value.conj()), sign(torch.nn.Parameter(value))}) == 3
        assert sign(value.conj().imag) != sign(value.imag)


def test_the_same_tensor_twice_is_another_signature_than_two() -> None:
    tensor = x()
    assert sign(tensor, tensor) != sign(tensor, x())
    assert sign(tensor, tensor) == sign(*[x()] * 2)


class RunsPython(torch.Tensor):
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: x().to_sparse(), "sparse_coo"),
        (lambda: torch.nested.nested_tensor([x(1), x(2)]), "nested"),
        (lambda: x().as_subclass(RunsPython), "RunsPython"),
    ],
    ids=["sparse", "nested", "subclass"],
)
def test_a_tensor_without_a_static_input_is_refused_by_name(make: Callable[[], torch.Tensor], word: str) -> None:
    assert word in refusal(kwargs={"m": [make()]}, hidden_states=1)
    assert "argument `kwargs['m'][0]`" in refusal(kwargs={"m": [make()]}, hidden_states=1)


# --- values


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Bits(enum.Flag):
    A = 1
    B = 2


VALUES: list[Any] = [
    None, True, False, 1, 0, 1.0, 0.0, -0.0, float("nan"), float("inf"), 1j, complex(0.0, -0.0), 0j, "1", b"1", "",
    Color.RED, Color.BLUE, Bits.A, Bits.A | Bits.B, torch.float32, torch.float16, torch.device("cpu"),
    torch.device("meta"), torch.strided, torch.channels_last, torch.Size([1]), (1,), [1], [True], [], (), {}, {"a": 1},
    slice(1), slice(1.0), slice(0, 1), range(3), range(0, 3, 2), {1}, {True}, frozenset({1}), set(), ..., int, Color,
    torch.relu, torch.nn.functional.gelu, forward, variadic,
]  # fmt: skip


def test_values_are_told_apart_by_type_and_value() -> None:
    signatures = [sign(value) for value in VALUES]
    assert len(set(signatures)) == len(VALUES)


def test_values_made_anew_are_the_same() -> None:
    pairs = [
        (float("nan"), -float("nan") * 1.0),
        ("a" * 50, "".join(["a"] * 50)),
        (10**20, int("1" + "0" * 20)),
        ({1, 2}, {2, 1}),
        (slice(1, 2), slice(1, 2)),
        (torch.Size([1, 2]), torch.ones(1, 2).shape),
    ]
    for one, other in pairs:
        assert sign(one) == sign(other)


def test_numpy_scalars_count_by_type_and_value() -> None:
    numpy = pytest.importorskip("numpy")
    values = [numpy.float32(1), numpy.float64(1), numpy.float64(2), numpy.int64(1), numpy.bool_(True), 1, 1.0]
    assert len({sign(value) for value in values}) == len(values)
    assert sign(numpy.float64(2)) == sign(numpy.float64(2))


def test_keyword_order_does_not_count_but_the_order_inside_a_dict_does() -> None:
    assert sign(hidden_states=1, guidance=2) == sign(guidance=2, hidden_states=1)
    assert sign(1, kwargs={"a": 1, "b": 2}) != sign(1, kwargs={"b": 2, "a": 1})


@dataclass
class Options:
    scale: float
    mask: torch.Tensor


def test_values_and_tensors_inside_a_dataclass_count() -> None:
    assert sign(Options(1.0, x())) == sign(Options(1.0, x()))
    assert len({sign(Options(1.0, x())), sign(Options(2.0, x())), sign(Options(1.0, x(1)))}) == 3


def local_function() -> Callable[[], int]:
    number = 1
    return lambda: number


@pytest.mark.parametrize(
    "make",
    [
        lambda: (number for number in range(3)),
        torch.Generator,
        lambda: torch.nn.Linear(1, 1),
        local_function,
        lambda: x().sum,
        lambda: functools.partial(forward, 1),
    ],
    ids=["generator", "torch generator", "module", "closure", "method", "partial"],
)
def test_an_object_without_a_value_is_refused_and_the_way_out_is_named(make: Callable[[], object]) -> None:
    reason = refusal(x(), kwargs={"inner": (1, make())})
    assert reason.startswith("argument `kwargs['inner'][1]` is ")
    assert "bcg.register_key" in reason


def test_a_numpy_array_is_refused() -> None:
    numpy = pytest.importorskip("numpy")
    assert "numpy.ndarray" in refusal(numpy.ones(2))


def test_a_sentinel_is_itself() -> None:
    one, other = object(), object()
    assert sign(one) == sign(one)
    assert sign(one) != sign(other)


def test_an_argument_of_72000_elements_is_refused_by_name() -> None:
    assert "argument `guidance` has more elements" in refusal(x(), guidance=[[0] * 1000 for _ in range(72)])


def test_an_unhashable_part_is_refused_and_does_not_raise() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> None: ...

    assert "hash" in refusal(defaultdict(Unhashable()))


# --- registered keys


class Schedule:
    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = torch.Generator()


@pytest.fixture
def registered() -> Iterator[None]:
    register_key(Schedule, lambda schedule: schedule.name)
    yield
    unregister_key(Schedule)


@pytest.mark.usefixtures("registered")
def test_a_registered_type_is_compared_by_its_key() -> None:
    assert sign(Schedule("a")) == sign(Schedule("a"))
    assert sign(Schedule("a")) != sign(Schedule("b"))


@pytest.mark.usefixtures("registered")
def test_an_unhashable_registered_key_is_a_refusal() -> None:
    assert "no hashable key (TypeError" in refusal(Schedule(["list"]))  # type: ignore[arg-type]


@pytest.mark.usefixtures("registered")
def test_a_key_function_that_raises_is_a_refusal() -> None:
    broken = Schedule("a")
    del broken.name
    assert "no hashable key (AttributeError" in refusal(broken)


def test_registering_reaches_types_that_were_seen_before() -> None:
    assert "argument `hidden_states.lock`" in refusal(Schedule("a"))
    register_key(Schedule, lambda schedule: schedule.name)
    try:
        assert sign(Schedule("a"))
    finally:
        unregister_key(Schedule)
    assert refusal(Schedule("a"))


@pytest.mark.parametrize("kind", [int, list, torch.Tensor, float])
def test_a_type_that_has_a_key_already_cannot_be_registered(kind: type) -> None:
    with pytest.raises(ConfigError, match="no key function is needed"):
        register_key(kind, str)


# --- ambient state


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_state_around_the_call_is_part_of_the_signature(around: Callable[[], Any]) -> None:
    outside = sign(x())
    with around():
        inside = sign(x())
    assert inside != outside
    assert describe_difference(outside, inside)


# --- differences


def test_differences_name_argument_expected_and_got() -> None:
    expected = sign(x(1), timestep=x(1), guidance=None, kwargs=[7, 8, 9])
    got = sign(x(1), timestep=x(1).bfloat16(), guidance=x(1), kwargs=None)
    assert describe_difference(expected, got) == [
        "timestep: expected float32[1] on cpu, got bfloat16[1] on cpu",
        "guidance: expected None, got float32[1]",
        "kwargs: expected list of 3, got None",
    ]


@pytest.mark.parametrize(
    ("expected", "got", "line"),
    [
        ({"a": 1}, {"b": 1}, "kwargs['a']: expected 1, got nothing"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "kwargs: expected keys in the order ['a'], ['b'], got ['b'], ['a']"),
        ([1, 2], [1, 2, 3], "kwargs: expected list of 2, got list of 3"),
        ([1, 2], (1, 2), "kwargs: expected list of 2, got tuple of 2"),
        ([1, 2.5], [1, 3.5], "kwargs[1]: expected 2.5, got 3.5"),
        ("read", "write", "kwargs: expected 'read', got 'write'"),
        (1, True, "kwargs: expected 1, got True"),
        ({1: 2}, {True: 2}, "kwargs: expected dict of 1, got dict of 1 with other keys or in another order"),
        (x(2, 3), x(3, 2).t(), "with strides (3, 1), got float32[2,3] on cpu with strides (1, 2)"),
        (x(2), torch.nn.Parameter(x(2), False), "(plain), got float32[2] on cpu (Parameter)"),
    ],
)
def test_each_kind_of_difference_reads_well(expected: object, got: object, line: str) -> None:
    lines = describe_difference(sign(1, kwargs=expected), sign(1, kwargs=got))
    assert line in lines[0]


def test_a_shared_tensor_is_a_difference() -> None:
    tensor = x(1)
    lines = describe_difference(sign(tensor, tensor), sign(tensor, x(1)))
    assert lines == ["timestep: expected the tensor of hidden_states, got the tensor of timestep"]


@pytest.mark.parametrize("value", [*VALUES, x(), [x(), {"a": Options(1.0, x())}]], ids=repr)
def test_equal_signatures_have_no_difference_and_unequal_ones_some(value: object) -> None:
    assert describe_difference(sign(value), sign(value)) == []
    assert distance(sign(value), sign(value)) == 0
    assert distance(sign(value), sign(x(9, 9), 1)) > 0


def test_the_nearest_signature_is_the_one_that_differs_least() -> None:
    got = sign(x(1, 64), x(1))
    far_to_near = [sign(None, None), sign(x(1, 64), None), sign(x(1, 64), x(1).half()), sign(x(1, 32), x(1)), got]
    distances = [distance(expected, got) for expected in far_to_near]
    assert distances == sorted(distances, reverse=True)
    assert len(set(distances)) == len(distances)


def test_the_summary_is_one_line_of_tensors() -> None:
    assert sign(x(1, 2), 3, x(1).half()).summary() == "hidden_states float32[1,2], guidance float16[1]"


def test_signatures_of_many_classes_do_not_keep_them_all_alive() -> None:
    kept = []
    for _ in range(1200):
        kind = type("Local", (), {"__init__": lambda self: setattr(self, "a", 1)})
        kept.append(weakref.ref(kind))
        sign(kind())
        del kind
    gc.collect()
    assert any(reference() is None for reference in kept)
