"""What every runner is: a stand-in for a module that counts and serves its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bcg.config import RunnerConfig
from bcg.proxy import ModuleProxy
from bcg.stats import Counters, RunnerStats
from bcg.warmup import open_window


class _Identity:
    """Stands for a runner where it is a key: the runner itself hashes and compares as its module."""


class BaseRunner(ModuleProxy):
    """Serve the calls of a module, and be the module in everything else.

    Args:
        module: The module to serve.
        config: Options; from the environment where left out.
    """

    def __init__(self, module: nn.Module, config: RunnerConfig | None = None) -> None:
        super().__init__(module)
        self._self_config = config if config is not None else RunnerConfig.from_environment()
        self._self_identity = _Identity()
        self._self_counters = Counters()
        self._self_warmed_up = False

    @property
    def stats(self) -> RunnerStats:
        """Counters, as they are now."""
        return self._self_counters.snapshot()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve one call of the module.

        Args:
            *args: As the module's forward takes them.
            **kwargs: Likewise.

        Returns:
            What the module returns.
        """
        self._self_counters.add("calls")
        return self._run_eagerly(args, kwargs)

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._self_counters.add("eager_calls")
        return self.__wrapped__(*args, **kwargs)

    def warmup(self, specs: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Warm the module up once: a dummy run of each spec inside a window of this runner.

        What the first calls of a process cost (kernel selection, handles, compiling, captures, autotuning) is paid
        here. Where there are ranks, they wait for each other before.

        Args:
            specs: As in `dummy_run`, the largest first.

        Returns:
            Whether it ran; False where it had run before.

        Example:
            >>> import bcg
            >>> runner = bcg.wrap(torch.nn.Linear(4, 2).requires_grad_(False))
            >>> runner.warmup([{"input": ((3, 4), torch.float32)}]), runner.warmup()
            (True, False)
        """
        if self._self_warmed_up:
            return False
        self._self_warmed_up = True
        self._wait_for_ranks()
        with open_window(self._self_identity):
            for spec in specs:
                self.dummy_run(spec)
        return True

    def _wait_for_ranks(self) -> None:
        """Wait until all ranks are here; a runner without ranks has nothing to wait for."""

    def dummy_run(self, spec: Mapping[str, Any]) -> Any:
        """Call the module with synthetic inputs.

        Args:
            spec: By argument name either a value that is passed as it is, or ``(shape, dtype)`` for a tensor on the
                module's device: normal numbers for floating dtypes, ones for booleans, zeros for integers.

        Returns:
            What the call returns.

        Example:
            >>> import bcg
            >>> runner = bcg.EagerRunner(torch.nn.Linear(4, 2))
            >>> runner.dummy_run({"input": ((3, 4), torch.float32)}).shape
            torch.Size([3, 2])
        """
        device = device_of(self.__wrapped__)
        return self(**{name: _synthetic(value, device) for name, value in spec.items()})

    def _rewrap(self, module: nn.Module) -> BaseRunner:
        return type(self)(module, self._self_config)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.__wrapped__, self._self_config)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.__wrapped__).__name__})"


class EagerRunner(BaseRunner):
    """Run every call eagerly; what `BreakableCudaGraphRunner` is compared with."""


def device_of(module: nn.Module) -> torch.device:
    """Return where a module is: the device of its first parameter or buffer, else the host."""
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            return tensor.device
    return torch.device("cpu")


def _synthetic(value: Any, device: torch.device) -> Any:
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)):
        return value
    shape, dtype = value
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    return (torch.ones if dtype == torch.bool else torch.zeros)(shape, dtype=dtype, device=device)
