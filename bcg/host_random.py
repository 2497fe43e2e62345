"""Notice a forward that draws from Python's or numpy's global random numbers, and put these back.

That Python's state moved does not tell who drew: other threads of a server do so all the time. The functions of
`random` tell it, where a module calls them by name. (A profile function would see every call, but on Python 3.12 it
rewrites the code of all threads, and interpreters have crashed on that: cpython#109371.) numpy's state is compared.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from typing import Any, Final

from bcg.functions import observed


class HostRandomWatch:
    """Notice draws from the global random numbers while a block runs on this thread.

    A draw from Python's by another way than a module's global, such as ``random.random`` kept in an object, is noticed
    where no other thread could have made it.

    Attributes:
        drew_python: Whether the block drew from Python's random numbers, or seeded them.
        moved_python: Whether Python's random numbers moved though nobody was seen to draw, beside other threads: by a
            function that somebody kept.
        moved_numpy: Whether numpy's random numbers moved meanwhile, by whomever.

    Example:
        >>> with HostRandomWatch() as watch:
        ...     _ = random.random()
        >>> watch.drew_python
        True
    """

    def __init__(self) -> None:
        self.drew_python = False
        self.moved_python = False
        self.moved_numpy = False
        self._python_state: Any = None
        self._numpy_state: Any = None
        self._others_drew = False
        self._owner = threading.get_ident()
        self._observation = contextlib.ExitStack()

    def __enter__(self) -> HostRandomWatch:
        self._python_state, self._numpy_state = random.getstate(), _numpy_state()
        self._observation.enter_context(observed(_DRAWS, self._notice))
        return self

    def __exit__(self, *exception: object) -> None:
        self._observation.close()
        moved = random.getstate() != self._python_state and not self._others_drew
        if threading.active_count() == 1:
            self.drew_python = self.drew_python or moved
        else:
            self.moved_python = moved
        self.moved_numpy = _by_value(self._numpy_state) != _by_value(_numpy_state())

    def _notice(self, draw: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._owner:
            self._others_drew = True
        elif not self.drew_python:
            # torch.compile puts the state back that it finds, which changes nothing.
            self.drew_python = draw.__name__ != "setstate" or (*args, *kwargs.values()) != (random.getstate(),)

    def put_back(self) -> None:
        """Let random numbers go on where they were before the block, where it drew any."""
        if self.drew_python or self.moved_python:
            random.setstate(self._python_state)
        if self.moved_numpy and self._numpy_state is not None:
            sys.modules["numpy"].random.set_state(self._numpy_state)


_owner = random.random.__self__  # type: ignore[attr-defined]
_DRAWS: Final = [  # the functions of `random` that draw from its global numbers, or seed them
    value for name, value in vars(random).items() if getattr(value, "__self__", None) is _owner and name != "getstate"
]


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


def _by_value(state: Any) -> tuple[object, ...]:
    return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state or ())
