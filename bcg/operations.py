"""The table of operations: what each means for a capture.

To teach bcg a new operation, add its name to a set below, or a rule to `_RULES` where it depends on the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from bcg import _torch


class Kind(Enum):
    """What a capture does with an operation; HOST is a read of what would be host data on a GPU."""

    PLAIN = "captured"
    BREAK = "break"
    READ = "guard"
    HOIST = "hoist"
    COLLECTIVE = "collective"
    FORBIDDEN = "forbidden"
    HOST = "host"


# Results whose shape depends on data, and solvers that wait for the device, beyond what torch tags as such.
BREAKS: Final = frozenset(
    {
        "aten::linalg_eig", "aten::_linalg_eigh", "aten::linalg_lstsq", "aten::_linalg_svd", "aten::linalg_inv_ex",
        "aten::_linalg_solve_ex", "aten::linalg_lu_factor_ex", "aten::linalg_cholesky_ex", "aten::multinomial",
        "aten::histogram", "aten::_ctc_loss", "aten::nonzero_numpy", "aten::_pack_padded_sequence",
    }
)  # fmt: skip

# Operations that hand a value to the host, beyond what torch tags as such.
READS: Final = frozenset({"aten::equal", "aten::is_nonzero"})

# Operations that give a tensor other memory, so that a recorded address would not be its address.
FORBIDDEN: Final = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_"})

_COLLECTIVE_NAMESPACES: Final = ("c10d::", "_c10d_functional::", "c10d_functional::", "symm_mem::")
_ATTENTION_SEEDED: Final = "dropout_p"


class Arguments:
    """The arguments of one operation, by name, with the device that the capture is for."""

    def __init__(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device_type: str) -> None:
        self.device_type = device_type
        self._operator = operator
        self._args = args
        self._kwargs = kwargs

    def get(self, name: str) -> Any:
        """Return an argument by its name in the schema, or None where it was left out."""
        position = _torch.argument_position(self._operator, name)
        if position is not None and position < len(self._args):
            return self._args[position]
        return self._kwargs.get(name)

    def on_device(self, value: Any) -> bool:
        """Tell whether a value is a tensor on the captured device."""
        return isinstance(value, Tensor) and value.device.type == self.device_type

    def on_host(self, value: Any) -> bool:
        """Tell whether a value is a host tensor while the capture is for another device."""
        return self.device_type != "cpu" and isinstance(value, Tensor) and value.device.type == "cpu"


def _index(arguments: Arguments) -> Kind:
    indices = arguments.get("indices") or ()
    if _has_mask(indices):
        return Kind.BREAK
    return Kind.HOIST if any(arguments.on_host(index) for index in indices) else Kind.PLAIN


def _index_put(arguments: Arguments) -> Kind:
    indices, value = arguments.get("indices") or (), arguments.get("values")
    # A mask with one value from the host is a masked fill, without a look at the mask: ATen's canDispatchToMaskedFill.
    if _has_mask(indices) and not (
        value.numel() == 1 and value.device.type == "cpu" and not arguments.get("accumulate")
    ):
        return Kind.BREAK
    host = any(arguments.on_host(index) for index in indices) or (arguments.on_host(value) and value.dim() > 0)
    return Kind.HOIST if host else Kind.PLAIN


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _to_copy(arguments: Arguments) -> Kind:
    source, target = arguments.get("self"), arguments.get("device")
    if target is None or arguments.device_type == "cpu":
        return Kind.PLAIN
    target_type = torch.device(target).type
    if arguments.on_device(source) and target_type == "cpu":
        return Kind.READ
    return Kind.HOIST if arguments.on_host(source) and target_type == arguments.device_type else Kind.PLAIN


def _copy(arguments: Arguments) -> Kind:
    target, source = arguments.get("self"), arguments.get("src")
    if arguments.on_host(target) and arguments.on_device(source):
        return Kind.READ
    return Kind.HOIST if arguments.on_device(target) and arguments.on_host(source) else Kind.PLAIN


def _repeat_interleave(arguments: Arguments) -> Kind:
    return Kind.PLAIN if arguments.get("output_size") is not None else Kind.BREAK


_RULES: Final[Mapping[str, Callable[[Arguments], Kind]]] = {
    "aten::index": _index,
    "aten::index_put": _index_put,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::_unsafe_index": _index,
    "aten::_unsafe_index_put": _index_put,
    "aten::_to_copy": _to_copy,
    "aten::copy_": _copy,
    "aten::repeat_interleave": _repeat_interleave,
}


@cache
def base_name(operator: Any) -> str:
    """Return ``aten::index`` for every overload of an operator."""
    return _torch.operator_name(operator).split(".")[0]


@cache
def _fixed_kind(operator: Any) -> Kind:
    name = base_name(operator)
    if name.startswith(_COLLECTIVE_NAMESPACES):
        return Kind.COLLECTIVE
    if name in FORBIDDEN:
        return Kind.FORBIDDEN
    if name in BREAKS or torch.Tag.dynamic_output_shape in operator.tags:
        return Kind.BREAK
    if name in READS or torch.Tag.data_dependent_output in operator.tags:
        return Kind.READ
    return Kind.PLAIN


def is_host_read(operator: Any) -> bool:
    """Tell whether an operation hands a tensor's value to the host, whatever its arguments are."""
    return _fixed_kind(operator) is Kind.READ


def classify(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device_type: str) -> Kind:
    """Say what a capture does with one operation.

    Args:
        operator: The operator overload that was dispatched.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        device_type: Type of the device that the capture is for.

    Returns:
        The kind.
    """
    rule = _RULES.get(base_name(operator))
    if rule is not None:
        return rule(Arguments(operator, args, kwargs, device_type))
    return _fixed_kind(operator)


def draws_random(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether an operation draws random numbers; attention kernels are tagged so, but draw only for dropout."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    if _torch.argument_position(operator, _ATTENTION_SEEDED) is None:
        return True
    return bool(Arguments(operator, args, kwargs, "").get(_ATTENTION_SEEDED))


def generator_of(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """Return the explicit generator that an operation draws from, if any."""
    found = Arguments(operator, args, kwargs, "").get("generator")
    return found if isinstance(found, torch.Generator) else None
