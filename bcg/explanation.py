"""Say why a call does not replay, for a person and argument by argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bcg.entry import Entry, EntryKey
from bcg.module_state import describe_difference as describe_state_difference
from bcg.signature import describe_difference, distance

_MAX_LINES: Final = 20


@dataclass(frozen=True)
class Explanation:
    """Why a call runs eagerly.

    Attributes:
        text: For a person.
        differences: One line for each argument, flag or part of the module that is another one than in the nearest
            captured call.
    """

    text: str
    differences: tuple[str, ...] = ()


def not_captured(entries: Sequence[Entry], key: EntryKey) -> Explanation:
    """Explain a call without an entry, by the nearest captured one.

    Args:
        entries: All entries.
        key: The call's key.
    """
    if not entries:
        return Explanation("runs eagerly: nothing is captured yet. Call it inside `with bcg.warmup():`.")
    nearest = min(entries, key=lambda entry: _entry_distance(entry.key, key))
    lines = describe_difference(nearest.signature, key.signature)
    lines += [f"module: {line}" for line in describe_state_difference(nearest.key.state, key.state)]
    lines = lines[:_MAX_LINES]
    head = "runs eagerly: not captured. Against the nearest captured signature:\n  "
    return Explanation(head + "\n  ".join(lines), tuple(lines))


def other_guard_values(misses: Sequence[str]) -> Explanation:
    """Explain a call whose signature is captured with other host values.

    Args:
        misses: What each captured variant found.
    """
    head = "runs eagerly: captured, but with other values in its guards:\n  "
    return Explanation(head + "\n  ".join(misses), tuple(misses))


def _entry_distance(one: EntryKey, other: EntryKey) -> tuple[int, bool]:
    return distance(one.signature, other.signature), one.state is not other.state
