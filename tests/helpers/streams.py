"""Threads that work on the GPU at the same time, each on a stream of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def run_in_threads(*works: Callable[[], None], wait_s: float = 240) -> None:
    """Run functions at the same time, without gradients, and raise the first error of any.

    Args:
        *works: What the threads do.
        wait_s: Seconds after which a thread counts as one that stands still.
    """
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))
    torch.cuda.synchronize()

    def guarded(work: Callable[[], None]) -> None:
        try:
            stream = torch.cuda.Stream()
            start.wait(wait_s)
            with torch.no_grad(), torch.cuda.stream(stream):
                work()
                stream.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(wait_s)
    assert not any(thread.is_alive() for thread in threads), "a thread stands still"
    for error in errors:
        raise error
