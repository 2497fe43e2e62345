"""The tape keeps the rules of a CUDA graph: no Python runs again, memory is fixed, constants are baked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import bcg
from bcg.backends import backend_for
from bcg.graph import current_capture

VALUES = (3.0, -5.0)
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no grad": torch.no_grad,
    "inference mode": torch.inference_mode,
}


@pytest.fixture(params=MODES, autouse=True)
def _mode(request: pytest.FixtureRequest) -> Any:
    """Run every test in both modes that a user may serve in: composite operations are dispatched otherwise."""
    with MODES[request.param]():
        yield


def capture(block: Callable[[], Any]) -> tuple[bcg.BreakableCUDAGraph, Any]:
    with bcg.BreakableCUDAGraphCapture(device="cpu") as graph:
        result = block()
    return graph, result


def check(block: Callable[[Tensor], Tensor]) -> None:
    """Capture a block and compare its replays on three fresh inputs with eager runs, bit by bit."""
    x = torch.randn(3, 4)
    graph, y = capture(lambda: block(x))
    for _ in range(3):
        x.copy_(torch.randn(x.shape))
        expected = block(x.clone())
        graph.replay()
        assert torch.equal(y, expected)
        assert y.stride() == expected.stride()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.count


def test_a_module_that_counts_its_calls_replays_the_captured_count() -> None:
    module, x = Counting(), torch.zeros(2)
    module(x)
    graph, y = capture(lambda: module(x))
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [value + 2] * 2
    assert module.count == 2


def test_no_python_of_the_block_runs_in_a_replay() -> None:
    forbidden = [False]

    def block(x: Tensor) -> Tensor:
        assert not forbidden[0], "Python ran in a replay"
        return x * 2

    x = torch.ones(2)
    graph, y = capture(lambda: block(x))
    forbidden[0] = True
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x * 2)


def test_addresses_of_inputs_and_results_are_fixed() -> None:
    x = torch.ones(2)
    graph, y = capture(lambda: x * 2)
    address = y.data_ptr()
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert y.data_ptr() == address
        assert torch.equal(y, x * 2)


def test_another_tensor_under_the_same_name_is_not_read() -> None:
    x = torch.ones(2)
    graph, y = capture(lambda: x * 2)
    x = torch.full((2,), 9.0)
    for _ in range(2):
        graph.replay()
        assert y.tolist() == [2.0, 2.0]


def test_python_numbers_and_shapes_are_baked() -> None:
    scale, x = 2.0, torch.ones(2)
    graph, y = capture(lambda: x * scale + x.shape[0])
    scale = 7.0
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [value * 2 + 2] * 2


def test_a_replay_overwrites_what_was_written_to_the_result() -> None:
    x = torch.ones(2)
    graph, y = capture(lambda: x * 2)
    for value in VALUES:
        y.fill_(99.0)
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x * 2)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(12),
    "reshape": lambda x: x.reshape(2, 6),
    "flatten": lambda x: x.flatten(),
    "transpose": lambda x: x.t(),
    "permute": lambda x: x.permute(1, 0),
    "narrow": lambda x: x[1:],
    "select": lambda x: x[0],
    "step": lambda x: x[:, ::2],
    "chunk": lambda x: x.chunk(2, dim=1)[1],
    "unbind": lambda x: x.unbind(0)[2],
    "expand": lambda x: x[:1].expand(5, 4),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "diagonal": lambda x: x.diagonal(),
    "as strided": lambda x: x.as_strided((2, 2), (1, 4)),
    "contiguous": lambda x: x.contiguous(),
    "to its own dtype": lambda x: x.to(torch.float32),
    "detach": lambda x: x.detach(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_result_is_a_view_in_replays_too(name: str) -> None:
    def block(x: Tensor) -> Tensor:
        y = x * 2
        view = VIEWS[name](y)
        y.add_(1)  # seen through the view
        return view

    check(block)
    x = torch.randn(3, 4)
    _, (base, view) = capture(lambda: (base := x * 2, VIEWS[name](base)))
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_an_input_needs_no_step(name: str) -> None:
    x = torch.randn(3, 4)
    graph, view = capture(lambda: VIEWS[name](x))
    assert graph.steps == []
    for value in VALUES:
        x.fill_(value)
        assert bool((view == value).all())


def test_a_reshape_that_copies_is_copied_again() -> None:
    check(lambda x: x.t().reshape(12))
    check(lambda x: x[:, ::2].contiguous())


def test_operations_in_place_run_again() -> None:
    def block(x: Tensor) -> Tensor:
        y = x * 2
        y += 1
        y[1:].mul_(3)
        y[0, 0] = -1.0
        y[:, 1] = x[:, 2]
        y.clamp_(min=0).sub_(0.5)
        return y

    check(block)


def test_operations_with_an_out_argument_run_again() -> None:
    def block(x: Tensor) -> Tensor:
        result = torch.empty(3, 4)
        torch.add(x, 1, out=result)
        torch.mul(result, 2, out=result)
        return result

    check(block)


def test_a_write_to_the_input_is_repeated() -> None:
    x = torch.zeros(2)
    graph, _ = capture(lambda: x.add_(1))
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert x.tolist() == [value + 1] * 2


def test_an_accumulator_made_in_the_block_starts_anew_in_every_replay() -> None:
    def block(x: Tensor) -> Tensor:
        total = torch.zeros(4)
        for row in x.unbind(0):
            total += row
        filled = x.new_zeros(4)
        filled.add_(total)
        return filled

    check(block)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.as_tensor([1.0, 2.0]),
        lambda: torch.ones(2).new_tensor([1.0, 2.0]),
        lambda: torch.asarray([1.0, 2.0]),
        lambda: torch.tensor([[1.0, 2.0]])[0],
    ],
    ids=["tensor", "as_tensor", "new_tensor", "asarray", "view of tensor"],
)
def test_a_tensor_made_from_python_data_and_then_written_in_place_starts_fresh_in_every_replay(
    make: Callable[[], Tensor],
) -> None:
    def block(x: Tensor) -> Tensor:
        table = make()
        table += x.sum()
        return table * 1

    check(block)


def test_a_tensor_made_from_python_data_that_is_the_result_itself_starts_fresh() -> None:
    def block(x: Tensor) -> Tensor:
        return torch.tensor([1.0, 2.0]).mul_(x[0, 0])

    check(block)


def transposed_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.transpose_(0, 1)
    return y + 1


def t_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.t_()
    return y @ x


def unsqueezed_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.unsqueeze_(1)
    return y + x


def squeezed_in_place(x: Tensor) -> Tensor:
    y = x[:1] * 2
    y.squeeze_(0)
    return y + x


def squeezed_all_in_place(x: Tensor) -> Tensor:
    y = (x * 2).unsqueeze(0)
    y.squeeze_()
    return y + x


def swapped_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.swapaxes_(0, 1)
    y.swapdims_(0, 1)
    return y + 1


def strided_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.as_strided_((2, 2), (1, 4))
    return y + 1


def changed_after_use(x: Tensor) -> Tensor:
    y = x * 2
    z = y + 1
    y.t_()
    return z.t() * y


METADATA = [
    transposed_in_place, t_in_place, unsqueezed_in_place, squeezed_in_place, squeezed_all_in_place, swapped_in_place,
    strided_in_place, changed_after_use,
]  # fmt: skip


@pytest.mark.parametrize("block", METADATA, ids=lambda block: block.__name__)
def test_an_operation_that_changes_the_shape_of_a_tensor_in_place_is_not_done_twice(
    block: Callable[[Tensor], Tensor],
) -> None:
    check(block)


def test_the_result_itself_changed_in_place() -> None:
    check(lambda x: (x * 2).t_())
    check(lambda x: (x * 2).unsqueeze_(0))


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape),
    "in place": lambda x: (x * 0).normal_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "dropout": lambda x: nn.functional.dropout(x, 0.5, training=True),
    "randperm": lambda x: torch.randperm(20)[: x.numel()].float(),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_operations_go_on_where_eager_would(name: str) -> None:
    x = torch.randn(4)
    graph, y = capture(lambda: RANDOM[name](x))
    drawn = []
    for seed in (1, 2):
        x.copy_(torch.randn(4))
        torch.manual_seed(seed)
        expected = [RANDOM[name](x).clone() for _ in range(3)]
        after = torch.default_generator.get_state()
        torch.manual_seed(seed)
        for value in expected:
            graph.replay()
            assert torch.equal(y, value)
        assert torch.equal(torch.default_generator.get_state(), after)
        drawn += expected
    assert any(not torch.equal(one, drawn[0]) for one in drawn)


FORWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul and softmax": lambda x: (x @ x.t()).softmax(-1) @ x,
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "linear": lambda x: nn.functional.linear(x, x, x[:, 0]),
    "norms": lambda x: nn.functional.layer_norm(x, (4,)) + nn.functional.rms_norm(x, (4,)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "several results": lambda x: torch.cat(torch.max(x, dim=1)[:1] + torch.std_mean(x, dim=1)),
    "index": lambda x: x[torch.tensor([2, 0])] + x[[1, 1]],
    "where": lambda x: torch.where(x > 0, x, -x),
    "masked fill": lambda x: x.masked_fill(x > 0, float("-inf")).exp(),
    "to bfloat16 and back": lambda x: x.to(torch.bfloat16).float() * 2,
    "arange": lambda x: x + torch.arange(4),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(3, 2, 2)) * 1j),
    "foreach": lambda x: torch._foreach_add([x, x * 2], 1)[1],
    "foreach in place": lambda x: (rows := [x * 1, x * 2], torch._foreach_mul_(rows, 2.0))[0][1],
    "split and stack": lambda x: torch.stack(x.split(2, dim=1)[0].unbind(1)),
    "pad": lambda x: nn.functional.pad(x, (1, 1)),
    "convolution": lambda x: nn.functional.conv1d(x[None], x[:2, :3, None], padding=1),
    "interpolate": lambda x: nn.functional.interpolate(x[None], scale_factor=2.0),
    "empty then written": lambda x: torch.empty(3, 4).copy_(x),
    "expanded result": lambda x: (x[:1] * 2).expand(3, 4),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_replay_gives_the_bits_of_eager(name: str) -> None:
    check(FORWARDS[name])


def test_parameters_are_read_by_address_so_that_a_change_in_place_is_seen() -> None:
    layer, x = nn.Linear(2, 2).requires_grad_(False), torch.ones(1, 2)
    graph, y = capture(lambda: layer(x))
    for value in VALUES:
        layer.weight.fill_(value)
        graph.replay()
        assert torch.equal(y, layer(x))


def test_reset_lets_go_of_the_memory_of_the_block() -> None:
    x = torch.ones(2)
    with bcg.BreakableCUDAGraphCapture() as graph:
        y = (x * 2) + 1
    held = [StorageWeakRef(tensor.untyped_storage()) for tensor in (x, y)]
    del x, y
    assert not any(reference.expired() for reference in held)
    graph.reset()
    assert all(reference.expired() for reference in held)


def test_work_outside_of_the_block_is_not_recorded() -> None:
    x = torch.ones(2)
    capturing = bcg.BreakableCUDAGraphCapture()
    before = x * 2
    with capturing as graph:
        y = x * 3
    after = x * 5
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x * 3)
    assert before.tolist() == [2.0] * 2
    assert after.tolist() == [5.0] * 2
    assert graph.segments == 1


def test_a_host_read_in_a_bare_block_is_refused_and_not_baked() -> None:
    x = torch.ones(2)
    with pytest.raises(bcg.CaptureError):
        capture(lambda: x * x.sum().item())


def test_a_recording_that_is_aborted_records_no_more_and_the_next_capture_works() -> None:
    x = torch.ones(2)
    with pytest.raises(ZeroDivisionError):
        capture(lambda: (x * 2, 1 / 0))
    assert current_capture() is None
    graph, y = capture(lambda: x * 4)
    for value in VALUES:
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x * 4)


def test_the_backend_says_what_the_layers_above_need_to_know() -> None:
    backend = backend_for("auto", torch.device("cpu"))
    assert (backend.name, backend.device_type) == ("tape", "cpu")
    assert backend.executes_while_capturing
    assert backend.reads_host_memory
    assert not backend.is_capturing()
    pool = backend.create_pool(torch.device("cpu"))
    assert (pool.backend, pool.bytes()) == (backend, 0)
    generator, state = backend.generator_states(torch.device("cpu"))[0]
    assert generator is torch.default_generator
    assert torch.equal(state, generator.get_state())


def test_cuda_without_a_device_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(bcg.BackendError, match="torch sees no CUDA device"):
        backend_for("cuda", torch.device("cpu"))
    with pytest.raises(bcg.BackendError, match="torch sees no CUDA device"):
        bcg.wrap(nn.Linear(2, 2), backend="cuda")
