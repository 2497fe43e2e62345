"""The warmup window: the only place where a call may capture."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_log = logging.getLogger("bcg")


class Window:
    """One warmup window, closed for good when its block ends.

    A context variable is copied into tasks that are started inside the block and outlive it, so it holds this object
    and not a flag.

    Attributes:
        calls: Calls of runners that the window saw.
        captures: Captures that it led to.
        is_open: Whether captures are allowed.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.captures = 0
        self.is_open = True

    def close(self) -> None:
        """Allow no further capture."""
        self.is_open = False
        if self.calls and not self.captures:
            _log.warning(
                "a warmup window saw %d calls and captured nothing: runner.explain(...) tells why for one call.",
                self.calls,
            )


_current: ContextVar[Window | None] = ContextVar("bcg_warmup_window", default=None)
_of_runner: weakref.WeakKeyDictionary[Any, list[Window]] = weakref.WeakKeyDictionary()


def in_warmup() -> bool:
    """Tell whether a warmup window is open for this thread or task.

    Returns:
        Whether wrapped modules may capture here.

    Example:
        >>> in_warmup()
        False
    """
    window = _current.get()
    return window is not None and window.is_open


def window_of(identity: Any) -> Window | None:
    """Return the open window that a call of a runner is in, or None.

    Args:
        identity: The runner's identity (see `BaseRunner`).
    """
    window = _current.get()
    if window is not None and window.is_open:
        return window
    windows = _of_runner.get(identity)
    return windows[-1] if windows else None


@contextlib.contextmanager
def open_window(identity: Any = None) -> Iterator[Window]:
    """Open a window for this context, or for one runner in all threads.

    Args:
        identity: A runner's identity, or None.

    Yields:
        The window.
    """
    window = Window()
    if identity is None:
        token = _current.set(window)
        try:
            yield window
        finally:
            window.close()
            _current.reset(token)
        return
    _of_runner.setdefault(identity, []).append(window)
    try:
        yield window
    finally:
        _of_runner[identity].remove(window)
        window.close()
