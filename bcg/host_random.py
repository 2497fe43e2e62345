"""Notice a forward that draws from Python's or numpy's global random numbers, and put these back.

That Python's state moved does not tell who drew: other threads of a server do so all the time. A profile function sees
the calls of one thread. numpy's functions are invisible to it; there the state has to do.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


class HostRandomWatch:
    """Notice draws from the global random numbers while a block runs on this thread.

    A profiler that is active already stays, and Python's random numbers are not watched then.

    Attributes:
        drew_python: Whether the block drew from Python's random numbers, or seeded them.
        moved_numpy: Whether numpy's random numbers moved meanwhile, by whomever.

    Example:
        >>> with HostRandomWatch() as watch:
        ...     _ = random.random()
        >>> watch.drew_python
        True
    """

    def __init__(self) -> None:
        self.drew_python = False
        self.moved_numpy = False
        # The object behind the functions of `random`.
        self._python_owner: Any = random.random.__self__  # type: ignore[attr-defined]
        self._python_state: Any = None
        self._numpy_state: Any = None

    def __enter__(self) -> HostRandomWatch:
        self._python_state, self._numpy_state = random.getstate(), _numpy_state()
        self._profiles = sys.getprofile() is None
        if self._profiles:
            sys.setprofile(self._notice)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._profiles:
            sys.setprofile(None)
        self.moved_numpy = _by_value(self._numpy_state) != _by_value(_numpy_state())

    def _notice(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__self__", None) is self._python_owner:
            self.drew_python = self.drew_python or argument.__name__ != "getstate"

    def put_back(self) -> None:
        """Let random numbers go on where they were before the block, where it drew any."""
        if self.drew_python:
            random.setstate(self._python_state)
        if self.moved_numpy and self._numpy_state is not None:
            sys.modules["numpy"].random.set_state(self._numpy_state)


@contextlib.contextmanager
def unprofiled() -> Iterator[None]:
    """Run a block without this thread's profile function: torch.compile does not compile while one is set."""
    profile = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profile)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


def _by_value(state: Any) -> tuple[object, ...]:
    return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state or ())
