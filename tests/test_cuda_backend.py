"""What the CUDA backend asks of torch, on a machine without a GPU: graphs, streams and pools are fakes here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bcg import _torch
from bcg.backends import cuda
from bcg.backends.cuda import CudaBackend, CudaPool, CudaRecording


class FakeStream:
    """A stream that waits for nothing."""

    def wait_stream(self, other: Any) -> None:
        pass


@pytest.fixture
def pool() -> CudaPool:
    return CudaPool(CudaBackend(), torch.device("cuda", 0))


def recording_in(pool: CudaPool, *, draws_random: bool = True) -> CudaRecording:
    stream: Any = FakeStream()
    return CudaRecording(pool, stream, "thread_local", draws_random)


# -- random numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws_random", [True, False])
def test_an_invalidated_capture_replaces_the_generator_state_only_where_it_marked_it(
    draws_random: bool, pool: CudaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: list[torch.device] = []
    monkeypatch.setattr(cuda, "_replace_generator_state", replaced.append)
    monkeypatch.setattr(cuda, "_pool_streams", lambda device: ())
    for name in ("end_allocate_to_pool", "release_pool"):
        monkeypatch.setattr(_torch, name, lambda device, handle: None)

    class InvalidatedGraph:
        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture (simulated)")

        def reset(self) -> None:
            pass

    recording = recording_in(pool, draws_random=draws_random)
    recording._graph = InvalidatedGraph()  # type: ignore[assignment]
    recording.abort()
    # Graphs that draw refer to the state object of their capture: another one would part them from the generator.
    assert bool(replaced) is draws_random
