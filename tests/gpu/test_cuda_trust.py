"""Never a wrong image on the GPU: after failed captures, under allocator churn, with threads, devices and LoRAs."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.graph import current_capture
from streams import run_in_threads

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
WIDTH = 256
MIN_CALLS = 200


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def rows(count: int, device: torch.device = DEVICE) -> Tensor:
    return torch.randn(count, WIDTH, device=device)


def check_replays(runner: Any, *args: Any) -> None:
    before = runner.stats.replays
    assert torch.equal(runner(*args), bcg.unwrap(runner)(*args))
    assert runner.stats.replays == before + 1, runner.explain(*args)


# -- random numbers after a failed capture -----------------------------------------------------------------------------


def nothing(x: Tensor) -> None:
    pass


def item(x: Tensor) -> None:
    x.sum().item()


def synchronize(x: Tensor) -> None:
    torch.cuda.synchronize()


def model_error(x: Tensor) -> None:
    raise ValueError("from the model")


class Fault:
    """What strikes inside of a capture; not a variable of the module, which would be a part of its state."""

    strike: Callable[[Tensor], None] = staticmethod(nothing)


class Drawing(nn.Module):
    """Draws random numbers where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, draws: bool = False) -> Tensor:
        x = self.linear(x)
        if draws:
            x = x + torch.randn_like(x)
        if current_capture() is not None:
            Fault.strike(x)
        return x * 2


def check_draws(runner: Any, x: Tensor) -> None:
    """Replays draw what eager draws from the same seed, one after the other, and leave the generator where it would."""
    module, replays = bcg.unwrap(runner), runner.stats.replays
    for seed in (3, 4):
        torch.manual_seed(seed)
        want = [module(x, True), module(x, True), torch.randn(3, device=DEVICE)]
        torch.manual_seed(seed)
        got = [runner(x, True), runner(x, True), torch.randn(3, device=DEVICE)]
        assert all(map(torch.equal, got, want))
    assert runner.stats.replays == replays + 4, runner.explain(x, True)


def fail_in_the_runner(runner: Any, x: Tensor, fault: Callable[[Tensor], None], patch: pytest.MonkeyPatch) -> None:
    with patch.context() as patched:
        patched.setattr(Fault, "strike", staticmethod(fault))
        assert not runner.capture(x, False)


def fail_in_a_block(runner: Any, x: Tensor, fault: Callable[[Tensor], None], patch: pytest.MonkeyPatch) -> None:
    graph = bcg.BreakableCUDAGraphCapture(pool=runner.pool, draws_random=False)
    with pytest.raises((RuntimeError, ValueError)), graph:
        fault(x * 2)


FAILURES = [
    (fail_in_the_runner, synchronize),  # which makes a guard of `.item()`
    (fail_in_the_runner, model_error),
    (fail_in_a_block, item),
    (fail_in_a_block, synchronize),
    (fail_in_a_block, model_error),
]


@pytest.mark.parametrize(("fail", "fault"), FAILURES, ids=lambda function: function.__name__)
def test_graphs_draw_on_after_a_failed_capture_that_drew_nothing(
    fail: Callable[..., None], fault: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, x = bcg.wrap(Drawing().to(DEVICE)), rows(64)
    assert runner.capture(x, True)
    check_draws(runner, x)
    for _ in range(2):
        fail(runner, rows(32), fault, monkeypatch)
        check_draws(runner, x)
    assert runner.capture(rows(32), False)
    check_replays(runner, rows(32), False)
    check_draws(runner, x)


def test_graphs_that_draw_are_captured_again_after_an_invalidated_capture_that_drew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It leaves the generator's state marked; the generator gets another one, which earlier graphs never see."""
    runner, x = bcg.wrap(Drawing().to(DEVICE)), rows(64)
    assert runner.capture(x, True)
    assert runner.capture(x, False)
    with monkeypatch.context() as patched:
        patched.setattr(Fault, "strike", staticmethod(synchronize))
        assert not runner.capture(rows(32), True)
    check_replays(runner, x, False)
    for window, served in ((contextlib.nullcontext(), "eager_calls"), (bcg.warmup(), "capture_calls")):
        torch.manual_seed(3)
        want = [bcg.unwrap(runner)(x, True), torch.randn(3, device=DEVICE)]
        torch.manual_seed(3)
        with window:
            got = [runner(x, True), torch.randn(3, device=DEVICE)]
        assert all(map(torch.equal, got, want))
        assert getattr(runner.stats, served) == 1
    assert runner.stats.replay_failures == 1
    check_draws(runner, x)


def test_graphs_draw_on_after_a_capture_that_drew_and_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA did not invalidate it, so that torch has ended it in order."""
    runner, x = bcg.wrap(Drawing().to(DEVICE)), rows(64)
    assert runner.capture(x, True)
    with monkeypatch.context() as patched:
        patched.setattr(Fault, "strike", staticmethod(model_error))
        assert not runner.capture(rows(32), True)
    check_draws(runner, x)


# -- memory of an empty first segment ----------------------------------------------------------------------------------


class Late(nn.Module):
    """Allocates before a host read, and fills what it allocated after it: the first segment has no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(3.0))

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        result = torch.empty_like(x)
        if flag.item():
            torch.mul(x, self.factor, out=result)
        return result + 1


def test_memory_of_an_empty_first_segment_stays_the_graphs_own() -> None:
    runner, flag, count = bcg.wrap(Late().to(DEVICE)), torch.ones((), dtype=torch.int64, device=DEVICE), 1 << 14
    assert runner.capture(rows(count), flag)  # 16 MiB a tensor, blocks that empty_cache gives back
    [entry] = runner.entries.values()
    assert entry.guards == 1
    for _ in range(5):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        churn = [torch.full((count, WIDTH), float("nan"), device=DEVICE) for _ in range(12)]
        check_replays(runner, rows(count), flag)
        assert all(bool(block.isnan().all()) for block in churn), "a replay wrote to memory of others"
        del churn


# -- replays beside captures -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Matrix products around a host read and an eager break."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        chosen = x[x[:, 0] > 1e30]
        if chosen.shape[0] + int((x > 1e30).sum().item()) == 0:
            x = x.relu()
        return self.second(x)


def two_runners(sharing: str) -> tuple[Any, Any]:
    """A runner that serves and one that captures meanwhile."""
    serving = bcg.wrap(Block().to(DEVICE))
    if sharing == "one runner":
        return serving, serving
    return serving, bcg.wrap(Block().to(DEVICE), pool=serving if sharing == "one pool" else None)


@pytest.mark.parametrize("sharing", ["one runner", "one pool", "nothing"])
def test_one_thread_replays_while_another_captures_other_shapes(sharing: str) -> None:
    serving, capturing = two_runners(sharing)
    served, captured = [512, 64, 7], list(range(100, 125))
    pairs = {}
    for runner, count in (*itertools.product([serving], served), *itertools.product([capturing], captured)):
        x = rows(count)
        pairs[runner, count] = x, bcg.unwrap(runner)(x)
    for count in served:
        assert serving.capture(rows(count))
    before, done = serving.stats, threading.Event()

    def serve() -> None:
        wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for calls, count in enumerate(itertools.cycle(served)):
            if done.is_set() and calls >= MIN_CALLS:
                break
            x, want = pairs[serving, count]
            wrong += (serving(x) != want).any()  # read at the end alone: replays are to overlap with the captures
        assert int(wrong) == 0, f"{int(wrong)} results are not what eager gives"

    def capture() -> None:
        try:
            for count in captured:
                x, want = pairs[capturing, count]
                assert capturing.capture(x), capturing.explain(x)
                assert torch.equal(capturing(x), want)
        finally:
            done.set()

    run_in_threads(serve, capture)
    assert capturing.stats.rejections == serving.stats.eager_calls == serving.stats.replay_failures == 0
    assert serving.stats.replays - before.replays >= MIN_CALLS
    for (runner, _), (x, want) in pairs.items():
        assert torch.equal(runner(x), want)
    assert serving.stats.eager_calls == capturing.stats.eager_calls == 0


# -- another device ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu(count=2)
def test_a_module_on_another_device_than_the_current_one_is_captured_and_replayed_there() -> None:
    other = torch.device("cuda", 1)
    with torch.cuda.device(0):
        held_bytes = torch.cuda.memory_reserved(0)
        runner = bcg.wrap(Block().to(other))
        for count in (512, 64):
            assert runner.capture(rows(count, other)), runner.explain(rows(count, other))
            assert torch.cuda.current_device() == 0
        assert runner.pool.device == other and runner.pool.bytes() > 0
        assert torch.cuda.memory_reserved(0) == held_bytes, "a capture took memory of the current device"
        for entry in runner.entries.values():
            assert {tensor.device for tensor in entry.inputs.tensors} == {other}
        for count in (64, 512, 64):
            for _ in range(3):
                check_replays(runner, rows(count, other))
                assert torch.cuda.current_device() == 0
        assert runner(rows(64, other)).device == other
        runner.reset()
        assert torch.cuda.current_device() == 0


# -- LoRA --------------------------------------------------------------------------------------------------------------


def tiny_flux(diffusers: Any) -> Any:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return model.eval().requires_grad_(False).to(DEVICE, torch.bfloat16)


def flux_call(seed: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    tensors = {
        "hidden_states": torch.randn(1, 12, 16, generator=made),
        "pooled_projections": torch.randn(1, 32, generator=made),
        "encoder_hidden_states": torch.randn(1, 8, 32, generator=made),
        "timestep": torch.rand(1, generator=made),
        "txt_ids": torch.zeros(8, 3),
        "img_ids": torch.zeros(12, 3),
    }
    return {**{name: tensor.to(DEVICE, torch.bfloat16) for name, tensor in tensors.items()}, "return_dict": False}


def test_loras_switched_back_and_forth_hit_the_graphs_of_their_state() -> None:
    diffusers, peft = pytest.importorskip("diffusers"), pytest.importorskip("peft")
    model = tiny_flux(diffusers)
    runner: Any = bcg.wrap(model)
    for name in ("one", "two"):
        config = peft.LoraConfig(
            r=2, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False
        )
        runner.add_adapter(config, adapter_name=name)
    states: dict[str, Callable[[], Any]] = {
        "one": lambda: runner.set_adapters(["one"], [1.0]),
        "two": lambda: runner.set_adapters(["two"], [1.0]),
        "both": lambda: runner.set_adapters(["one", "two"], [0.5, 0.25]),
        "one, weaker": lambda: runner.set_adapters(["one"], [0.5]),
    }
    images = {}
    for name, switch in states.items():
        switch()
        with bcg.warmup():
            images[name] = runner(**flux_call(0))[0]
    assert runner.stats.captures == len(states)
    assert not any(torch.equal(*pair) for pair in itertools.combinations(images.values(), 2))
    seeds = itertools.count(1)
    for name in [*states, *reversed(states), *states]:
        states[name]()
        replays = runner.stats.replays
        call = flux_call(next(seeds))
        assert torch.equal(runner(**call)[0], model(**call)[0])
        assert torch.equal(runner(**flux_call(0))[0], images[name])
        assert runner.stats.replays == replays + 2, runner.explain(**call)
    assert runner.stats.eager_calls == 0 and len(runner.entries) == len(states)
    runner.disable_lora()
    call = flux_call(0)
    assert torch.equal(runner(**call)[0], model(**call)[0])
    assert runner.stats.eager_calls == 1, "the state without an adapter was not captured"
    runner.enable_lora()
    check_switched(runner, images["one"], states["one"])


def check_switched(runner: Any, image: Tensor, switch: Callable[[], Any]) -> None:
    switch()
    replays = runner.stats.replays
    assert torch.equal(runner(**flux_call(0))[0], image)
    assert runner.stats.replays == replays + 1
