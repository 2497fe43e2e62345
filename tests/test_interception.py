"""What a capture does with host reads, data-dependent shapes, writes, random numbers and opaque parts of a forward."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.graph import current_capture
from bcg.interception import HostGuard
from bcg.source import Where

MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


class Body(nn.Module):
    """Run a function of the module and its arguments; every test makes a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.register_buffer("table", torch.tensor([1.0, 2.0, 3.0]))
        self.plain = torch.tensor([4.0, 5.0, 6.0])
        self.notes: dict[Any, Any] = {}


def module_of(forward: Callable[..., Any], **children: nn.Module) -> Body:
    # What a capture learns about a class holds for all its instances.
    module = type("Body", (Body,), {"forward": forward})()
    for name, child in children.items():
        setattr(module, name, child)
    return module


class Pair:
    """A module, run eagerly and wrapped, that must agree in every call."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.module = module
        self.eager = copy.deepcopy(module)
        self.runner = bcg.wrap(module, **options)

    def warm(self, *args: Any) -> None:
        """Call inside of a window, and compare."""
        with bcg.warmup():
            self(*args)

    def __call__(self, *args: Any) -> str:
        """Call outside of a window, compare, and return whether it was a replay, a miss or eager."""
        before = self.runner.stats
        ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
        state = torch.get_rng_state()
        expected = self.eager(*theirs)
        drawn = torch.get_rng_state()
        torch.set_rng_state(state)
        got = self.runner(*ours)
        assert torch.equal(torch.get_rng_state(), drawn), "random numbers go on otherwise than in eager"
        _assert_equal(expected, got)
        _assert_equal(theirs, ours)
        _assert_equal(dict(self.eager.named_buffers()), dict(self.module.named_buffers()))
        after = self.runner.stats
        if after.replays > before.replays:
            return "replay"
        return "miss" if after.guard_misses > before.guard_misses else "eager"

    @property
    def entry(self) -> bcg.Entry:
        (entry,) = self.runner.entries.values()
        return entry


def _assert_equal(expected: Any, got: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def x(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


# --- guards -----------------------------------------------------------------------------------------------------------

READS = {
    "item": lambda n: n[0].item(),
    "bool": lambda n: 2 if bool(n[0] > 1) else 3,
    "if": lambda n: 2 if n[0] > 1 else 3,
    "float": lambda n: float(n[0]),
    "int": lambda n: int(n.sum()),
    "tolist": lambda n: n.tolist()[0],
    "numpy": lambda n: int(n.numpy()[0]),
    "asarray": lambda n: int(np.asarray(n)[0]),
    "array of a list": lambda n: int(np.array([n[0], n[1]])[0]),
    "dlpack": lambda n: int(np.from_dlpack(n)[0]),
    "equal": lambda n: 2 if torch.equal(n, torch.ones_like(n)) else 3,
    "range": lambda n: len([None for _ in range(n[0])]),
    "list index": lambda n: [7, 8, 9][n[0]],
    "slice": lambda n: len(torch.arange(5)[: n[0]]),
    "contains": lambda n: 2 if 2 in n else 3,
    "text": lambda n: len(str(n * 99)),
    "format": lambda n: len(f"{n[0] * 99:d}"),
    "size": lambda n: len(torch.zeros(n[0], 2)),
    "torch.tensor of tensors": lambda n: torch.tensor([n[0], 1])[0],
    "torch.as_tensor of tensors": lambda n: torch.as_tensor([[n[0]], [1]])[0],
    "new_tensor of tensors": lambda n: n.new_tensor([n[0], 1])[0],
    "tensor_split": lambda n: torch.tensor_split(torch.arange(4.0), n[:1])[0].sum(),
}


@MODES
@pytest.mark.parametrize("read", READS)
def test_another_host_value_is_a_miss_and_the_same_one_a_replay(read, mode):
    def forward(self, t, n):
        return t * self.scale + READS[read](n)

    pair = Pair(module_of(forward))
    with mode():
        pair.warm(x(), torch.tensor([1, 1]))
        assert pair.entry.guards >= 1
        assert [pair(x(seed), torch.tensor([1, 1])) for seed in (1, 2)] == ["replay", "replay"]
        assert [pair(x(seed), torch.tensor([2, 1])) for seed in (3, 4)] == ["miss", "miss"]
        assert pair(x(5), torch.tensor([1, 1])) == "replay"


@MODES
def test_a_read_of_constants_is_no_guard(mode):
    def forward(self, t):
        lengths = torch.tensor([2, 1])
        return t[: int(lengths.max())] + lengths.tolist()[1]

    pair = Pair(module_of(forward))
    with mode():
        pair.warm(x())
        assert pair.entry.guards == 0
        assert [pair(x(seed)) for seed in (1, 2)] == ["replay", "replay"]


def test_a_constant_that_data_was_written_to_is_no_constant():
    def forward(self, t, n):
        lengths = torch.tensor([0, 0])
        lengths += n
        return t * lengths.tolist()[0]

    pair = Pair(module_of(forward))
    with torch.no_grad():
        pair.warm(x(), torch.tensor([1, 1]))
        assert pair.entry.guards == 1
        assert pair(x(1), torch.tensor([1, 1])) == "replay"
        assert pair(x(2), torch.tensor([2, 1])) == "miss"


@MODES
def test_a_read_of_a_buffer_sees_a_write_from_outside(mode):
    def forward(self, t):
        return t * int(self.table.sum())

    pair = Pair(module_of(forward))
    with mode():
        pair.warm(x())
        assert pair(x(1)) == "replay"
        for module in (pair.eager, pair.module):
            module.table.add_(1)
        assert pair(x(2)) == "miss"
        for module in (pair.eager, pair.module):
            module.table.sub_(1)
        assert pair(x(3)) == "replay"


def test_a_miss_is_explained_with_its_place_and_values():
    def forward(self, t, n):
        return t * n.item()

    runner = bcg.wrap(module_of(forward))
    with torch.no_grad():
        with bcg.warmup():
            runner(x(), torch.tensor(1))
        text = runner.explain(x(1), torch.tensor(2))
    assert f"{__file__}:{forward.__code__.co_firstlineno + 1}" in text
    assert "expected 1, got 2" in text


@MODES
def test_a_host_read_that_the_module_tries_is_guarded_all_the_same(mode):
    def forward(self, t, n):
        try:
            factor = [10.0, 20.0][n.item()]
        except Exception:
            factor = 3.0
        return t * factor

    pair = Pair(module_of(forward))
    with mode():
        pair.warm(x(), torch.tensor(5))
        assert [pair(x(1), torch.tensor(5)), pair(x(2), torch.tensor(5))] == ["replay", "replay"]
        assert [pair(x(3), torch.tensor(1)), pair(x(4), torch.tensor(0))] == ["miss", "miss"]


# --- variants ---------------------------------------------------------------------------------------------------------


def _scaled(self, t, n):
    return t * (n.item() + 1)


def test_a_new_value_in_a_window_captures_a_variant_and_switching_finds_both():
    pair = Pair(module_of(_scaled))
    with torch.no_grad():
        pair.warm(x(), torch.tensor(1))
        pair.warm(x(), torch.tensor(2))
        assert len(pair.runner.entries) == pair.runner.stats.captures == 2
        assert [pair(x(seed), torch.tensor(1 + seed % 2)) for seed in range(6)] == ["replay"] * 6
        assert pair(x(7), torch.tensor(3)) == "miss"
    assert pair.runner.stats.captures == 2


def test_no_more_variants_than_max_variants():
    pair = Pair(module_of(_scaled), max_variants=2)
    with torch.no_grad():
        for value in (1, 2, 3, 4):
            pair.warm(x(), torch.tensor(value))
        assert pair.runner.stats.captures == 2
        assert [pair(x(value), torch.tensor(value)) for value in (1, 2, 3, 4)] == ["replay", "replay", "miss", "miss"]


def test_nothing_is_captured_outside_of_a_window():
    pair = Pair(module_of(_scaled))
    with torch.no_grad():
        pair.warm(x(), torch.tensor(1))
        for seed in range(4):
            pair(x(seed), torch.tensor(seed))
    assert pair.runner.stats.captures == 1
    assert (pair.runner.stats.guard_misses, pair.runner.stats.eager_calls) == (3, 3)


# --- breaks -----------------------------------------------------------------------------------------------------------


def _index_put(t, m):
    t = t * 1
    t[m] = t[m] * 2
    return t


BREAKS = {
    "nonzero": lambda t, m: t[m.nonzero().flatten()],
    "boolean index": lambda t, m: t[m],
    "index_put": _index_put,
    "unique": lambda t, m: t[: len((m * 5).unique())],
    "masked_select": lambda t, m: t[:, 0].masked_select(m),
    "bincount": lambda t, m: torch.bincount(m.long(), minlength=2) * 1.0,
    "repeat_interleave": lambda t, m: t.repeat_interleave(m + 1, dim=0),
    "where": lambda t, m: t[torch.where(m)],
}


@MODES
@pytest.mark.parametrize("name", BREAKS)
def test_a_shape_that_depends_on_data_is_an_eager_break(name, mode):
    def forward(self, t, m):
        return BREAKS[name]((t * self.scale).tanh(), m).sum() + t

    pair = Pair(module_of(forward))
    mask, moved = torch.tensor([True, False, True, False]), torch.tensor([False, True, True, False])
    with mode():
        pair.warm(x(), mask)
        assert (pair.entry.breaks, pair.entry.guards) == (1 + (name == "index_put"), 0)
        assert [pair(x(seed), mask) for seed in (1, 2)] == ["replay", "replay"]
        # As many elements at other places: the shapes are the same, and the break has computed anew.
        assert [pair(x(seed), moved) for seed in (3, 4)] == ["replay", "replay"]


def test_packed_sequences_of_another_length_are_a_miss():
    def forward(self, t, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(t, lengths, enforce_sorted=False)
        return packed.data * self.scale

    pair = Pair(module_of(forward))
    given = torch.randn(4, 2, 3)
    with torch.no_grad():
        pair.warm(given, torch.tensor([4, 2]))
        assert [pair(given + n, torch.tensor([4, 2])) for n in (1, 2)] == ["replay", "replay"]
        assert [pair(given, torch.tensor([4, 3])), pair(given, torch.tensor([1, 2]))] == ["miss", "miss"]
        assert pair(given, torch.tensor([4, 2])) == "replay"


@pytest.mark.parametrize("name", ["nonzero", "boolean index", "masked_select", "repeat_interleave"])
def test_another_shape_of_a_break_is_a_miss(name):
    def forward(self, t, m):
        return BREAKS[name](t, m) * 2

    pair = Pair(module_of(forward))
    with torch.no_grad():
        pair.warm(x(), torch.tensor([True, False, True, False]))
        assert pair(x(1), torch.tensor([False, False, True, True])) == "replay"
        assert [pair(x(2), torch.tensor([True, False, False, False])), pair(x(3), torch.ones(4) > 0)] == [
            "miss",
            "miss",
        ]


# --- writes -----------------------------------------------------------------------------------------------------------

WRITES = {
    "argument": lambda self, t: t.add_(1),
    "view of an argument": lambda self, t: t[1:].mul_(2),
    "masked part of an argument": lambda self, t: t.__setitem__(t > 0, 0.0),
    "parameter": lambda self, t: self.scale.mul_(2),
    "data of a parameter": lambda self, t: self.scale.data.mul_(2),
    "buffer": lambda self, t: self.table.add_(1),
    "out": lambda self, t: torch.add(t[0], 1, out=self.table),
    "plain attribute": lambda self, t: self.plain.add_(1),
    "after an empty write": lambda self, t: (t[4:].zero_(), t.add_(1)),
    "in a random operation": lambda self, t: self.table.normal_(),
}


@MODES
@pytest.mark.parametrize("target", WRITES)
def test_a_write_to_what_outlives_the_call_rejects_the_capture_before_it_is_made(target, mode):
    def forward(self, t):
        result = t * 2
        WRITES[target](self, t)
        return result + self.table + self.plain * self.scale

    pair = Pair(module_of(forward))
    with mode():
        content = copy.deepcopy((pair.module.state_dict(), pair.module.plain))
        given = x()
        state = torch.get_rng_state()
        assert not pair.runner.capture(given)
        _assert_equal((pair.module.state_dict(), pair.module.plain), content)
        assert torch.equal(given, x())
        assert torch.equal(torch.get_rng_state(), state)
        for seed in (1, 2):
            assert pair(x(seed)) == "eager"
            _assert_equal(pair.module.plain, pair.eager.plain)
            _assert_equal(pair.module.state_dict(), pair.eager.state_dict())
    (reason,) = pair.runner.rejections.values()
    assert "writes to" in reason
    assert f"{__file__}:" in reason


def test_a_refused_write_that_the_module_swallows_still_rejects():
    def forward(self, t):
        with contextlib.suppress(Exception):
            self.table.add_(1)
        return t + self.table

    pair = Pair(module_of(forward))
    with torch.no_grad():
        pair.warm(x())
        assert [pair(x(1)), pair(x(2))] == ["eager", "eager"]
    assert len(pair.runner.rejections) == 1


@MODES
def test_writes_to_tensors_of_the_call_are_captured(mode):
    def forward(self, t):
        own = t.clone()
        own[0] = self.table
        own[:, 1].add_(own[:, 0]).mul_(2)
        own[own > 1] = 0.5
        constant = torch.tensor([1.0, 2.0, 3.0])
        constant.add_(own[1])
        zeros = torch.zeros(3)
        zeros += constant
        return own, constant, torch.add(own, zeros, out=torch.empty(0))

    pair = Pair(module_of(forward))
    with mode():
        pair.warm(x())
        assert (pair.entry.segments, pair.entry.breaks, pair.entry.guards) == (1, 0, 0)
        assert [pair(x(seed)) for seed in (1, 2, 1)] == ["replay"] * 3


# --- caches and Python state ------------------------------------------------------------------------------------------


@MODES
def test_a_cache_that_the_first_call_fills_is_fine(mode):
    def forward(self, t):
        if "freqs" not in self.notes:
            self.notes["freqs"] = torch.arange(3.0).cos()
        return t * self.notes["freqs"]

    pair = Pair(module_of(forward))
    with mode():
        pair.warm(x())
        assert [pair(x(seed)) for seed in (1, 2)] == ["replay", "replay"]


STATES = {
    "a cache": lambda self, t: self.notes.__setitem__(len(self.notes), t * 2),
    "an attribute": lambda self, t: setattr(self, "last", t * 2),
    "a counter": lambda self, t: setattr(self, "calls", getattr(self, "calls", 0) + 1),
    "a list outside": lambda self, t: _KEPT.append(t * 2),
}
_KEPT: list[Tensor] = []


@pytest.mark.parametrize("what", STATES)
def test_state_that_every_call_changes_rejects(what):
    def forward(self, t):
        STATES[what](self, t)
        return t * self.scale

    pair = Pair(module_of(forward))
    with torch.no_grad():
        pair.warm(x())
        assert [pair(x(seed)) for seed in (1, 2)] == ["eager", "eager"]
    _KEPT.clear()
    assert len(pair.module.notes) == len(pair.eager.notes)
    assert getattr(pair.module, "calls", 0) == getattr(pair.eager, "calls", 0)
    assert len(pair.runner.rejections) >= 1


@MODES
def test_a_first_call_that_computes_something_else_is_served_as_such(mode):
    def forward(self, t):
        factor, self.factor = getattr(self, "factor", 5), 2
        return t * factor

    pair = Pair(module_of(forward))
    with mode():
        pair.warm(x())
        pair.warm(x())
        assert [pair(x(seed)) for seed in (1, 2)] == ["replay", "replay"]


def test_a_changed_argument_container_rejects():
    def forward(self, t, options):
        options["used"] = options.get("used", 0) + 1
        return t * 2

    pair = Pair(module_of(forward))
    with torch.no_grad():
        pair.warm(x(), {"a": 1})
        assert [pair(x(1), {"a": 1}), pair(x(2), {"a": 1})] == ["eager", "eager"]
    (reason,) = pair.runner.rejections.values()
    assert "options" in reason


# --- random numbers ---------------------------------------------------------------------------------------------------


@MODES
def test_random_numbers_go_on_as_in_eager(mode):
    def forward(self, t):
        return t + torch.rand_like(t) + torch.randn(3)

    pair = Pair(module_of(forward))
    with mode():
        pair.warm(x())  # compares the generator's state after warm-up, capture and verification, too
        assert [pair(x(seed)) for seed in (1, 2, 3)] == ["replay"] * 3


@MODES
def test_a_missed_guard_leaves_the_random_numbers_to_eager(mode):
    def forward(self, t, n):
        t = t + torch.rand_like(t)
        return t * n.item()

    pair = Pair(module_of(forward))
    with mode():
        pair.warm(x(), torch.tensor(1))
        order = (2, 1, 3, 1)
        assert [pair(x(n), torch.tensor(n)) for n in order] == ["miss", "replay", "miss", "replay"]


def test_a_missed_guard_after_an_eager_module_that_draws_leaves_them_to_eager():
    def forward(self, t, n):
        return self.noise(t) * n.item()

    noise = module_of(lambda self, t: t + torch.rand_like(t))
    pair = Pair(module_of(forward, noise=noise), eager_modules=("noise",))
    with torch.no_grad():
        pair.warm(x(), torch.tensor(1))
        assert [pair(x(n), torch.tensor(n)) for n in (2, 1, 3, 1)] == ["miss", "replay", "miss", "replay"]


def test_a_generator_of_its_own_rejects_and_draws_nothing():
    generator = torch.Generator().manual_seed(3)

    def forward(self, t):
        return t + torch.rand(3, generator=generator)

    runner = bcg.wrap(module_of(forward))
    state = generator.get_state()
    with torch.no_grad():
        assert not runner.capture(x())
        assert torch.equal(generator.get_state(), state)
        first, second = runner(x()), runner(x())
    assert not torch.equal(first, second)
    (reason,) = runner.rejections.values()
    assert "generator of its own" in reason


@pytest.mark.parametrize("seed", range(4))
def test_a_forward_that_draws_host_random_numbers_is_not_captured(seed):
    def forward(self, t):
        return t * (2 if random.random() < 0.5 else 3)

    random.seed(seed)
    runner = bcg.wrap(module_of(forward))
    state = random.getstate()
    with torch.no_grad():
        assert not runner.capture(x())
    assert random.getstate() == state


def test_a_forward_that_seeds_by_itself_is_not_captured():
    def forward(self, t):
        torch.manual_seed(0)
        return t + torch.randn(3)

    torch.manual_seed(0)  # the very seed, so that a verification from the present state would not notice
    pair = Pair(module_of(forward))
    with torch.no_grad():
        pair.warm(x())
        assert [pair(x(1)), pair(x(2))] == ["eager", "eager"]


# --- module breaks ----------------------------------------------------------------------------------------------------


class Router(nn.Module):
    """Compute in loops over token counts, as routed experts do."""

    def forward(self, t: Tensor) -> Tensor:
        result = torch.zeros_like(t)
        for row in range(int((t[:, 0] > 0).sum())):
            result[row] = t[row] * (row + 1)
        return result


def _routed(self, t):
    return self.router(t * 2) + self.scale


@MODES
def test_a_module_whose_reads_change_with_the_content_becomes_a_break(mode):
    router = type("Router", (Router,), {})()
    pair = Pair(module_of(_routed, router=router))
    with mode():
        pair.warm(x())
        assert (pair.entry.segments, pair.entry.breaks, pair.entry.guards) == (2, 1, 0)
        assert [finding.kind for finding in pair.entry.findings] == ["module break"]
        assert pair.entry.verified == "exact"
        assert [pair(x(seed)) for seed in range(1, 7)] == ["replay"] * 6


def test_what_was_learned_holds_for_the_next_signature_and_instance():
    kind = type("Router", (Router,), {})
    first = module_of(_routed, router=kind())
    with torch.no_grad():
        assert bcg.wrap(first).capture(x())
        runner = bcg.wrap(copy.deepcopy(first))
        findings = runner.observe(x()[:3])
    assert [(finding.kind, finding.name) for finding in findings] == [("module break", "router")]


def test_module_breaks_can_be_switched_off():
    pair = Pair(module_of(_routed, router=type("Router", (Router,), {})()), module_breaks=False)
    with torch.no_grad():
        pair.warm(x())
        assert pair.entry.guards == 1
        assert pair(x()) == "replay"
        assert "miss" in [pair(x(seed)) for seed in range(1, 7)]


def test_a_module_of_changing_shape_keeps_its_guard():
    chosen = module_of(lambda self, t: t[: int((t[:, 0] > 0).sum())])

    def forward(self, t):
        return self.chosen(t * 1) * 2

    pair = Pair(module_of(forward, chosen=chosen))
    with torch.no_grad():
        pair.warm(x())
        assert (pair.entry.guards, pair.entry.breaks) == (1, 0)
        outcomes = [pair(x(seed)) for seed in range(8)]
    assert set(outcomes) == {"replay", "miss"}


@MODES
def test_declared_modules_are_breaks(mode):
    def forward(self, t):
        for block in self.blocks:
            t = block.tail(block.head(t)) + t
        return t

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.tail = nn.Linear(3, 3), nn.Tanh()

    pair = Pair(module_of(forward, blocks=nn.ModuleList([Block(), Block()])), eager_modules=("*.tail",))
    with mode():
        pair.warm(x())
        assert (pair.entry.segments, pair.entry.breaks) == (3, 2)
        names = [finding.name for finding in pair.entry.findings]
        assert names == ["blocks.0.tail", "blocks.1.tail"]
        assert [pair(x(seed)) for seed in (1, 2)] == ["replay", "replay"]


@MODES
def test_buffers_that_an_eager_module_writes_are_as_in_eager(mode):
    class Meter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, t):
            self.count.add_(1)
            return t * self.count

    def forward(self, t, n):
        return self.meter(t) * n.item()

    pair = Pair(module_of(forward, meter=Meter()), eager_modules=("meter",))
    with mode():
        pair.warm(x(), torch.tensor(1))
        assert [pair(x(n), torch.tensor(n)) for n in (1, 2, 1, 3)] == ["replay", "miss", "replay", "miss"]
    assert pair.module.meter.count.item() == 5


def test_an_eager_module_that_writes_to_an_argument_rejects():
    def forward(self, t):
        self.writer(t)
        return t * 2

    pair = Pair(module_of(forward, writer=module_of(lambda self, t: t.add_(1))), eager_modules=("writer",))
    with torch.no_grad():
        pair.warm(x())
        assert [pair(x(1)), pair(x(2))] == ["eager", "eager"]
    (reason,) = pair.runner.rejections.values()
    assert "writer" in reason
    assert "argument t" in reason


def test_data_that_an_eager_module_writes_into_a_constant_is_guarded():
    def forward(self, t, n):
        count = torch.tensor([0])
        self.writer(count, n)
        return t * count.tolist()[0]

    writer = module_of(lambda self, count, n: count.add_(n))
    pair = Pair(module_of(forward, writer=writer), eager_modules=("writer",))
    with torch.no_grad():
        pair.warm(x(), torch.tensor([1]))
        assert [pair(x(n), torch.tensor([n])) for n in (1, 2, 1)] == ["replay", "miss", "replay"]


# --- eager functions --------------------------------------------------------------------------------------------------


@pytest.fixture
def helpers(monkeypatch):
    """Two modules: one defines a function, the other imports it under another name."""
    home, user = types.ModuleType("bcg_test_home"), types.ModuleType("bcg_test_user")
    exec("def route(t):\n    return t * float(t.sum() > 0)\n", home.__dict__)
    user.renamed = home.route
    exec("def call(t):\n    return renamed(t)\n", user.__dict__)
    for module in (home, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return home, user


@MODES
def test_a_python_function_is_a_break_under_whatever_name_it_was_imported(helpers, mode):
    home, user = helpers
    original = home.route

    def forward(self, t):
        return user.call(t + 1) + home.route(t - 1)

    pair = Pair(module_of(forward), eager_functions=("bcg_test_home:route",))
    with mode():
        pair.warm(x())
        assert (pair.entry.breaks, pair.entry.guards) == (2, 0)
        assert [pair(x(seed)) for seed in range(1, 5)] == ["replay"] * 4
    assert home.route is original
    assert user.renamed is original


@MODES
def test_a_torch_function_is_a_break_wherever_it_is_called(mode):
    def forward(self, t):
        return torch.nn.functional.scaled_dot_product_attention(t[None], t[None], t[None])[0] + torch.tanh(t)

    name = "torch.nn.functional:scaled_dot_product_attention"
    pair = Pair(module_of(forward), eager_functions=(name,))
    with mode():
        pair.warm(x())
        assert (pair.entry.segments, pair.entry.breaks) == (1, 1)
        assert [pair(x(seed)) for seed in (1, 2)] == ["replay", "replay"]


def test_an_eager_function_that_does_not_exist_is_an_error():
    with pytest.raises(bcg.ConfigError, match="no_such_function"):
        bcg.wrap(module_of(_scaled), eager_functions=("torch:no_such_function",))


# --- retry ------------------------------------------------------------------------------------------------------------


def _fragile(name: str) -> Any:
    """Register an operator that fails inside of captured segments."""

    @torch.library.custom_op(f"bcg_test::{name}", mutates_args=())
    def operator(t: Tensor) -> Tensor:
        capture = current_capture()
        if capture is not None and capture.in_segment:
            raise RuntimeError("operation not permitted when stream is capturing")
        return t * 2

    return operator


fragile, brittle = _fragile("fragile"), _fragile("brittle")


@MODES
def test_an_operation_that_fails_in_a_capture_becomes_a_break(mode):
    def forward(self, t):
        return fragile(t + 1) + self.scale

    pair = Pair(module_of(forward))
    with mode():
        pair.warm(x())
        assert (pair.entry.segments, pair.entry.breaks) == (2, 1)
        assert [pair(x(seed)) for seed in (1, 2)] == ["replay", "replay"]


def test_a_failed_operation_is_found_among_others_and_remembered():
    def forward(self, t, n):
        return brittle(fragile(t) * n.item())

    pair = Pair(module_of(forward))
    with torch.no_grad():
        pair.warm(x(), torch.tensor(1))
        assert (pair.entry.breaks, pair.entry.guards) == (2, 1)
        assert [pair(x(seed), torch.tensor(1)) for seed in (1, 2)] == ["replay", "replay"]
        findings = pair.runner.observe(x()[:2], torch.tensor(1))
    assert [finding.kind for finding in findings] == ["break", "guard", "break"]


@MODES
def test_an_operation_that_fails_in_eager_too_is_left_to_the_module(mode):
    def forward(self, t, n):
        try:
            flat = t.t().view(12)
        except RuntimeError:
            flat = t.t().reshape(12)
        return flat * n.item()

    pair = Pair(module_of(forward))
    with mode():
        pair.warm(x(), torch.tensor(2))
        assert (pair.entry.breaks, pair.entry.guards) == (0, 1)
        assert [pair(x(seed), torch.tensor(2)) for seed in (1, 2)] == ["replay", "replay"]


def test_no_more_tries_than_max_capture_attempts():
    def forward(self, t, n):
        return brittle(fragile(t) * n.item())

    pair = Pair(module_of(forward), max_capture_attempts=2)
    with torch.no_grad():
        pair.warm(x(), torch.tensor(1))
        assert [pair(x(seed), torch.tensor(1)) for seed in (1, 2)] == ["eager", "eager"]
    (reason,) = pair.runner.rejections.values()
    assert "bcg_test::brittle" in reason
    assert f"{__file__}:{forward.__code__.co_firstlineno + 1}" in reason


# --- compiled submodules ----------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("how", ["module.compile()", "torch.compile(module)"])
def test_a_compiled_submodule_is_opaque(how, mode):
    seen: list[int] = []

    def compiler(graph, example_inputs):
        seen.append(1)
        return graph.forward

    def forward(self, t, n):
        return self.inner(t) * n.item()

    class Inner(nn.Module):  # torch.compile leaves a Sequential of its own alone
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, t):
            return self.linear(t).tanh()

    inner = Inner()
    module = module_of(forward, inner=inner)
    eager = copy.deepcopy(module)
    if how == "module.compile()":
        inner.compile(backend=compiler)
    else:
        module.inner = torch.compile(inner, backend=compiler)
    runner = bcg.wrap(module)
    with mode():
        with bcg.warmup():
            runner(x(), torch.tensor(2))
        compilations = len(seen)
        (entry,) = runner.entries.values()
        assert [finding.kind for finding in entry.findings] == ["compiled", "guard"]
        for seed in (1, 2):
            _assert_equal(runner(x(seed), torch.tensor(2)), eager(x(seed), torch.tensor(2)))
        assert runner.stats.replays == 2
        assert len(seen) == compilations > 0, "a capture or a replay compiled"
    torch._dynamo.reset()


# --- threads ----------------------------------------------------------------------------------------------------------


def test_another_thread_runs_the_module_eagerly_while_one_captures(helpers):
    home, _ = helpers
    inside, served = threading.Event(), threading.Event()
    captures: list[object] = []
    results: list[Tensor] = []

    class Slow(nn.Module):
        def forward(self, t):
            if threading.current_thread() is not capturing:
                captures.append(current_capture())
                return t.tanh()
            if current_capture() is not None:
                inside.set()
                assert served.wait(30)
            return t.tanh()

    def forward(self, t, n):
        return home.route(self.slow(t)) * n.item()

    module = module_of(forward, slow=Slow())
    runner = bcg.wrap(module, eager_functions=("bcg_test_home:route",), eager_modules=("slow",))

    def capture():
        with torch.no_grad():
            captures.append(runner.capture(x(), torch.tensor(2)))

    capturing = threading.Thread(target=capture)
    capturing.start()
    assert inside.wait(30)
    with torch.no_grad():
        # Sums of the wrong sign and other numbers: nothing of this may end in the other thread's capture.
        results += [module(x(seed), torch.tensor(seed)) for seed in (5, 6)]
    served.set()
    capturing.join(30)
    expected = [home.route(x(seed).tanh()) * seed for seed in (5, 6)]
    _assert_equal(results, expected)
    assert captures == [None, None, True]
    (entry,) = runner.entries.values()
    assert (entry.breaks, entry.guards) == (2, 1)
    with torch.no_grad():
        for seed in (1, 2):
            _assert_equal(runner(x(seed), torch.tensor(2)), module(x(seed), torch.tensor(2)))
    assert runner.stats.replays == 2


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_names_findings_with_module_and_line_and_changes_nothing():
    def inner(self, t, m):
        return t[m]

    def forward(self, t, m, n):
        t = t + torch.rand_like(t)
        return self.inner(t, m) * n.item() + self.table

    module = module_of(forward, inner=module_of(inner))
    before = copy.deepcopy(module.state_dict())
    random_state = torch.get_rng_state()
    report = bcg.inspect(module, x(), torch.tensor([True, False, True, False]), torch.tensor(2))
    assert torch.equal(torch.get_rng_state(), random_state)
    _assert_equal(module.state_dict(), before)
    assert module.notes == {}
    assert "forward" not in module.inner.__dict__

    assert [(finding.kind, finding.name) for finding in report.findings] == [
        ("break", "aten::index"),
        ("guard", "aten::_local_scalar_dense"),
    ]
    indexing, read = (finding.where for finding in report.findings)
    assert (indexing.module, indexing.file, indexing.line) == ("inner", __file__, inner.__code__.co_firstlineno + 1)
    assert (read.module, read.file, read.line) == ("", __file__, forward.__code__.co_firstlineno + 2)
    assert report.rejected is None
    assert report.segments == 2
    assert report.of_kind("guard") == [report.findings[1]]
    assert f"inner ({__file__}:{indexing.line})" in str(report)


def test_inspect_says_why_a_call_is_rejected_and_writes_nothing():
    def forward(self, t):
        return t + self.table.add_(1)

    module = module_of(forward)
    report = bcg.inspect(module, x())
    assert "buffer table" in str(report.rejected)
    assert report.segments == 0
    assert module.table.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("elements", [4, 1 << 19])
def test_a_host_tensor_that_has_no_version_is_guarded_by_its_content(elements: int) -> None:
    place = Where("here.py", 1)
    with torch.inference_mode():
        table = torch.zeros(elements)
        guard = HostGuard.of(table, place)
        assert guard.holds()
        table[1] = 1.0
        assert not guard.holds()
