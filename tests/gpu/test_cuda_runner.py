"""What only a GPU can show of the runner."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import bcg

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


class Breaking(nn.Module):
    """Two data-dependent operations between matrix products, a host read and host constants."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x, mask):
        x = self.first(x) + torch.tensor([0.5], device=x.device, dtype=x.dtype)
        chosen = x[mask]
        if mask.sum().item() > 1:
            chosen = chosen * 2
        x = x.clone()
        x[mask] = chosen
        return self.second(x)


def exact(runner, *args):
    return torch.equal(runner(*args), bcg.unwrap(runner)(*args))


def test_smaller_signatures_in_a_shared_pool_leave_larger_ones_exact():
    """sglang#37606: blocks that a later, smaller capture carves anew must not be what an earlier entry reads."""
    torch.manual_seed(0)
    runner = bcg.wrap(Breaking(256).to(DEVICE))
    sizes = [4096, 2048, 1024, 300, 17]

    def call_inputs(rows):
        mask = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
        mask[: rows // 2] = True
        return torch.randn(rows, 256, device=DEVICE), mask

    with torch.no_grad():
        with bcg.warmup():
            for rows in sizes:
                runner(*call_inputs(rows))
        assert runner.stats.captures == len(sizes)
        for rows in [*sizes, *reversed(sizes), *sizes]:
            churn = [torch.full((1 << 18,), float("nan"), device=DEVICE) for _ in range(20)]
            args = call_inputs(rows)
            got = runner(*args)
            del churn
            assert torch.equal(got, bcg.unwrap(runner)(*args))
        assert runner.stats.eager_calls == 0


def test_survivors_are_exact_after_evictions_and_churn():
    """pytorch#193402: destroying one graph must not touch the workspace of the others."""
    torch.manual_seed(0)
    runner = bcg.wrap(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to(DEVICE), max_entries=3)
    with torch.no_grad():
        with bcg.warmup():
            for rows in (1024, 512, 256, 128, 64):
                runner(torch.randn(rows, 512, device=DEVICE))
        assert runner.stats.evictions == 2 and len(runner.entries) == 3
        for _ in range(5):
            gc.collect()
            torch.cuda.empty_cache()
            churn = [torch.full((1 << 20,), float("nan"), device=DEVICE) for _ in range(10)]
            for rows in (256, 128, 64):
                assert exact(runner, torch.randn(rows, 512, device=DEVICE))
            del churn
        assert runner.stats.eager_calls == 0


def test_a_module_that_is_moved_to_the_gpu_after_wrapping_is_captured_there():
    runner = bcg.wrap(nn.Linear(8, 8))
    runner.to(DEVICE)
    with torch.no_grad():
        with bcg.warmup():
            runner(torch.ones(2, 8, device=DEVICE))
        assert runner.pool.backend.name == "cuda"
        for _ in range(2):
            assert exact(runner, torch.randn(2, 8, device=DEVICE))
        assert runner.stats.replays == 2


def test_host_tensor_arguments_are_copied_to_the_device():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, scale):
            return self.linear(x) * scale.to(x.device)

    runner = bcg.wrap(Scale().to(DEVICE))
    with torch.no_grad():
        with bcg.warmup():
            runner(torch.ones(2, 8, device=DEVICE), torch.ones(8))
        for _ in range(2):
            assert exact(runner, torch.randn(2, 8, device=DEVICE), torch.randn(8))
        assert runner.stats.replays == 2


def test_a_replay_on_another_stream_waits_for_the_last_one():
    torch.manual_seed(0)
    runner = bcg.wrap(nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).to(DEVICE))
    streams = [torch.cuda.Stream() for _ in range(4)]
    with torch.no_grad():
        with bcg.warmup():
            runner(torch.randn(2048, 2048, device=DEVICE))
        inputs = [torch.randn(2048, 2048, device=DEVICE) for _ in range(16)]
        torch.cuda.synchronize()
        outputs = []
        for n, x in enumerate(inputs):
            with torch.cuda.stream(streams[n % 4]):
                outputs.append(runner(x))
        torch.cuda.synchronize()
        for x, got in zip(inputs, outputs, strict=True):
            assert torch.equal(got, bcg.unwrap(runner)(x))


def test_dropout_draws_what_eager_draws():
    runner = bcg.wrap(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).to(DEVICE).train())
    with torch.no_grad():
        torch.manual_seed(1)
        with bcg.warmup():
            captured = runner(torch.ones(4, 64, device=DEVICE))
        torch.manual_seed(1)
        assert torch.equal(captured, bcg.unwrap(runner)(torch.ones(4, 64, device=DEVICE)))
        for seed in (2, 3):
            x = torch.randn(4, 64, device=DEVICE)
            torch.manual_seed(seed)
            got = [runner(x), runner(x), torch.randn(3, device=DEVICE)]
            torch.manual_seed(seed)
            want = [bcg.unwrap(runner)(x), bcg.unwrap(runner)(x), torch.randn(3, device=DEVICE)]
            assert all(map(torch.equal, got, want))
        assert runner.stats.replays == 4


def test_out_of_memory_in_a_capture_is_served_eagerly_and_gives_the_memory_back():
    class Hungry(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1024, 1024)
            self.ballast: list[torch.Tensor] = []

        def forward(self, x):
            for _ in range(4):
                x = self.linear(x)
            return x

    runner = bcg.wrap(Hungry().to(DEVICE))
    x = torch.randn(1 << 16, 1024, device=DEVICE)  # 256 MiB a tensor
    with torch.no_grad():
        want = bcg.unwrap(runner)(x)
        gc.collect()
        torch.cuda.empty_cache()
        unused_before = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        free_bytes = torch.cuda.mem_get_info()[0]
        ballast = torch.empty(free_bytes - (900 << 20), dtype=torch.uint8, device=DEVICE)
        with bcg.warmup():
            got = runner(x)
        del ballast
        assert torch.equal(got, want)
        assert runner.stats.captures + runner.stats.rejections == 1
        assert runner.stats.rejections == 1
        del got
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < unused_before + (96 << 20)
        with bcg.warmup():
            assert torch.equal(runner(x), want)
        assert runner.stats.captures == 1
