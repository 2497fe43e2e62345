"""Known calls are captured again for another state of the module, without a pipeline and without its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.ambient import ambient_state, call_scope
from bcg.recapture import kept_content


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Block(nn.Module):
    """Two layers around a lookup by integers and a length that the host reads from a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.table = nn.Embedding(8, 4)

    def forward(self, hidden: Tensor, ids: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        length = int(mask.sum().item())
        return (self.first(hidden) + self.table(ids))[:, :length] * scale


def call_inputs(rows: int, length: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.zeros(5)
    mask[:length] = 1
    return torch.randn(rows, 5, 4), torch.randint(8, (rows, 5)), mask


def replace_weights(runner: Any) -> Callable[[], None]:
    """Give the first layer other weights; return what puts the old ones back."""
    old = runner.first.weight
    runner.first.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)

    def undo() -> None:
        runner.first.weight = old

    return undo


def check_replays(runner: Any, *sets: tuple[Any, ...]) -> None:
    for make_rows in sets:
        before = runner.stats.replays
        for _ in range(2):
            args = call_inputs(*make_rows)
            assert torch.equal(runner(*args), bcg.unwrap(runner)(*args))
        assert runner.stats.replays == before + 2, runner.explain(*call_inputs(*make_rows))


def test_known_calls_replay_after_a_change_and_after_the_way_back() -> None:
    runner = bcg.wrap(Block())
    for rows in (4, 2):
        assert runner.capture(*call_inputs(rows))
    undo = replace_weights(runner)
    assert "not captured" in runner.explain(*call_inputs(4))
    assert runner.recapture() == 2
    assert runner.stats.captures == 4
    check_replays(runner, (4,), (2,))
    undo()
    check_replays(runner, (4,), (2,))
    assert runner.recapture() == 0
    assert (runner.stats.misses, runner.stats.captures) == (0, 4)


def test_the_largest_is_captured_first() -> None:
    runner = bcg.wrap(Block())
    for rows in (2, 9, 4):
        runner.capture(*call_inputs(rows))
    known = set(runner.entries.values())
    replace_weights(runner)
    assert runner.recapture() == 3
    new = [entry for entry in runner.entries.values() if entry not in known]
    assert [entry.signature.tensor_specs[0].shape[0] for entry in new] == [9, 4, 2]


def test_a_lora_is_switched_back_and_forth() -> None:
    peft = pytest.importorskip("peft")
    runner = bcg.wrap(Block())
    config = peft.LoraConfig(r=2, target_modules=["first"], init_lora_weights=False)
    runner.capture(*call_inputs(3))
    peft.inject_adapter_in_model(config, bcg.unwrap(runner))
    runner.requires_grad_(False)
    assert runner.recapture() == 1
    check_replays(runner, (3,))
    layer = bcg.unwrap(runner).first
    layer.enable_adapters(False)
    assert runner.recapture() == 1
    check_replays(runner, (3,))
    layer.enable_adapters(True)
    runner.requires_grad_(False)
    assert runner.recapture() == 0
    check_replays(runner, (3,))


def test_every_variant_is_captured_again_from_its_own_masks() -> None:
    runner = bcg.wrap(Block(), verify="exact")
    for length in (3, 5):
        with bcg.warmup():
            runner(*call_inputs(2, length))
    assert runner.stats.captures == 2
    replace_weights(runner)
    assert runner.recapture() == 2
    check_replays(runner, (2, 3), (2, 5))
    assert runner.stats.guard_misses == 0


def test_old_entries_go_first_when_there_are_too_many() -> None:
    runner = bcg.wrap(Block(), max_entries=3)
    for rows in (4, 2):
        runner.capture(*call_inputs(rows))
    undo = replace_weights(runner)
    assert runner.recapture() == 2
    assert runner.stats.evictions == 1
    check_replays(runner, (4,), (2,))
    undo()
    check_replays(runner, (2,))
    assert "not captured" in runner.explain(*call_inputs(4))


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
        lambda: torch.device("cpu"),
    ],
    ids=["no_grad", "inference_mode", "autocast", "autocast without cache", "default device"],
)
def test_calls_are_captured_under_the_modes_that_they_had(mode: Callable[[], Any]) -> None:
    runner = bcg.wrap(Block())
    with mode():
        runner.capture(*call_inputs(2))
    replace_weights(runner)
    with torch.enable_grad():
        before = ambient_state()
        assert runner.recapture() == 1
        assert ambient_state() == before
    with mode():
        check_replays(runner, (2,))


def test_a_scope_can_take_a_callers_autocast_off() -> None:
    outside = ambient_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = ambient_state()
        with call_scope(outside):
            assert ambient_state() == outside
        assert ambient_state() == inside


def test_random_numbers_and_the_callers_tensors_are_left_alone() -> None:
    runner = bcg.wrap(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train())
    x = torch.randn(2, 4)
    runner.capture(x)
    runner[0].weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
    content = x.clone()
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    assert runner.recapture() == 1
    assert torch.equal(torch.randn(2), expected)
    assert torch.equal(x, content)
    for seed in (1, 2):
        x = torch.randn(2, 4)
        torch.manual_seed(seed)
        expected = bcg.unwrap(runner)(x)
        torch.manual_seed(seed)
        assert torch.equal(runner(x), expected)
    assert runner.stats.replays == 2


def test_containers_aliases_and_spellings_are_those_of_the_call() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, pair: Any, *rest: Any, options: Any = None) -> Any:
            result = pair[0] * self.weight - pair[1]
            return {"sum": result + rest[0]["t"] if rest else result, "text": options["name"]}

    runner = bcg.wrap(Odd())

    def args() -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = torch.randn(2, 3).t().contiguous().t()
        return ([x, x], {"t": torch.randn(2, 3, dtype=torch.float64)}), {"options": {"name": "n"}}

    one, named = args()
    assert runner.capture(*one, **named)
    runner.weight = nn.Parameter(torch.randn(3), requires_grad=False)
    assert runner.recapture() == 1
    for _ in range(2):
        one, named = args()
        assert torch.equal(runner(*one, **named)["sum"], bcg.unwrap(runner)(*one, **named)["sum"])
    assert runner.stats.replays == 2


def test_nothing_known_captures_nothing() -> None:
    runner = bcg.wrap(Block())
    runner(*call_inputs(2))
    assert runner.recapture() == 0
    assert runner.stats.captures == 0


def test_a_call_that_is_rejected_in_the_new_state_is_not_tried_twice() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.draws = False

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(3, generator=torch.Generator().manual_seed(1)) if self.draws else x * 2

    runner = bcg.wrap(Fickle())
    runner.capture(torch.randn(3))
    runner.draws = True
    assert (runner.recapture(), runner.stats.rejections) == (0, 1)
    assert (runner.recapture(), runner.stats.rejections) == (0, 1)
    for _ in range(2):
        x = torch.randn(3)
        assert torch.equal(runner(x), bcg.unwrap(runner)(x))
    runner.draws = False
    for _ in range(2):
        x = torch.randn(3)
        assert torch.equal(runner(x), x * 2)
    assert runner.stats.replays == 2


def test_several_values_of_a_number_are_captured_again_for_a_second_state() -> None:
    runner = bcg.wrap(Block())
    for scale in range(5):
        assert runner.capture(*call_inputs(2), 1.0 + scale)
    replace_weights(runner)
    assert runner.recapture() == 5


def test_a_call_is_captured_under_no_grad_whatever_is_around_recapture() -> None:
    runner = bcg.wrap(Block())
    runner.capture(*call_inputs(2))
    runner.release()
    with torch.enable_grad():
        assert runner.recapture() == 1
    check_replays(runner, (2,))


def test_a_module_that_must_not_be_captured_now_is_left_alone_and_its_calls_stay_known() -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    runner = bcg.wrap(Block())
    runner.capture(*call_inputs(2))
    runner.release()
    add_hook_to_module(bcg.unwrap(runner).first, AlignDevicesHook(execution_device="cpu", offload=True))
    assert (runner.recapture(), runner.stats.captures, runner.stats.rejections) == (0, 1, 0)
    assert not runner.capture(*call_inputs(2))
    assert runner.observe(*call_inputs(2)) == []
    assert (runner.stats.captures, runner.stats.rejections) == (1, 0)
    remove_hook_from_module(bcg.unwrap(runner).first)
    bcg.unwrap(runner).requires_grad_(False)
    assert runner.recapture() == 1
    check_replays(runner, (2,))


def test_what_steers_a_forward_is_kept_on_the_host_and_latents_are_not() -> None:
    mask = torch.ones(100)
    tensors = [torch.randn(100), torch.arange(100), mask, torch.tensor([0.5]), torch.ones(2) > 0, torch.zeros(50)]
    kept = kept_content(tensors)
    assert sorted(kept) == [1, 2, 3, 4, 5]
    mask.zero_()
    assert bool((kept[2] == 1).all())


def test_recapture_needs_no_window_and_serving_still_captures_nothing() -> None:
    runner = bcg.wrap(Block())
    runner.capture(*call_inputs(2))
    replace_weights(runner)
    runner.recapture()
    captures = runner.stats.captures
    for rows in (2, 3, 2, 4):
        args = call_inputs(rows)
        assert torch.equal(runner(*args), bcg.unwrap(runner)(*args))
    assert runner.stats.captures == captures
