"""Static inputs hold what a call passes, at addresses that stay, and share memory where that is safe."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bcg.signature import CallBinder, TensorSpec
from bcg.static_inputs import StaticArena, StaticInputs

CPU = torch.device("cpu")


def specs_of(*tensors: Tensor) -> list[TensorSpec]:
    """Take the specs from the signature of a call, as a capture does."""

    def forward(*args: Tensor) -> None: ...

    call = CallBinder(forward).call(tensors, {})
    assert call is not None
    assert call.signature is not None
    return call.signature.tensor_specs


def static_for(*tensors: Tensor, arena: StaticArena | None = None) -> StaticInputs:
    return StaticInputs(specs_of(*tensors), CPU, arena or StaticArena())


FORMS = {
    "contiguous": lambda: torch.randn(2, 3),
    "transposed": lambda: torch.randn(3, 2).t(),
    "channels last": lambda: torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "slice": lambda: torch.randn(4, 6)[::2, 1:3],
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "stride 0": lambda: torch.randn(()).expand(5),
    "overlapping": lambda: torch.randn(6).as_strided((3, 3), (1, 1)),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.empty(0, 3),
    "bfloat16": lambda: torch.randn(3).bfloat16(),
    "integers": lambda: torch.randint(9, (3,)),
    "mask": lambda: torch.rand(3) > 0.5,
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_loaded_input_equals_the_live_one_and_stays_where_it_is(name: str) -> None:
    make = FORMS[name]
    first = make()
    inputs = static_for(first)
    address = inputs.tensors[0].data_ptr()
    for live in (first, make(), make()):
        inputs.load([live])
        assert torch.equal(inputs.tensors[0], live.resolve_conj())
        assert inputs.tensors[0].dtype == live.dtype
        assert inputs.tensors[0].data_ptr() == address


@pytest.mark.parametrize("name", ["contiguous", "transposed", "channels last"])
def test_a_dense_layout_is_kept(name: str) -> None:
    live = FORMS[name]()
    assert static_for(live).tensors[0].stride() == live.stride()


@pytest.mark.parametrize("shape", [(1, 8, 4, 4), (2, 1, 4, 4), (1, 8, 1, 1), (1, 8, 1, 4, 4), (2, 8, 1, 4, 4)], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_kernels_take_a_static_input_for_channels_last_exactly_where_they_take_the_live_one(
    shape: tuple[int, ...], last: bool
) -> None:
    # Dimensions of one element count for c10::is_channels_last_strides; a batch of one is what a pipeline passes.
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)] if last else torch.contiguous_format
    live = torch.empty(shape).to(memory_format=memory_format).copy_(torch.randn(shape))
    resample = {4: torch.nn.functional.adaptive_avg_pool2d, 5: torch.nn.functional.adaptive_avg_pool3d}[len(shape)]
    inputs = static_for(live)
    inputs.load([live])
    assert resample(inputs.tensors[0], 4).stride() == resample(live, 4).stride()


@pytest.mark.parametrize("name", ["slice", "expanded", "stride 0", "overlapping"])
def test_a_layout_with_gaps_or_overlaps_becomes_contiguous(name: str) -> None:
    assert static_for(FORMS[name]()).tensors[0].is_contiguous()


def test_nothing_of_the_live_tensors_is_kept() -> None:
    live = torch.ones(3)
    inputs = static_for(live)
    inputs.load([live])
    live.fill_(9.0)
    assert inputs.tensors[0].tolist() == [1.0] * 3


def test_loading_reads_inference_tensors_and_writes_under_inference_mode() -> None:
    with torch.inference_mode():
        live = torch.ones(3)
        inputs = static_for(live)
        inputs.load([live])
    assert not inputs.tensors[0].is_inference()
    inputs.load([torch.full((3,), 2.0)])
    assert inputs.tensors[0].tolist() == [2.0] * 3


def test_a_call_without_tensors_loads_nothing() -> None:
    inputs = StaticInputs([], CPU, StaticArena())
    inputs.load([])
    assert (inputs.tensors, inputs.bytes(), inputs.owned_bytes()) == ([], 0, 0)


def test_floats_of_one_slot_share_memory_of_the_largest_first() -> None:
    arena = StaticArena()
    large = static_for(torch.ones(100), arena=arena)
    small = static_for(torch.ones(10), arena=arena)
    assert small.tensors[0].data_ptr() == large.tensors[0].data_ptr()
    assert arena.bytes() == 400


def test_a_static_input_is_no_view() -> None:
    """Compiled code for dynamic shapes would be made again for what the view is a view of."""
    assert [tensor._base for tensor in static_for(torch.randn(2, 3), torch.ones(2, dtype=torch.int64)).tensors] == [
        None,
        None,
    ]


def test_a_larger_input_leaves_the_memory_of_earlier_entries_alone() -> None:
    arena = StaticArena()
    small = static_for(torch.ones(10), arena=arena)
    small.load([torch.ones(10)])
    large = static_for(torch.ones(100), arena=arena)
    large.load([torch.zeros(100)])
    assert small.tensors[0].tolist() == [1.0] * 10


def test_different_slots_of_one_call_do_not_share() -> None:
    inputs = static_for(torch.ones(3), torch.zeros(3))
    inputs.load([torch.ones(3), torch.zeros(3)])
    assert inputs.tensors[0].tolist() == [1.0] * 3
    assert inputs.tensors[1].tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_what_steers_shapes_has_memory_of_its_own(dtype: torch.dtype) -> None:
    arena = StaticArena()
    one = static_for(torch.ones(3, dtype=dtype), arena=arena)
    other = static_for(torch.ones(3, dtype=dtype), arena=arena)
    assert one.tensors[0].data_ptr() != other.tensors[0].data_ptr()
    assert arena.bytes() == 0
    assert one.owned_bytes() == one.bytes() == 3 * dtype.itemsize


def test_one_slot_serves_dtypes_of_other_sizes() -> None:
    arena = StaticArena()
    wide = static_for(torch.ones(4, dtype=torch.float64), arena=arena)
    narrow = static_for(torch.ones(4, dtype=torch.bfloat16), arena=arena)
    for value in (1.0, 2.0):
        wide.load([torch.full((4,), value, dtype=torch.float64)])
        assert wide.tensors[0].tolist() == [value] * 4
        narrow.load([torch.full((4,), value + 1).bfloat16()])
        assert narrow.tensors[0].tolist() == [value + 1] * 4


def test_clearing_the_arena_leaves_entries_what_they_hold() -> None:
    arena = StaticArena()
    old = static_for(torch.ones(4), arena=arena)
    arena.clear()
    assert arena.bytes() == 0
    new = static_for(torch.ones(4), arena=arena)
    old.load([torch.ones(4)])
    new.load([torch.zeros(4)])
    assert old.tensors[0].tolist() == [1.0] * 4
