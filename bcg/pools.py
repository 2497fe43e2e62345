"""Who works in which pool: one at a time, and never a replay within a replay.

Locks are taken in one order, a module's before its pool's, and no thread ever holds two pools: a wrapped module that is
called while its thread works in a pool runs eagerly. So no two threads can wait for each other; and in a shared pool,
an inner replay would overwrite what the outer one has computed so far.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from bcg.backends import Pool


class _ThreadState(threading.local):
    depth = 0


_thread = _ThreadState()


@contextlib.contextmanager
def working_in(pool: Pool) -> Iterator[None]:
    """Hold a pool for a block; the same thread may enter it again.

    Args:
        pool: The pool.
    """
    with pool.lock:
        _thread.depth += 1
        try:
            yield
        finally:
            _thread.depth -= 1


def is_working() -> bool:
    """Tell whether this thread captures into a pool or replays in one, for whichever runner."""
    return _thread.depth > 0
