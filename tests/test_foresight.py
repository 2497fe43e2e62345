"""What a capture on a GPU would meet, told on a machine without one."""

from __future__ import annotations

import functools
import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg
from bcg.config import RunnerConfig
from bcg.foresight import FarTensor, foresee
from bcg.report import CaptureReport
from bcg.signature import CallBinder

MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


class Inner(nn.Module):
    """Copies from the host, reads the host, and writes to its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return x * torch.tensor([2.0], device=x.device) + (1 if x.sum() > 0 else 2)


class Module(nn.Module):
    """Runs a function on itself, an input, and a mask of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = Inner()
        self.register_buffer("table", torch.arange(4.0))
        self.host = torch.arange(4.0)  # a plain attribute stays on the host when the module moves
        self.cache: dict[str, Tensor] = {}
        self.calls: list[int] = []
        self._function = function

    def forward(self, x: Tensor, mask: Tensor, count: Tensor) -> Any:
        return self._function(self, x, mask, count)


def call_of(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, generator=generator), torch.tensor([True, False, True]), torch.tensor(2)


def inspect(function: Callable[..., Any]) -> CaptureReport:
    return bcg.inspect(Module(function), *call_of())


def besides(function: Callable[..., Any]) -> list[tuple[str, str]]:
    report = inspect(function)
    assert report.rejected is None
    assert report.on_gpu_unknown is None
    return [(finding.kind, finding.name) for finding in report.on_gpu]


HOISTS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "nothing": (lambda m, x, mask, n: m.linear(x) + m.table, []),
    "tensor": (lambda m, x, mask, n: x + torch.tensor([1.0], device=x.device), ["tensor"]),
    "as_tensor": (lambda m, x, mask, n: x + torch.as_tensor(1.0, device=m.linear.weight.device), ["as_tensor"]),
    "new_tensor": (lambda m, x, mask, n: x + x.new_tensor([1.0]), ["new_tensor"]),
    "to device": (lambda m, x, mask, n: x + m.host.to(x.device), ["aten::_to_copy"]),
    "to another": (lambda m, x, mask, n: x + torch.ones(4).to(m.table), ["aten::_to_copy"]),
    "host index": (lambda m, x, mask, n: x[torch.tensor([2, 0])], ["aten::index"]),
    "copy": (lambda m, x, mask, n: torch.empty_like(x).copy_(m.host), ["aten::copy_"]),
    "host data of a read": (
        lambda m, x, mask, n: x * torch.tensor([n.item()] * 4, device=x.device),
        ["tensor"],
    ),
    "in a shape of data": (
        lambda m, x, mask, n: x[mask] + torch.tensor([[1.0]] * int(mask.sum()), device=x.device),
        ["tensor"],
    ),
    "in a branch": (
        lambda m, x, mask, n: x + torch.tensor([1.0], device=x.device) if n == 2 else x,
        ["tensor"],
    ),
    "each of a loop": (lambda m, x, mask, n: sum(m.host.to(x.device) for _ in range(n)) + x, ["aten::_to_copy"] * 2),
    "no factory": (lambda m, x, mask, n: x + torch.ones(4, device=x.device) + torch.arange(4, device=x.device), []),
    "no host scalar": (lambda m, x, mask, n: x * torch.tensor(2.0), []),
    "no host work": (lambda m, x, mask, n: x * (torch.arange(4) * 2).sum().item(), []),
    "no view": (lambda m, x, mask, n: x.clone().t()[1:].add_(1).reshape(-1).to(x.device), []),
    "no autocast": (lambda m, x, mask, n: _cast(m, x), []),
}


def _cast(module: Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return module.linear(x)


@MODES
@pytest.mark.parametrize("name", HOISTS)
def test_copies_to_the_device_show_on_the_host(name, mode):
    function, expected = HOISTS[name]
    with mode():
        assert besides(function) == [("hoist", copy) for copy in expected]


def test_a_copy_names_its_submodule_and_line_and_stands_in_the_text():
    class Rope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.freqs = torch.arange(4.0)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.freqs.to(x.device)

    report = bcg.inspect(nn.Sequential(nn.Linear(4, 4), Rope()), torch.ones(1, 4))
    (finding,) = report.on_gpu
    line = Rope.forward.__code__.co_firstlineno + 1
    assert (finding.where.module, finding.where.file, finding.where.line) == ("1", __file__, line)
    assert f"on a GPU also hoist aten::_to_copy at 1 ({__file__}:{line})" in str(report)


def test_a_copy_to_the_host_that_nothing_reads_there_is_a_guard_on_a_gpu():
    assert besides(lambda m, x, mask, n: x * mask.cpu().sum()) == [("guard", "aten::_to_copy")]


def test_guards_and_breaks_are_not_told_twice():
    def forward(m: Module, x: Tensor, mask: Tensor, n: Tensor) -> Tensor:
        kept = x[mask] * len(mask.tolist())
        return kept + n.item() if torch.equal(n, n) else kept

    report = inspect(forward)
    assert len(report.findings) == 4
    assert report.on_gpu == ()


def test_what_the_first_forward_caches_is_copied_once():
    def forward(m: Module, x: Tensor, mask: Tensor, n: Tensor) -> Tensor:
        key = str(x.device)
        if key not in m.cache:
            m.cache[key] = m.host.to(x.device)
        return x + m.cache[key]

    assert besides(forward) == []


def test_an_eager_submodule_is_not_looked_into():
    module = Module(lambda m, x, mask, n: m.inner(x) + torch.tensor([1.0], device=x.device))
    with torch.no_grad():
        call = CallBinder(module.forward).call(call_of(), {})
        assert call is not None
        found = foresee(module, call, RunnerConfig(), {"inner"})
    assert [(finding.kind, finding.name) for finding in found] == [("module break", "inner"), ("hoist", "tensor")]
    assert module.inner.seen == 0


def test_functions_that_are_eager_breaks_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BCG_EAGER_FUNCTIONS", "torch:cumsum,torch.nn.functional:gelu")
    report = inspect(lambda m, x, mask, n: nn.functional.gelu(torch.cumsum(x, 0)) + m.host.to(x.device))
    assert len(report.of_kind("break")) == 2
    assert [finding.kind for finding in report.on_gpu] == ["hoist"]


UNKNOWN: dict[str, tuple[Callable[..., Any], str]] = {
    "numpy": (lambda m, x, mask, n: x * float(n.numpy()), "numpy"),
    "shape in place": (lambda m, x, mask, n: x.clone().unsqueeze_(0) + 1, "changes the shape of a tensor in place"),
    "other device": (lambda m, x, mask, n: x + 1 if x.device.type == "cpu" else 1 / 0, "ZeroDivisionError"),
}


@MODES
@pytest.mark.parametrize("name", UNKNOWN)
def test_where_it_cannot_be_told_the_report_says_so_in_a_line(name, mode):
    function, reason = UNKNOWN[name]
    with mode():
        report = inspect(function)
    assert report.rejected is None
    assert report.segments > 0
    assert report.on_gpu == ()
    assert reason in str(report.on_gpu_unknown)
    assert f"what a GPU meets besides is not known: {report.on_gpu_unknown}" in str(report)


def test_a_module_that_cannot_be_copied_is_said_so():
    module = Module(lambda m, x, mask, n: x + 1)
    module.lock = threading.Lock()
    report = bcg.inspect(module, *call_of())
    assert report.rejected is None
    assert "lock" in str(report.on_gpu_unknown)


def test_compiled_code_is_not_looked_into():
    module = Module(lambda m, x, mask, n: m.linear(x))
    module.linear.compile(backend="eager")
    report = bcg.inspect(module, *call_of())
    assert [finding.kind for finding in report.findings] == ["compiled"]
    assert "compiled code" in str(report.on_gpu_unknown)


@MODES
def test_the_module_and_random_numbers_are_left_alone(mode):
    def forward(m: Module, x: Tensor, mask: Tensor, n: Tensor) -> Tensor:
        m.calls.append(1)
        m.cache["last"] = x + torch.rand_like(x)
        return m.inner(x) + torch.rand(4, device=x.device)

    module = Module(forward)
    parameters = list(module.parameters())
    arguments = call_of()
    torch.manual_seed(3)
    random_state, host_state = torch.get_rng_state(), random.getstate()
    with mode():
        call = CallBinder(module.forward).call(arguments, {})
        assert call is not None
        foresee(module, call, RunnerConfig(), {"inner"})
    assert torch.equal(torch.get_rng_state(), random_state)
    assert random.getstate() == host_state
    assert (module.calls, module.cache, float(module.inner.seen)) == ([], {}, 0.0)
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(arguments, call_of(), strict=True))
    assert "forward" not in module.inner.__dict__


def test_a_cache_beyond_the_module_gives_host_tensors_afterwards():
    @functools.cache
    def table(size: int, anchor: Callable[[], Tensor]) -> Tensor:
        return torch.zeros(size, device=anchor().device) + 1

    def anchor() -> Tensor:
        return held[0]

    held = [torch.zeros(())]

    def forward(m: Module, x: Tensor, mask: Tensor, n: Tensor) -> Tensor:
        held[0] = x
        return x + table(4, anchor)

    module = Module(forward)
    with torch.no_grad():
        call = CallBinder(module.forward).call(call_of(), {})
        assert call is not None
        foresee(module, call, RunnerConfig(), ())
        assert type(table(4, anchor)) is FarTensor
        result = module(*call_of())
    assert type(result) is Tensor
    assert torch.equal(result, call_of()[0] + 1)


def test_a_cache_that_keeps_the_copy_does_not_keep_the_weights():
    @functools.cache
    def cached(module: nn.Module) -> int:
        return 1

    module = Module(lambda m, x, mask, n: m.linear(x) * cached(m))
    address = module.linear.weight.data_ptr()
    with torch.no_grad():
        call = CallBinder(module.forward).call(call_of(), {})
        assert call is not None
        foresee(module, call, RunnerConfig(), ())
    gc.collect()
    kept = [tensor for tensor in gc.get_objects() if type(tensor) is FarTensor]
    assert cached.cache_info().currsize == 1
    assert len(kept) >= len(list(module.parameters()))
    assert all(tensor.content.data_ptr() != address for tensor in kept)


def test_every_opaque_argument_is_named():
    class Steps(nn.Module):
        def forward(self, x: Tensor, options: dict[str, Any], steps: Any = None) -> Tensor:
            return x + 1

    report = bcg.inspect(Steps(), torch.ones(2), {"a": 1, "callback": [lambda: 1]}, steps=iter([1]))
    assert [argument.path for argument in report.opaque] == ["options['callback'][0]", "steps"]
    assert "local function" in report.opaque[0].reason
    assert report.segments == 0
    assert "options['callback'][0]" in str(report.rejected)
    assert f"argument `steps` {report.opaque[1].reason}" in str(report)
    assert bcg.inspect(Steps(), torch.ones(2), {"a": 1}).opaque == ()
