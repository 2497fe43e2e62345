"""The table of operations: what each means for a capture."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bcg.operations import BREAKS, FORBIDDEN, READS, Arguments, Kind, base_name, classify, draws_random, generator_of

aten = torch.ops.aten
X = torch.randn(4, 3)
MASK = torch.tensor([True, False, True, False])
DEVICE = torch.device("meta")  # stands for a GPU: `classify` looks at device types alone


class _Recorder(TorchDispatchMode):
    """Keeps the kind of every operation of a block, and which draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[tuple[str, Kind]] = []
        self.random: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.kinds.append((base_name(func), classify(func, args, kwargs, "cpu")))
        if draws_random(func, args, kwargs):
            self.random.append(base_name(func))
        return func(*args, **kwargs)

    def notable(self) -> list[tuple[str, Kind]]:
        return [pair for pair in self.kinds if pair[1] is not Kind.PLAIN]


def _kinds(function) -> list[tuple[str, Kind]]:
    with _Recorder() as recorder, torch.no_grad():
        function()
    return recorder.notable()


def _random(function) -> list[str]:
    with _Recorder() as recorder, torch.no_grad():
        function()
    return recorder.random


def _set(target, index, value):
    target[index] = value


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda: X.nonzero(), "aten::nonzero"),
        (lambda: torch.where(X > 0), "aten::nonzero"),
        (lambda: torch.argwhere(X > 0), "aten::nonzero"),
        (lambda: X[MASK], "aten::index"),
        (lambda: X.masked_select(X > 0), "aten::masked_select"),
        (lambda: torch.tensor([1, 1, 2]).unique(), "aten::_unique2"),
        (lambda: torch.tensor([[1, 1], [1, 1]]).unique(dim=0), "aten::unique_dim"),
        (lambda: torch.unique_consecutive(torch.tensor([1, 1, 2])), "aten::unique_consecutive"),
        (lambda: torch.bincount(torch.tensor([1, 1, 2])), "aten::bincount"),
        (lambda: X.repeat_interleave(torch.tensor([1, 2, 0, 1]), dim=0), "aten::repeat_interleave"),
        (lambda: torch.multinomial(torch.ones(3), 1), "aten::multinomial"),
        (lambda: torch.linalg.eigh(torch.eye(2)), "aten::_linalg_eigh"),
        (lambda: torch.linalg.svd(torch.eye(2)), "aten::_linalg_svd"),
        (lambda: _set(X.clone(), MASK, X[:2]), "aten::index_put_"),
        (lambda: torch.index_put(X, (MASK,), X[:2]), "aten::index_put"),
    ],
)
def test_a_shape_that_depends_on_data_is_a_break(function, name):
    assert (name, Kind.BREAK) in _kinds(function)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda: X[0, 0].item(), "aten::_local_scalar_dense"),
        (lambda: bool(X[0, 0] > 0), "aten::_local_scalar_dense"),
        (lambda: float(X[0, 0]), "aten::_local_scalar_dense"),
        (lambda: list(range(torch.tensor(3))), "aten::_local_scalar_dense"),
        (lambda: torch.equal(X, X + 0), "aten::equal"),
        (lambda: torch.allclose(X, X), "aten::allclose"),
        (lambda: X[: torch.tensor(2)], "aten::_local_scalar_dense"),
        (lambda: torch.zeros(torch.tensor(2)), "aten::_local_scalar_dense"),
    ],
)
def test_a_value_for_the_host_is_a_guard(function, name):
    assert _kinds(function) == [(name, Kind.READ)]


@pytest.mark.parametrize(
    "function",
    [
        lambda: X[torch.tensor([0, 2])],
        lambda: X[1:, ::2],
        lambda: X.gather(0, torch.zeros(1, 3, dtype=torch.int64)),
        lambda: X.masked_fill(X > 0, 0.0),
        lambda: _set(X.clone(), MASK, 0.0),
        lambda: _set(X.clone(), X > 0, torch.tensor(2.0)),
        lambda: _set(X.clone(), torch.tensor([1]), X[:1]),
        lambda: _set(X.clone(), 1, 5.0),
        lambda: X.repeat_interleave(2, dim=0),
        lambda: X.repeat_interleave(torch.tensor([1, 2, 0, 1]), dim=0, output_size=4),
        lambda: torch.where(X > 0, X, 0.0),
        lambda: F.linear(X, X),
        lambda: F.scaled_dot_product_attention(X[None], X[None], X[None]),
        lambda: X.sort(0),
        lambda: X.topk(2, dim=0),
        lambda: X.to(torch.bfloat16),
        lambda: X.clone().copy_(X),
        lambda: torch.tensor([1.0, 2.0]),
    ],
)
def test_what_a_graph_records_is_plain(function):
    assert _kinds(function) == []


def test_a_mask_with_several_values_or_accumulation_is_no_masked_fill():
    one, several = torch.tensor(1.0), torch.ones(2)
    put = aten.index_put_.default
    assert classify(put, (X[:, 0], [MASK], one), {}, "cpu") is Kind.PLAIN
    assert classify(put, (X[:, 0], [MASK], several), {}, "cpu") is Kind.BREAK
    assert classify(put, (X[:, 0], [MASK], one, True), {}, "cpu") is Kind.BREAK
    assert classify(put, (X[:, 0], [MASK], one), {"accumulate": True}, "cpu") is Kind.BREAK
    # One value that lies on the device is looked up through the mask's indices.
    on_device = torch.empty((), device=DEVICE)
    assert classify(put, (X[:, 0], [MASK], on_device), {}, "meta") is Kind.BREAK


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_other_memory_for_a_tensor_is_forbidden(name):
    packet = getattr(aten, name.removeprefix("aten::"))
    assert {classify(getattr(packet, overload), (X,), {}, "cpu") for overload in packet.overloads()} == {Kind.FORBIDDEN}


@pytest.mark.parametrize("name", sorted(BREAKS | READS))
def test_every_listed_operation_exists(name):
    space, _, operation = name.partition("::")
    assert hasattr(getattr(torch.ops, space), operation)


def test_copies_between_host_and_device_are_hoists_and_guards():
    device, host = torch.empty(2, device=DEVICE), torch.empty(2)
    to, copy = aten._to_copy.default, aten.copy_.default
    assert classify(to, (host,), {"device": DEVICE}, "meta") is Kind.HOIST
    assert classify(to, (device,), {"device": torch.device("cpu")}, "meta") is Kind.READ
    assert classify(to, (device,), {"dtype": torch.float16}, "meta") is Kind.PLAIN
    assert classify(to, (device,), {"device": DEVICE}, "meta") is Kind.PLAIN
    assert classify(copy, (device, host), {}, "meta") is Kind.HOIST
    assert classify(copy, (host, device), {}, "meta") is Kind.READ
    assert classify(copy, (device, device), {}, "meta") is Kind.PLAIN
    # Where the device is the host there is nothing to copy.
    assert classify(to, (host,), {"device": torch.device("cpu")}, "cpu") is Kind.PLAIN


def test_host_indices_and_values_are_hoists():
    device, index = torch.empty(4, device=DEVICE), torch.tensor([0, 1])
    assert classify(aten.index.Tensor, (device, [index]), {}, "meta") is Kind.HOIST
    assert classify(aten.index.Tensor, (device, [index.to(DEVICE)]), {}, "meta") is Kind.PLAIN
    put = aten.index_put_.default
    assert classify(put, (device, [index.to(DEVICE)], torch.empty(2)), {}, "meta") is Kind.HOIST
    assert classify(put, (device, [index.to(DEVICE)], torch.empty(())), {}, "meta") is Kind.PLAIN


def test_collectives_are_known_by_their_namespace():
    operator = torch.ops._c10d_functional.all_reduce.default
    assert classify(operator, (X, "sum", "0"), {}, "cpu") is Kind.COLLECTIVE


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: torch.rand(2), True),
        (lambda: torch.randn_like(X), True),
        (lambda: torch.randperm(4), True),
        (lambda: X.clone().normal_(), True),
        (lambda: torch.bernoulli(X.sigmoid()), True),
        (lambda: F.dropout(X, 0.5), True),
        (lambda: F.dropout(X, 0.5, training=False), False),
        (lambda: F.scaled_dot_product_attention(X[None], X[None], X[None]), False),
        (lambda: X.sort(0), False),
    ],
)
def test_random_operations_are_known(function, expected):
    assert bool(_random(function)) is expected


def test_attention_draws_random_numbers_for_dropout_alone():
    q = torch.randn(1, 2, 4, 8)
    operator = aten._scaled_dot_product_flash_attention.default
    assert torch.Tag.nondeterministic_seeded in operator.tags
    assert not draws_random(operator, (q, q, q), {})
    assert not draws_random(operator, (q, q, q, 0.0), {})
    assert draws_random(operator, (q, q, q, 0.1), {})
    assert draws_random(operator, (q, q, q), {"dropout_p": 0.1})


def test_an_explicit_generator_is_found_by_position_or_name():
    generator = torch.Generator()
    assert generator_of(aten.normal_.default, (X, 0.0, 1.0), {"generator": generator}) is generator
    assert generator_of(aten.normal_.default, (X,), {}) is None
    assert generator_of(aten.multinomial.default, (X, 1, False), {"generator": generator}) is generator


def test_arguments_are_found_by_name_wherever_they_stand():
    arguments = Arguments(aten.add.Tensor, (X, MASK), {"alpha": 2}, "cpu")
    assert arguments.get("self") is X
    assert arguments.get("other") is MASK
    assert arguments.get("alpha") == 2
    assert arguments.get("no such argument") is None
