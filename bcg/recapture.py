"""Keep of each captured call what a later capture of it needs, and capture known calls again.

Integers, booleans and masks steer shapes and values on the host, so their content is kept, on the host. Other
floating-point inputs are redrawn: a graph computes with whatever its inputs hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from bcg.ambient import ambient_state, call_scope
from bcg.signature import Call, Signature, TensorSpec

if TYPE_CHECKING:
    from bcg.entry import Entry

_SEED: Final = 20_233
_MAX_KEPT_FLOATS: Final = 16
"""Elements up to which any floating-point input is kept: time steps, guidance, scales."""


@dataclass(frozen=True)
class KnownCall:
    """A captured call without its tensors, with the content of those that steer the forward.

    Attributes:
        signature: Its signature, the ambient state at capture included.
        call: The call without tensors.
        kept: Host copies of some of its tensors, by their position among the call's tensors.
        input_bytes: Size of all its tensors; the scratch memory of a replay grows with it.
        device: Where the module was.
    """

    signature: Signature
    call: Call
    kept: Mapping[int, Tensor]
    input_bytes: int
    device: torch.device

    @classmethod
    def of(cls, entry: Entry) -> KnownCall:
        """Return the call that an entry was captured from."""
        return cls(entry.signature, entry.call, entry.kept, entry.inputs.bytes(), entry.pool.device)

    def revive(self) -> Call:
        """Return the call with tensors, keyed under the ambient state that is now."""
        generator = torch.Generator().manual_seed(_SEED)
        with torch.inference_mode(False), torch.no_grad():
            tensors = [
                _tensor(spec, self.kept.get(position), generator)
                for position, spec in enumerate(self.signature.tensor_specs)
            ]
        leaves = list(self.call.leaves)
        for slot, tensor in zip(self.call.tensor_slots, tensors, strict=True):
            leaves[slot] = tensor
        return replace(
            self.call,
            arguments=self.call.structure.unflatten(leaves),
            leaves=leaves,
            tensors=tensors,
            signature=self.signature.under(ambient_state()),
        )

    @contextlib.contextmanager
    def scope(self) -> Iterator[Call]:
        """Revive the call under the gradient, inference and autocast modes that it was captured under."""
        with call_scope(self.signature.ambient):
            yield self.revive()


def kept_content(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Copy to the host what a later capture of a call needs of its tensors' content.

    Args:
        tensors: The call's tensors.

    Returns:
        By position: integers, booleans, complex numbers, masks of zeros and ones, and floating-point tensors of a few
        elements. Latents and prompt embeddings are not kept.
    """
    with torch.inference_mode(False), torch.no_grad():
        return {
            position: tensor.detach().to("cpu", copy=True) for position, tensor in enumerate(tensors) if _steers(tensor)
        }


def _steers(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() <= _MAX_KEPT_FLOATS:
        return True
    return bool(((tensor == 0) | (tensor == 1)).all())


def _tensor(spec: TensorSpec, kept: Tensor | None, generator: torch.Generator) -> Tensor:
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    # Drawn in float32 on the host: not every dtype can be drawn, and no generator of the user's moves.
    return tensor.copy_(torch.randn(spec.shape, generator=generator) if kept is None else kept)


def recapture_all(known: Iterable[KnownCall], capture: Callable[[Call], bool]) -> int:
    """Capture known calls again, the largest first, so that the smaller ones fit into its memory.

    Args:
        known: The calls; of two that are alike the later one is looked at first.
        capture: Captures a call where it is not captured yet; tells whether it did.

    Returns:
        The number captured.
    """
    captured = 0
    for call in sorted(reversed(list(known)), key=lambda item: item.input_bytes, reverse=True):
        with call.scope() as revived:
            captured += capture(revived)
    return captured
