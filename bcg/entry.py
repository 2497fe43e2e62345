"""A captured call: what a replay needs, and nothing of the caller's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from bcg import trees
from bcg.backends import Pool
from bcg.errors import CaptureError, GuardMiss, ReplayError
from bcg.graph import BreakableCUDAGraph
from bcg.interception import Finding, Hoist, HostGuard
from bcg.module_state import StateKey
from bcg.signature import Call, Signature
from bcg.static_inputs import StaticInputs
from bcg.values import UnkeyableError, plain_form


class EntryKey(NamedTuple):
    """Under which captured entries are found.

    Attributes:
        signature: The call's signature.
        state: The module's state.
    """

    signature: Signature
    state: StateKey


class OutputTemplate:
    """The captured result, from which each replay makes a result of its own.

    Args:
        result: What the captured forward returned.
        inputs: The static inputs; one that is returned as it is stands for the caller's tensor.
        borrow: Makes a reference that keeps no scratch memory alive.

    Raises:
        CaptureError: The result holds an object that bcg cannot take apart.
    """

    def __init__(self, result: Any, inputs: Sequence[Tensor], borrow: Callable[[Tensor], Tensor]) -> None:
        tree = trees.flatten(result)
        for reason in tree.refused.values():
            raise CaptureError(f"the forward returns an object that {reason}: return tensors in plain containers.")
        positions = {id(tensor): index for index, tensor in enumerate(inputs)}
        self._structure = tree.structure
        self._leaves: list[Any] = []
        self._passed: dict[int, int] = {}
        for slot, leaf in enumerate(tree.leaves):
            if isinstance(leaf, Tensor):
                if id(leaf) in positions:
                    self._passed[slot] = positions[id(leaf)]
                self._leaves.append(borrow(leaf))
            else:
                self._leaves.append(_constant(leaf))

    def collect(self, live: Sequence[Tensor]) -> Any:
        """Return the result of the replay that just ran, in tensors and containers of its own.

        Args:
            live: The caller's tensors.
        """
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        for slot, position in self._passed.items():
            leaves[slot] = live[position]
        return self._structure.unflatten(leaves)

    def release(self) -> None:
        """Let go of all memory; nothing can be collected afterwards."""
        self._leaves = []


def _constant(value: object) -> object:
    try:
        plain_form(value)
    except UnkeyableError as error:
        raise CaptureError(f"the forward returns an object that {error}: return tensors in plain containers.") from None
    return value


@dataclass(eq=False)
class Entry:
    """One captured variant of a signature.

    Attributes:
        key: Signature and module state.
        graph: The steps.
        inputs: The static inputs.
        outputs: Makes results.
        call: The captured call without its tensors.
        findings: Hoists, guards and breaks, with their places.
        hoists: Device tensors made from host data.
        host_guards: Host tensors whose content was baked.
        externals: Tensors that outlive the call and that the graph reads by address, such as a model's cached tables.
        random: Replays draw random numbers.
        written: Buffers that eager modules write to.
        capture_s: Seconds that warm-up, capture and verification took.
        pool_bytes: Bytes by which the capture made the pool grow.
        arena_bytes: Bytes that it allocated for static inputs, which later entries share.
        outside_bytes: Device bytes outside torch's allocator by which it made the device fuller.
        kept: Host copies of the inputs that steer the forward, for a later capture; see `bcg.recapture`.
        verified: ``exact``, ``close``, or why the entry was not verified on fresh inputs.
        hits: Calls that it has served.
        choice: What autotuning measured; None where it did not run.
    """

    key: EntryKey
    graph: BreakableCUDAGraph
    inputs: StaticInputs
    outputs: OutputTemplate
    call: Call
    pool: Pool
    findings: tuple[Finding, ...] = ()
    hoists: list[Hoist] = field(default_factory=list)
    host_guards: tuple[HostGuard, ...] = ()
    externals: tuple[Tensor, ...] = ()
    random: bool = False
    written: tuple[Tensor, ...] = ()
    capture_s: float = 0.0
    pool_bytes: int = 0
    arena_bytes: int = 0
    outside_bytes: int = 0
    kept: Mapping[int, Tensor] = field(default_factory=dict)
    verified: str = "not yet"
    hits: int = 0
    choice: Any = None

    @property
    def signature(self) -> Signature:
        """The call's signature."""
        return self.key.signature

    @property
    def segments(self) -> int:
        """Number of graph segments."""
        return self.graph.segments

    @property
    def breaks(self) -> int:
        """Number of eager breaks."""
        return self.graph.breaks

    @property
    def guards(self) -> int:
        """Number of host reads that a replay makes again."""
        return self.graph.guards

    @property
    def seconds(self) -> float:
        """Seconds that warm-up, capture and verification took."""
        return self.capture_s

    @property
    def bytes(self) -> int:
        """Device bytes that came with the entry: its own, and those that it added to what entries share."""
        return self.own_bytes + self.arena_bytes + self.pool_bytes

    @property
    def own_bytes(self) -> int:
        """Device bytes that nobody else uses, and that are free again when the entry is evicted."""
        return self.inputs.owned_bytes() + self.hoist_bytes + self.break_bytes + self.outside_bytes

    @property
    def hoist_bytes(self) -> int:
        """Bytes of device tensors made from host data."""
        return sum(hoist.value.nbytes for hoist in self.hoists)

    @property
    def break_bytes(self) -> int:
        """Bytes of the static tensors that hold results of eager breaks."""
        return self.graph.break_bytes

    def replay(self, live: Sequence[Tensor]) -> Any:
        """Serve one call.

        Args:
            live: The call's tensors.

        Returns:
            The result, in tensors of its own.

        Raises:
            GuardMiss: A value that the capture relied on is another one now. The default generators are as before.
        """
        self.graph.failed_step = None
        for guard in self.host_guards:
            if not guard.holds():
                raise GuardMiss(f"host tensor used at {guard.where}: its content is not what it was at capture", guard)
        # A miss may come after random numbers were drawn; the eager call that follows must draw the same again.
        generators = self.pool.backend.generator_states(self.pool.device) if self._may_miss_after_drawing() else []
        buffers = [(tensor, tensor.clone()) for tensor in self.written]
        self.pool.before_replay()
        try:
            self.inputs.load(live)
            self.graph.replay()
            result = self.outputs.collect(live)
        except BaseException:
            for generator, state in generators:
                generator.set_state(state)
            for tensor, content in buffers:
                tensor.copy_(content)
            with contextlib.suppress(Exception):  # a dead context must not replace the error that tells why
                self.pool.after_replay()
            raise
        self.pool.after_replay()
        self.hits += 1
        return result

    def miss(self, live: Sequence[Tensor]) -> str | None:
        """Try a call, with no effect beyond the graph's memory.

        Args:
            live: The call's tensors.

        Returns:
            Which guard it misses, or why it cannot be replayed; None where the entry serves it.
        """
        # Only where a replay draws: the generators belong to all threads.
        hits = self.hits
        generators = self.pool.backend.generator_states(self.pool.device) if self.random else []
        try:
            self.replay(live)
        except ReplayError as miss:
            return str(miss)
        finally:
            self.hits = hits
            for generator, state in generators:
                generator.set_state(state)
        return None

    def _may_miss_after_drawing(self) -> bool:
        return self.random and bool(self.guards or self.breaks)

    def reset(self) -> None:
        """Give back the graph and all memory; the entry cannot be replayed afterwards."""
        # Another runner may be replaying in the pool; whoever holds a module's lock may wait for the pool's.
        with self.pool.lock:
            self.pool.wait()  # a replay in flight still reads its memory
            self.graph.reset()
        self.inputs.release()
        self.outputs.release()
        self.hoists, self.externals, self.host_guards, self.written = [], (), (), ()

    def __repr__(self) -> str:
        return (
            f"<Entry {self.signature.summary()}: {self.segments} segments, {self.breaks} breaks, {self.guards} guards, "
            f"{self.hits} hits>"
        )
