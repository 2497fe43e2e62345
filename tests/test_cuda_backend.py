"""What the CUDA backend asks of torch, on a machine without a GPU: graphs, streams and pools are fakes here."""

from __future__ import annotations

import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch

import bcg
from bcg import _torch
from bcg.backends import Segment, cuda
from bcg.backends.cuda import CudaBackend, CudaPool, CudaRecording
from bcg.backends.tape import TapeBackend
from bcg.graph import current_capture


class FakeStream:
    """A stream that waits for nothing."""

    def wait_stream(self, other: Any) -> None:
        pass


class FakeSwitch:
    """Makes a stream and its device the current ones for a block, as `torch.cuda.stream` does."""

    depth = 0

    def __init__(self, stream: FakeStream) -> None:
        pass

    def __enter__(self) -> None:
        FakeSwitch.depth += 1

    def __exit__(self, *exception: object) -> None:
        FakeSwitch.depth -= 1


class FakeGraph:
    """A graph that counts the users of its pool, as torch does; the first ones are empty."""

    users: ClassVar[dict[int, int]] = {}
    empty = 0

    def capture_begin(self, *, pool: int, capture_error_mode: str) -> None:
        assert self.users.get(pool) != 0, "torch has freed this pool"
        self.handle, self.is_live = pool, True
        self.users[pool] = self.users.get(pool, 0) + 1

    def capture_end(self) -> None:
        if FakeGraph.empty:
            FakeGraph.empty -= 1
            warnings.warn("The CUDA Graph is empty.", stacklevel=1)

    def replay(self) -> None:
        assert self.is_live

    def reset(self) -> None:
        self.users[self.handle] -= self.is_live
        self.is_live = False

    def __del__(self) -> None:
        self.reset()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> CudaPool:
    handles = itertools.count(1)
    monkeypatch.setattr(FakeGraph, "users", {})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream())
    monkeypatch.setattr(torch.cuda, "stream", FakeSwitch)
    monkeypatch.setattr(cuda, "_pool_streams", lambda device: ())
    return CudaPool(CudaBackend(), torch.device("cuda", 0))


def recording_in(pool: CudaPool, *, draws_random: bool = True) -> CudaRecording:
    stream: Any = FakeStream()
    return CudaRecording(pool, stream, "thread_local", draws_random)


def captured_in(pool: CudaPool, *, draws_random: bool) -> Segment:
    recording = recording_in(pool, draws_random=draws_random)
    recording.open()
    recording.begin_segment()
    segment = recording.end_segment()
    recording.close()
    assert segment is not None
    return segment


class InvalidatedGraph:
    """A graph whose capture CUDA has invalidated."""

    def capture_begin(self, **options: Any) -> None:
        pass

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture (simulated)")

    def reset(self) -> None:
        pass


# -- random numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws_random", [True, False])
def test_an_invalidated_capture_replaces_the_generator_state_only_where_it_marked_it(
    draws_random: bool, pool: CudaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: list[torch.device] = []
    monkeypatch.setattr(cuda, "_replace_generator_state", replaced.append)
    for name in ("end_allocate_to_pool", "release_pool"):
        monkeypatch.setattr(_torch, name, lambda device, handle: False)
    recording = recording_in(pool, draws_random=draws_random)
    recording._graph = InvalidatedGraph()  # type: ignore[assignment]
    recording.abort()
    # Graphs that draw refer to the state object of their capture: another one would part them from the generator.
    assert bool(replaced) is draws_random


@pytest.mark.parametrize("draws_random", [True, False])
def test_a_graph_that_draws_is_not_replayed_once_the_generator_has_left_its_state(
    draws_random: bool, pool: CudaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", (Mock(),))
    monkeypatch.setattr(torch, "Generator", Mock())
    segment = captured_in(pool, draws_random=draws_random)
    segment.replay()
    assert not segment.is_stale
    cuda._replace_generator_state(pool.device)
    assert segment.is_stale is draws_random
    if draws_random:
        with pytest.raises(bcg.ReplayError, match="capture it again"):
            segment.replay()
    else:
        segment.replay()
    captured_in(pool, draws_random=draws_random).replay()


# -- the pool's memory -------------------------------------------------------------------------------------------------


def test_memory_of_an_empty_first_segment_lives_as_long_as_the_segments_behind_it(pool: CudaPool) -> None:
    # `torch.empty` before a break adds no node to the graph, and the next segment fills its memory.
    FakeGraph.empty = 1
    recording = recording_in(pool)
    recording.open()
    recording.begin_segment()
    assert recording.end_segment() is None
    assert set(FakeGraph.users.values()) == {1}
    recording.begin_segment()
    segment = recording.end_segment()
    recording.close()
    assert FakeGraph.users == {1: 1}, "one pool, held by the segment alone"
    assert segment is not None and pool.live_segments == 1


def test_a_pool_without_graphs_has_no_memory_that_could_be_referred_to_by_address(pool: CudaPool) -> None:
    FakeGraph.empty = 1
    recording = recording_in(pool)
    recording.open()
    recording.begin_segment()
    recording.end_segment()
    recording.close()
    assert FakeGraph.users == {1: 0}
    assert pool.address_ranges() == [] and pool.bytes() == 0


def segment_of(handle: int) -> dict[str, int]:
    return {"address": 100 * handle, "total_size": 10, "segment_pool_id": handle}


@pytest.mark.parametrize(("recorded_on", "handles"), [(True, [1, 2]), (False, [1, 1])])
def test_a_handle_for_which_torch_still_records_is_captured_into_no_more_and_its_memory_stays_known(
    recorded_on: bool, handles: list[int], pool: CudaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[int] = []
    monkeypatch.setattr(_torch, "end_allocate_to_pool", lambda device, handle: recorded_on)
    monkeypatch.setattr(_torch, "release_pool", lambda device, handle: released.append(handle))
    memory = {"segments": [segment_of(handle) for handle in (1, 2, 3)]}
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", {None: memory}.__getitem__, raising=False)
    monkeypatch.setattr(cuda, "_abandoned", [])
    monkeypatch.setattr(cuda, "_replace_generator_state", lambda device: None)
    alive = captured_in(pool, draws_random=True)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "CUDAGraph", InvalidatedGraph)
        recording = recording_in(pool, draws_random=True)
        recording.open()
        recording.begin_segment()
        recording.abort()
        recording.close()
    assert released == [1]
    assert len(cuda._abandoned) == recorded_on
    assert pool.address_ranges() == [(100, 110)]
    later = captured_in(pool, draws_random=True)
    assert list(FakeGraph.users) == sorted(set(handles))
    assert pool.bytes() == 10 * len(set(handles))
    alive.reset()
    later.reset()
    assert pool.handle() == max(handles) + 1, "all memory of the old ones is free"


def test_a_segment_that_is_dropped_without_a_reset_does_not_count_any_more(pool: CudaPool) -> None:
    for _ in range(2):
        recording = recording_in(pool)
        recording.open()
        recording.begin_segment()
        segment = recording.end_segment()
        recording.close()
        assert segment is not None and pool.live_segments == 1
        del segment
        # The next capture would begin in a pool that torch has freed with its last graph.
        assert pool.live_segments == 0


def test_a_capture_goes_back_to_the_stream_and_the_device_that_were_current(
    pool: CudaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_stream(stream: Any) -> None:
        raise AssertionError("this would also change the current device, and not change it back")

    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    recording = recording_in(pool)
    recording.open()
    assert FakeSwitch.depth == 1
    recording.close()
    assert FakeSwitch.depth == 0


@pytest.mark.parametrize("lazy", ["is_conj", "is_neg", ""])
def test_a_tensor_whose_memory_does_not_hold_its_values_is_not_referred_to_by_address(
    lazy: str, pool: CudaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = recording_in(pool)
    monkeypatch.setattr(recording, "_is_scratch", lambda address: True)
    monkeypatch.setattr(cuda, "alias_at_address", lambda tensor: "alias")
    tensor: Any = Mock(is_cuda=True, **{f"{name}.return_value": name == lazy for name in ("is_conj", "is_neg")})
    assert recording.borrow(tensor) == (tensor if lazy else "alias")


# -- other threads -----------------------------------------------------------------------------------------------------


def test_threads_that_end_segments_at_the_same_time_leave_the_warnings_as_they_were() -> None:
    filters = list(warnings.filters)
    entered, second = threading.Event(), threading.Event()

    def first_in_first_out() -> None:
        with cuda._EmptyGraphWarning():
            entered.set()
            second.wait(0.2)

    def second_in_second_out() -> None:
        entered.wait()
        with cuda._EmptyGraphWarning():
            second.set()
            first.join(0.2)

    first = threading.Thread(target=first_in_first_out)
    other = threading.Thread(target=second_in_second_out)
    for thread in (first, other):
        thread.start()
    for thread in (first, other):
        thread.join()
    assert list(warnings.filters) == filters
    with pytest.warns(UserWarning, match="still heard"):
        warnings.warn("still heard", stacklevel=1)


def test_a_captured_forward_takes_itself_for_eager_and_other_threads_still_see_the_capture(monkeypatch):
    def tell() -> bool:
        return True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", tell)
    monkeypatch.setattr(TapeBackend, "capture_tells", (tell,))
    told: list[tuple[bool, bool]] = []

    class Asking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if current_capture() is not None:
                with ThreadPoolExecutor(1) as other:
                    beside = other.submit(lambda: torch.cuda.is_current_stream_capturing()).result()
                told.append((torch.cuda.is_current_stream_capturing(), beside))
            return x * 2

    with torch.no_grad():
        assert bcg.wrap(Asking()).capture(torch.ones(2))
    assert told == [(False, True)]
    assert torch.cuda.is_current_stream_capturing is tell
