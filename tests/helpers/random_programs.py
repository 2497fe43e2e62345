"""Random small modules, run eagerly and wrapped, on any device: everything that a caller can see must be equal.

A program is a list of instructions that a module runs on registers. All registers have three columns, so that any
instruction can take any of them; rows come and go with the data. The same calls go to a second module of the same
program and to the wrapped one, and results, arguments, buffers, Python state and random numbers are compared.

The comparison is bit for bit, so no instruction adds floats in an order that a device does not fix (weighted
``bincount``, ``index_put_`` with ``accumulate``). No instruction can index out of range either, whatever its operands:
on CUDA that ends the process and not the test.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import bcg

ROWS = 4
HERE = torch.device("cpu")

Instruction = tuple[str, int, int, int]


@dataclass
class Machine:
    """Registers of one forward."""

    module: nn.Module
    tensors: list[Tensor]
    owned: int  # tensors from here on were made by this forward
    call: Any
    numbers: list[Any] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.module.weight.device

    @property
    def there(self) -> dict[str, torch.device]:
        """Return what makes a factory put its tensor on the device.

        Nothing where that is the host: the tape tells a tensor whose device was asked for from one of the host.
        """
        return {} if self.device.type == "cpu" else {"device": self.device}

    def take(self, index: int) -> Tensor:
        return self.tensors[index % len(self.tensors)]

    def own(self, index: int) -> Tensor:
        """Return a tensor that this forward may write to."""
        own = [tensor for tensor in self.tensors[self.owned :] if 0 not in tensor.stride()]
        if own:
            return own[index % len(own)]
        self.push(self.take(index).clone())
        return self.tensors[-1]

    def row(self, index: int) -> Tensor:
        """Return a tensor of one row, whatever the number of rows: it broadcasts against everything."""
        return self.take(index).sum(0, keepdim=True)

    def push(self, tensor: Tensor) -> None:
        self.tensors.append(tensor)

    def number(self, index: int, low: int, high: int) -> int:
        """Return a number in a range that follows from a host read, where there was one."""
        value = self.numbers[index % len(self.numbers)] if self.numbers else index
        return low + abs(int(value)) % (high - low + 1)


def _mask(m: Machine, i: int, p: int) -> Tensor:
    return m.take(i)[:, p % 3] > 0


# --- instructions -----------------------------------------------------------------------------------------------------

PLAIN: dict[str, Callable[[Machine, int, int, int], None]] = {
    "add": lambda m, i, j, p: m.push(m.take(i) + m.row(j)),
    "multiply": lambda m, i, j, p: m.push(m.take(i) * m.row(j).tanh()),
    "scale": lambda m, i, j, p: m.push(m.take(i) * (p / 4)),
    "tanh": lambda m, i, j, p: m.push(m.take(i).tanh()),
    "linear": lambda m, i, j, p: m.push(F.linear(m.take(i), m.module.weight)),
    "norm": lambda m, i, j, p: m.push(F.layer_norm(m.take(i), (3,))),
    "attention": lambda m, i, j, p: m.push(
        F.scaled_dot_product_attention(*(m.take(k)[None, None] for k in (i, j, j)))[0, 0]
    ),
    "buffer": lambda m, i, j, p: m.push(m.take(i) + m.module.table),
    "external": lambda m, i, j, p: m.push(m.take(i) - m.module.plain),
    "flip": lambda m, i, j, p: m.push(m.take(i).flip(0)),
    "slice": lambda m, i, j, p: m.push(m.take(i)[p % 2 :]),
    "stride": lambda m, i, j, p: m.push(m.take(i)[::2]),
    "transpose": lambda m, i, j, p: m.push(m.take(i).t().contiguous().t()),
    "expand": lambda m, i, j, p: m.push(m.row(i).expand(2, 3)),
    "cat": lambda m, i, j, p: m.push(torch.cat([m.take(i), m.take(j)])[:8]),
    "where": lambda m, i, j, p: m.push(torch.where(m.take(i) > 0, m.row(j), m.take(i))),
    "sort": lambda m, i, j, p: m.push(m.take(i).sort(0).values),
    "host operand": lambda m, i, j, p: m.push(m.take(i) * torch.tensor(p / 8)),
    "constant": lambda m, i, j, p: m.push(torch.tensor([[p, 1.0, i]], **m.there) + m.row(j)),
    "zeros": lambda m, i, j, p: m.push(torch.zeros(2, 3, **m.there)),
    "cast": lambda m, i, j, p: m.push(m.take(i).to(torch.bfloat16).float()),
    "item operand": lambda m, i, j, p: m.push(m.take(i) + m.call.count),
    "data": lambda m, i, j, p: m.push(m.take(i).data + 1),
}
IN_PLACE = {
    "add_": lambda m, i, j, p: m.own(i).add_(m.row(j)),
    "mul_": lambda m, i, j, p: m.own(i).mul_(p / 4),
    "copy_": lambda m, i, j, p: m.own(i).copy_(m.row(j)),
    "write to view": lambda m, i, j, p: m.own(i)[1:].mul_(0.5),
    "set column": lambda m, i, j, p: m.own(i).__setitem__((slice(None), p % 3), p / 2),
    "set masked": lambda m, i, j, p: m.own(i).__setitem__(_mask(m, i, p).new_ones(len(m.own(i))), 0.25),
    "set indexed": lambda m, i, j, p: (
        m.own(i).__setitem__(torch.zeros(1, dtype=torch.int64), m.row(j)) if len(m.own(i)) else None
    ),
    "write to constant": lambda m, i, j, p: m.push(torch.tensor([[1.0, p, j]], **m.there).add_(m.row(i))),
    "write to zeros": lambda m, i, j, p: m.push(torch.zeros(1, 3, **m.there).add_(m.row(i)).mul_(2)),
    "unsqueeze_": lambda m, i, j, p: m.push(m.take(i).clone().unsqueeze_(0).squeeze_(0).add_(1)),
    "out": lambda m, i, j, p: m.push(torch.add(m.row(i), m.row(j), out=torch.empty(1, 3, **m.there))),
    "out grows": lambda m, i, j, p: m.push(torch.mul(m.row(i), 2, out=torch.empty(0, **m.there))),
}


def _index_put(m: Machine, i: int, j: int, p: int) -> None:
    own = m.own(i)
    mask = own[:, p % 3] > 0
    own[mask] = own[mask] * 2 if p % 2 else m.row(j)


def _bincount(m: Machine, i: int, j: int, p: int) -> None:
    counts = torch.bincount(m.call.ids + m.call.ids.min() * 0)
    m.push(counts.float().reshape(-1, 1).expand(-1, 3))


BREAKS: dict[str, Callable[[Machine, int, int, int], Any]] = {
    "boolean index": lambda m, i, j, p: m.push(m.take(i)[_mask(m, i, p)]),
    "argument mask": lambda m, i, j, p: m.push(m.call.x[m.call.mask]),
    "index_put": _index_put,
    "nonzero": lambda m, i, j, p: m.push(m.take(i)[_mask(m, i, p).nonzero().flatten()]),
    "masked_select": lambda m, i, j, p: m.push(m.take(i).masked_select(m.take(i) > 0).sum().expand(1, 3)),
    "unique": lambda m, i, j, p: m.push(m.call.ids.unique().float().reshape(-1, 1).expand(-1, 3)),
    "bincount": _bincount,
    "repeat_interleave": lambda m, i, j, p: m.push(m.call.y.repeat_interleave(m.call.ids[:2] % 3, dim=0)),
    "where indices": lambda m, i, j, p: m.push(m.take(i)[torch.where(_mask(m, i, p))]),
}
READS: dict[str, Callable[[Machine, int, int, int], Any]] = {
    "item": lambda m, i, j, p: m.numbers.append(m.call.count.item()),
    "int": lambda m, i, j, p: m.numbers.append(int(m.call.mask.sum())),
    "bool": lambda m, i, j, p: m.numbers.append(bool(m.take(i).sum() > 0)),
    "any": lambda m, i, j, p: m.numbers.append((m.take(i) > p).any().item()),
    "float": lambda m, i, j, p: m.numbers.append(float(m.call.ids.max()) * 2),
    "float of data": lambda m, i, j, p: m.push(
        m.take(i) * (float(m.take(j).sum().clamp(-2, 2)) if len(m.take(j)) else 1)
    ),
    "tolist": lambda m, i, j, p: m.numbers.extend(m.call.ids.tolist()),
    "numpy": lambda m, i, j, p: m.numbers.append(int(m.call.ids.cpu().numpy().sum())),
    "array": lambda m, i, j, p: m.numbers.append(int(np.asarray(m.call.ids.cpu()).max())),
    "dlpack": lambda m, i, j, p: m.numbers.append(int(np.from_dlpack(m.call.ids.cpu()).max())),
    "equal": lambda m, i, j, p: m.numbers.append(3 if torch.equal(m.call.ids, m.call.ids.sort().values) else 2),
    "allclose": lambda m, i, j, p: m.numbers.append(torch.allclose(m.take(i), m.row(i) / ROWS)),
    "branch": lambda m, i, j, p: m.push(m.take(i) * 2 if m.number(j, 0, 1) else m.take(i) + 1),
    "branch on data": lambda m, i, j, p: m.push(m.take(i) * 2 if m.take(j).sum() > 0 else m.take(i).tanh() - 1),
    "loop": lambda m, i, j, p: [m.push(m.take(i) + n) for n in range(m.call.count)],
    "select": lambda m, i, j, p: m.push(m.call.x[m.call.count % ROWS][None]),
    "length": lambda m, i, j, p: m.push(m.call.x[: m.number(j, 1, ROWS)]),
    "slice by tensor": lambda m, i, j, p: m.push(m.call.x[: m.call.count]),
    "number operand": lambda m, i, j, p: m.push(m.take(i) * m.number(j, 1, 5)),
    "full": lambda m, i, j, p: m.push(torch.full((1, 3), m.call.count, **m.there) + m.row(i)),
    "arange": lambda m, i, j, p: m.push(
        torch.arange(m.call.count + 1, **m.there)[:, None] * torch.ones(1, 3, **m.there)
    ),
    "made of tensors": lambda m, i, j, p: m.push(
        torch.tensor([[m.call.mask.sum(), m.call.count, 1]], **m.there) + m.row(i)
    ),
    "made of items": lambda m, i, j, p: m.push(torch.tensor([[int(m.call.count), 2.0, 1]], **m.there) * m.row(i)),
    "new_tensor": lambda m, i, j, p: m.push(m.take(i).new_tensor([[m.call.ids.max(), 1, 2]])),
    "format": lambda m, i, j, p: m.numbers.append(len(f"{m.call.count}" * 3)),
    "contains": lambda m, i, j, p: m.numbers.append(int(2 in m.call.ids)),
    "swallowed": lambda m, i, j, p: m.numbers.append(_swallowed(m)),
}
RANDOM: dict[str, Callable[[Machine, int, int, int], Any]] = {
    "rand_like": lambda m, i, j, p: m.push(m.take(i) + torch.rand_like(m.take(i))),
    "randn": lambda m, i, j, p: m.push(torch.randn(2, 3, **m.there) + m.row(i)),
    "dropout": lambda m, i, j, p: m.push(F.dropout(m.take(i), 0.5)),
    "normal_": lambda m, i, j, p: m.own(i).normal_(),
    "bernoulli": lambda m, i, j, p: m.push(torch.bernoulli(m.take(i).sigmoid().nan_to_num())),
    "randperm": lambda m, i, j, p: m.push(m.take(i)[torch.randperm(len(m.take(i)), **m.there)]),
    "multinomial": lambda m, i, j, p: m.push(m.call.x[torch.multinomial(torch.ones(ROWS, **m.there), 2)]),
    "random branch": lambda m, i, j, p: m.push(m.take(i) * 3 if torch.rand((), **m.there) < 0.5 else m.take(i) - 3),
    "random count": lambda m, i, j, p: m.numbers.append(int(torch.randint(0, 4, (), **m.there))),
    "random mask": lambda m, i, j, p: m.push(m.take(i)[torch.rand(len(m.take(i)), **m.there) < 0.5]),
}
# What crosses from the host to the device, or lies on the host where the device is another one.
HOST: dict[str, Callable[[Machine, int, int, int], Any]] = {
    "host scalar": lambda m, i, j, p: m.push(m.take(i) * m.module.host_scalar),
    "host row": lambda m, i, j, p: m.push(m.take(i) + m.module.host_row.to(m.device)),
    "moved constant": lambda m, i, j, p: m.push(m.row(j) + torch.tensor([[p, 1.0, i]]).to(m.device)),
    "moved array": lambda m, i, j, p: m.push(m.row(j) + torch.from_numpy(_array(p)).to(m.device)),
    "made of array": lambda m, i, j, p: m.push(m.row(j) * torch.as_tensor(_array(p), **m.there)),
    "moved number": lambda m, i, j, p: m.push(m.row(j) * torch.tensor([int(m.call.count), 2, p]).to(m.device)),
    "copied constant": lambda m, i, j, p: m.own(i).copy_(torch.tensor([[1.0, p, j]])),
    "set to constant": lambda m, i, j, p: m.own(i).__setitem__(slice(None), torch.tensor([p / 2, 1, j])),
    "host index": lambda m, i, j, p: m.push(m.call.x[torch.tensor([p % ROWS, i % ROWS])]),
    "host mask": lambda m, i, j, p: m.push(m.call.x[torch.arange(ROWS) < p % ROWS]),
    "host arithmetic": lambda m, i, j, p: m.push(m.take(i) * (m.call.ids.cpu() * 2).sum()),
    "round trip": lambda m, i, j, p: m.push(m.take(i).cpu().to(m.device) * 2),
    "round trip of mask": lambda m, i, j, p: m.push(m.call.x * m.call.mask.cpu().float().to(m.device)[:, None]),
}


def _array(p: int) -> np.ndarray:
    return np.full((1, 3), p / 2, np.float32)


def _swallowed(m: Machine) -> int:
    try:
        return [5, 6][int(m.call.count)]
    except IndexError:
        return 7


def _cache(m: Machine, i: int, j: int, p: int) -> None:
    if p % 4 not in m.module.cache:
        m.module.cache[p % 4] = torch.full((1, 3), p / 2, **m.there)
    m.push(m.take(i) + m.module.cache[p % 4])


def _count(m: Machine, i: int, j: int, p: int) -> None:
    m.module.calls += 1
    m.push(m.take(i) + m.module.calls)


def _child(m: Machine, i: int, j: int, p: int) -> None:
    children = m.module.children_of_program
    if children:
        m.push(children[p % len(children)](m.take(i), m.call))


CALLS = {"cache": _cache, "child": _child}
# Each rejects the capture (the last two so where the device is not the host): nothing may be written then but by the
# eager call itself.
WRITES: dict[str, Callable[[Machine, int, int, int], Any]] = {
    "count": _count,
    "append": lambda m, i, j, p: m.module.history.append(p),
    "keep": lambda m, i, j, p: setattr(m.module, "last", m.take(i) * 1),
    "write argument": lambda m, i, j, p: m.call.x.add_(1),
    "write view of argument": lambda m, i, j, p: m.call.x[:1].mul_(2),
    "write buffer": lambda m, i, j, p: m.module.table.add_(m.row(i).detach().tanh()),
    "write parameter": lambda m, i, j, p: m.module.weight.data.mul_(0.5),
    "write external": lambda m, i, j, p: m.module.plain.add_(1),
    "write masked": lambda m, i, j, p: m.call.x.__setitem__(m.call.mask, 0.0),
    "own generator": lambda m, i, j, p: m.push(torch.rand(1, 3, generator=m.module.generator, **m.there)),
    "seed": lambda m, i, j, p: torch.manual_seed(p % 3),
    "host random": lambda m, i, j, p: m.push(m.take(i) * (2 if random.random() < 0.5 else 3)),
    "change container": lambda m, i, j, p: m.call.nested.update(extra=p),
    "first call": lambda m, i, j, p: m.push(m.take(i) * _first(m.module)),
    "write host scalar": lambda m, i, j, p: m.module.host_scalar.add_(1),
    "random on the host": lambda m, i, j, p: m.push(m.take(i) * torch.rand(())),
}


def _first(module: nn.Module) -> int:
    first, module.is_first = module.is_first, False
    return 5 if first else 1


TABLE = PLAIN | IN_PLACE | BREAKS | READS | RANDOM | HOST | CALLS | WRITES


@dataclass
class Bag:
    """A plain object in a result."""

    tensor: Tensor
    name: str


@dataclass
class Arguments:
    """A call's arguments as a program names them."""

    x: Tensor
    y: Tensor
    mask: Tensor
    count: Tensor
    ids: Tensor
    nested: dict[str, Any]


class Program(nn.Module):
    """Run instructions.

    Args:
        instructions: Of the program itself.
        children: Of each submodule.
        device: Where all its tensors lie but those named for the host.
    """

    def __init__(
        self, instructions: list[Instruction], children: list[list[Instruction]] = (), device: torch.device = HERE
    ) -> None:
        super().__init__()
        self.instructions = tuple(instructions)
        generator = torch.Generator().manual_seed(1)  # of the host, so that the numbers are the same everywhere
        self.weight = nn.Parameter(torch.randn(3, 3, generator=generator).to(device))
        self.register_buffer("table", torch.randn(1, 3, generator=generator).to(device))
        self.plain = torch.randn(1, 3, generator=generator).to(device)
        self.host_scalar = torch.tensor(1.0)
        self.host_row = torch.ones(1, 3)
        self.generator = torch.Generator(device).manual_seed(2)
        self.cache: dict[int, Tensor] = {}
        self.history: list[int] = []
        self.calls = 0
        self.is_first = True
        # What a capture learns about a class holds for all its instances, so every program has classes of its own.
        kinds = [type(f"Child{n}", (Child,), {}) for n in range(len(children))]
        self.children_of_program = nn.ModuleList(
            kind(code, device=device) for kind, code in zip(kinds, children, strict=True)
        )

    def run(self, call: Arguments, tensors: list[Tensor]) -> Machine:
        machine = Machine(self, tensors, len(tensors), call)
        for name, i, j, p in self.instructions:
            TABLE[name](machine, i, j, p)
        return machine

    def forward(self, x, y, mask, count, ids, nested, scale=1.0):
        call = Arguments(x, y, mask, count, ids, nested)
        machine = self.run(call, [x, y, nested["a"], *nested["list"]])
        own = machine.tensors[machine.owned :]
        result = sum((t.sum() for t in own), torch.zeros((), **machine.there)) * scale
        return {
            "result": result,
            "last": own[-3:],
            "numbers": (tuple(machine.numbers), {"bag": Bag(result * 2, "bag")}),
        }


class Child(Program):
    def forward(self, tensor, call):
        machine = self.run(call, [tensor, call.x])
        return machine.tensors[-1].sum(0, keepdim=True) * 1.0


# --- strategies -------------------------------------------------------------------------------------------------------

_small = st.integers(0, 7)


def _instructions(
    *tables: dict[str, Any], min_size: int = 1, max_size: int = 8
) -> st.SearchStrategy[list[Instruction]]:
    names = st.one_of(*(st.sampled_from(list(table)) for table in tables))
    return st.lists(st.tuples(names, _small, _small, _small), min_size=min_size, max_size=max_size)


@dataclass
class Example:
    """A program, how it is wrapped, and its calls: seeds, guard values, and what differs besides."""

    instructions: list[Instruction]
    children: list[list[Instruction]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[int, int, int]] = field(default_factory=lambda: [(0, 0, 0), (1, 0, 0), (0, 1, 1), (2, 0, 0)])
    warm: int = 1
    on_host: tuple[str, ...] = ()  # arguments that are passed from the host, whatever the device


@st.composite
def examples(draw: st.DrawFn) -> Example:
    tables = [PLAIN, IN_PLACE, *draw(st.lists(st.sampled_from([BREAKS, READS, RANDOM, HOST, CALLS]), max_size=3))]
    instructions = draw(_instructions(*tables))
    if draw(st.sampled_from([False, False, False, True])):
        position = draw(st.integers(0, len(instructions)))
        instructions[position:position] = draw(_instructions(WRITES, max_size=1))
    child = _instructions(PLAIN, READS, BREAKS, RANDOM, HOST, IN_PLACE, max_size=4)
    options = {"eager_modules": ("children_of_program.0",)} if draw(st.sampled_from([False, False, True])) else {}
    # Few different values, so that calls come back to captured guard values.
    call = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1))
    calls = draw(st.lists(call, min_size=3, max_size=6))
    return Example(
        instructions,
        draw(st.lists(child, max_size=2)),
        options | {"max_variants": draw(st.integers(1, 3))},
        calls,
        draw(st.integers(1, 2)),
        draw(st.sampled_from([(), (), (), ("count",), ("mask", "count")])),
    )


def _arguments(example: Example, device: torch.device, seed: int, guard: int, content: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(10 * seed + content)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, 3, generator=generator).to(device)

    # All of them on the device, so that nothing but an argument that an example names is on the host.
    values = {
        "mask": torch.arange(ROWS) < 2 + guard,
        "count": torch.tensor(guard),
        "ids": torch.tensor([guard, 2, 1]),
    }
    return {
        "x": normal(ROWS),
        "y": normal(2),
        **{name: value if name in example.on_host else value.to(device) for name, value in values.items()},
        "nested": {"a": normal(1), "list": [normal(2), normal(3)], "k": 1},
    }


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """Everything of a sequence of calls that a caller can see."""

    results: list[Any]
    arguments: list[Any]
    state: Any
    generators: list[Any]


def _trace(call: Callable[..., Any], module: Program, example: Example, window: Callable[[], Any]) -> Trace:
    device = module.weight.device
    torch.manual_seed(5)
    random.seed(5)
    results, arguments, generators = [], [], []
    for number, values in enumerate(example.calls):
        given = _arguments(example, device, *values)
        _change_host_tensors(module, values)
        try:
            if number < example.warm:
                with window():
                    result = call(**given)
            else:
                result = call(**given)
        except (RuntimeError, IndexError, ValueError) as error:
            result = type(error)
        results.append(result)
        arguments.append(given)
        generators.append((torch.get_rng_state(), random.getstate(), _device_rng_state(device)))
    state = [_visible_state(program) for program in module.modules() if isinstance(program, Program)]
    return Trace(results, arguments, state, generators)


def _visible_state(program: Program) -> tuple[Any, ...]:
    return (
        program.calls,
        program.is_first,
        list(program.history),
        list(program.cache),
        [program.plain, program.host_scalar, program.host_row],
        dict(program.named_parameters()),
        dict(program.named_buffers()),
        program.generator.get_state(),
        getattr(program, "last", None),
    )


def _change_host_tensors(module: Program, values: tuple[int, int, int]) -> None:
    """Let content that a CUDA graph bakes differ from call to call."""
    for program in module.modules():
        if isinstance(program, Program):
            program.host_scalar.fill_(1 + values[2])
            program.host_row.fill_(values[1])


def _device_rng_state(device: torch.device) -> Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def assert_same(expected: Any, got: Any, path: str) -> None:
    """Compare nested values: types, structure, tensors bit for bit (NaN equals NaN)."""
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), path
        assert (expected.dtype, expected.shape, expected.device) == (got.dtype, got.shape, got.device), path
        assert torch.equal(expected.isnan(), got.isnan()), path
        assert torch.equal(expected.nan_to_num(), got.nan_to_num()), f"{path}: {expected} {got}"
        return
    assert type(expected) is type(got), path
    if isinstance(expected, dict):
        assert list(expected) == list(got), path
        for key in expected:
            assert_same(expected[key], got[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(got), path
        for number, pair in enumerate(zip(expected, got, strict=True)):
            assert_same(*pair, f"{path}[{number}]")
    elif isinstance(expected, Bag):
        assert_same(vars(expected), vars(got), path)
    else:
        assert expected == got or expected != expected, path


def check(example: Example, mode: Callable[[], Any], device: torch.device = HERE) -> bcg.RunnerStats:
    """Run an example eagerly and wrapped, and compare.

    Args:
        example: The example.
        mode: Makes the context that all calls run under.
        device: Where module and arguments lie.

    Returns:
        The runner's counters.
    """
    module = type("Root", (Program,), {})(example.instructions, example.children, device)
    plain = type(module)(example.instructions, example.children, device)
    runner = bcg.wrap(module, **example.options)
    try:
        with mode():
            expected = _trace(plain, plain, example, lambda: torch.no_grad())
            got = _trace(runner, module, example, bcg.warmup)
        assert_same(expected.results, got.results, "results")
        assert_same(expected.arguments, got.arguments, "arguments")
        assert_same(expected.state, got.state, "state")
        assert_same(expected.generators, got.generators, "generators")
        assert runner.stats.captures <= example.warm
        return runner.stats
    finally:
        runner.reset()  # graphs hold device memory until they are collected


def failing_instructions(mode: Callable[[], Any], device: torch.device) -> dict[str, str]:
    """Check every instruction in a program of its own; where one is at fault, this names it.

    Args:
        mode: Makes the context that all calls run under.
        device: Where modules and arguments lie.

    Returns:
        By instruction the end of what its example raised; empty where all is well.
    """
    failing = {}
    for name in TABLE:
        example = Example([("tanh", 0, 0, 0), (name, 5, 1, 3), (name, 0, 2, 2), ("add", 6, 5, 0)])
        try:
            check(example, mode, device)
        except Exception as error:
            failing[name] = f"{type(error).__name__}: {str(error)[-500:]}"
    return failing


def check_random_examples(mode: Callable[[], Any], device: torch.device, count: int) -> Counter[str]:
    """Check random examples, and count what they met.

    Args:
        mode: Makes the context that all calls run under.
        device: Where modules and arguments lie.
        count: Number of examples.

    Returns:
        Number of examples by what happened in them.
    """
    tally: Counter[str] = Counter()

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(examples())
    def run(example: Example) -> None:
        stats = check(example, mode, device)
        tally.update(
            examples=1,
            captured=stats.captures > 0,
            replayed=stats.replays > 0,
            replays=stats.replays,
            guard_misses=stats.guard_misses > 0,
            rejected=stats.rejections > 0,
        )

    run()
    return tally


def assert_telling(tally: Counter[str]) -> None:
    """Fail where a test passed by never capturing, missing or rejecting anything."""
    assert tally["replayed"] >= 0.4 * tally["examples"], tally
    assert tally["guard_misses"] >= 3, tally
    assert tally["rejected"] >= 3, tally
