"""Count writes to chosen dicts, so that "none of ten thousand dicts changed" is one comparison.

CPython 3.12 and newer call a function on every write to a watched dict (``PyDict_Watch``, public C API, reached through
ctypes). Before 3.12 there is none, and `epoch` gives None. A pure accelerator: whoever uses it has a slower proof.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

_FIRST_VERSION: Final = (3, 12)

_Callback = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class Epoch:
    """Count the writes to all dicts watched in this process.

    Attributes:
        count: Grows with every write to a watched dict, and when one is freed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._kept: weakref.WeakKeyDictionary[Any, list[Any]] | None = None
        self._callback = _Callback(self._written)  # held as long as CPython may call it
        self._watcher = ctypes.pythonapi.PyDict_AddWatcher(self._callback)
        self._watch = ctypes.pythonapi.PyDict_Watch
        self._watch.argtypes = (ctypes.c_int, ctypes.py_object)
        # A dict may die after ctypes has been torn down; a cleared watcher is not called.
        atexit.register(ctypes.pythonapi.PyDict_ClearWatcher, self._watcher)

    def watch(self, dicts: Iterable[dict[Any, Any]]) -> None:
        """Count writes to these dicts from now on; neither keeps them alive nor slows reads."""
        for watched in dicts:
            self._watch(self._watcher, watched)

    def until_written(self, owner: Any, make: Callable[[], list[Any]]) -> list[Any]:
        """Return a list that is made once and let go at the next write to any watched dict.

        What is removed from a watched dict is so kept alive by the list no longer than by the dict.

        Args:
            owner: Whose list it is; held weakly.
            make: Makes the list, from watched dicts alone.

        Returns:
            The list.
        """
        kept = self._kept
        if kept is None:
            kept = self._kept = weakref.WeakKeyDictionary()
        found = kept.get(owner)
        if found is None:
            found = kept[owner] = make()
        return found

    def _written(self, _event: int, _watched: int, _key: int, _value: int) -> int:
        # CPython calls this before the write. No other thread can run between the two: the interpreter switches threads
        # at the entry of a function, in loops and in calls, and there is none of these after the entry. What the lists
        # hold is still in the dicts, so nothing dies here.
        self.count += 1
        self._kept = None
        return 0


@functools.cache
def epoch() -> Epoch | None:
    """Return the process's write counter, or None where this Python has none or it does not see every write."""
    if sys.version_info < _FIRST_VERSION or not _has_gil():
        return None
    try:
        counter = Epoch()
        return counter if _sees_writes(counter) else None
    except Exception:
        return None


def _has_gil() -> bool:
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


class _Probe:
    value: Any = None


def _sees_writes(counter: Epoch) -> bool:
    """Try attribute writes often enough for the interpreter to specialise them, and writes to the dict itself."""
    probe = _Probe()
    probe.value = 0
    namespace = probe.__dict__
    counter.watch([namespace])
    for number in range(64):
        before = counter.count
        probe.value = object()
        between = counter.count
        namespace[str(number)] = number
        if not before < between < counter.count:
            return False
    return True
