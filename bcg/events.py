"""The lines that a runner logs: text for a person, and the same facts as fields for a machine.

Every line goes to the logger ``bcg`` and carries ``bcg_event`` (one of ``capture``, ``reject``, ``evict``, ``miss``,
``quarantine``, ``refusal``, ``recapture``, ``release``, ``compact``), ``bcg_module`` and the fields of that event, so
that any formatter that writes a record's attributes gives structured logs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bcg.memory import bytes_text

if TYPE_CHECKING:
    from bcg.entry import Entry
    from bcg.signature import Signature

_log = logging.getLogger("bcg")


class Events:
    """Log what happens to one runner.

    Args:
        module: The module's class, which every line begins with.
        debug: Log more facts: what a capture met, and every miss.
    """

    def __init__(self, module: str, debug: bool = False) -> None:
        self._module = module
        self._debug = debug

    def emit(self, level: int, event: str, text: str, **fields: Any) -> None:
        """Log one line.

        Args:
            level: Of `logging`.
            event: What happened, in one word.
            text: For a person.
            **fields: For a machine; ``bcg_`` is put before each name.
        """
        extra = {"bcg_event": event, "bcg_module": self._module}
        _log.log(level, "%s: %s", self._module, text, extra=extra | {f"bcg_{key}": fields[key] for key in fields})

    def captured(self, entry: Entry) -> None:
        """Log a capture."""
        text = f"captured {entry!r} in {entry.capture_s:.2f} s, verified {entry.verified}"
        facts = {"segments": entry.segments, "breaks": entry.breaks, "guards": entry.guards, "bytes": entry.bytes}
        self.emit(
            logging.INFO, "capture", text, signature=entry.signature.summary(), capture_s=entry.capture_s,
            verified=entry.verified, **facts,
        )  # fmt: skip
        if self._debug:
            self._capture_facts(entry)

    def _capture_facts(self, entry: Entry) -> None:
        summary = entry.signature.summary()
        for finding in entry.findings:
            self.emit(logging.INFO, "capture", f"met {finding}", signature=summary, finding=str(finding))
        held = (
            f"{bytes_text(entry.own_bytes)} of its own, {bytes_text(entry.arena_bytes)} of static inputs that others "
            f"share, pool grew by {bytes_text(entry.pool_bytes)}"
        )
        self.emit(logging.INFO, "capture", f"holds {held}", signature=summary, own_bytes=entry.own_bytes)

    def rejected(self, signature: Signature, reason: str) -> None:
        """Log a capture that led to nothing."""
        text = f"not captured, and run eagerly: {reason} [{signature.summary()}]"
        self.emit(logging.WARNING, "reject", text, signature=signature.summary(), reason=reason)

    def evicted(self, entry: Entry) -> None:
        """Log an entry that makes room for others."""
        self.emit(
            logging.INFO, "evict", f"evicted {entry!r}", signature=entry.signature.summary(), bytes=entry.own_bytes
        )

    def missed(self, signature: Signature, reason: str, differences: Sequence[str], *, is_first: bool) -> None:
        """Log the first miss of a signature; with ``debug`` every miss.

        Args:
            signature: The call's.
            reason: Text for a person.
            differences: What differs from the nearest captured signature, one argument a line.
            is_first: Nobody was told of this signature yet.
        """
        if is_first or self._debug:
            level = logging.WARNING if is_first else logging.INFO
            summary = signature.summary()
            self.emit(level, "miss", reason, signature=summary, differences=tuple(differences), first=is_first)

    def quarantined(self, signature: Signature, reason: str, *, is_lasting: bool) -> None:
        """Log a signature whose replay failed.

        Args:
            signature: The call's.
            reason: How it failed.
            is_lasting: It will not be captured again.
        """
        text = f"{reason}; the signature runs eagerly {'from now on' if is_lasting else 'until it is captured again'}"
        self.emit(logging.WARNING, "quarantine", text, signature=signature.summary(), reason=reason)
