"""What a warm-up did: what is captured, what it cost, and what will not replay, and why."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import nn

from bcg.compilation import repeated_blocks
from bcg.config import RunnerConfig
from bcg.errors import PlanError

from .plan import WarmupRequest

__all__ = ["RequestOutcome", "ShortfallError", "SignatureRow", "WarmupReport"]

_WIDTH: Final = 120


@dataclass(frozen=True, kw_only=True)
class SignatureRow:
    """One captured entry.

    Attributes:
        component: The pipeline's component, such as ``transformer``.
        signature: Its tensors.
        request: The request that it was captured for.
        segments: Graph segments.
        breaks: Eager breaks between them.
        guards: Host reads that a replay makes again; with another value the call runs eagerly.
        capture_s: Seconds for warm-up, capture and verification.
        bytes: Device bytes.
        eager_ms: Median milliseconds of an eager call; None where it was not measured.
        replay_ms: Likewise of a replay.
        verified: ``exact``, ``close``, or why it was not verified on fresh inputs.
        arm: What autotuning chose, such as ``graph+blocks``; None where it did not run.
        arms_ms: Median milliseconds of a call by arm, as autotuning measured them.
    """

    component: str
    signature: str
    request: str
    segments: int
    breaks: int
    guards: int
    capture_s: float
    bytes: int
    eager_ms: float | None
    replay_ms: float | None
    verified: str
    arm: str | None = None
    arms_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RequestOutcome:
    """What one request of the plan came to.

    Attributes:
        request: The request.
        steps: Denoising steps that it was run with.
        calls: Calls of each component in the trial that followed the captures.
        replays: How many of them replayed.
        reasons: Why the others did not; empty where all did.
    """

    request: WarmupRequest
    steps: int
    calls: Mapping[str, int]
    replays: int
    reasons: tuple[str, ...] = ()

    @property
    def will_replay(self) -> bool:
        """Whether every call of a denoiser replayed once the captures were made, with other values than theirs."""
        return not self.reasons and self.replays == sum(self.calls.values()) > 0


@dataclass(frozen=True, kw_only=True)
class WarmupReport:
    """Report a warm-up. Printable with ``print`` and by rich, and as JSON.

    Attributes:
        pipeline: Class of the pipeline.
        rows: What is captured.
        outcomes: What each request came to, in the order in which they ran.
        notes: What will not replay beyond the plan, as far as it is known, for a person.
        text_lengths: Tokens that prompts must have to replay, or the buckets up to which they are padded; None where
            every prompt replays.
        is_bucketed: ``text_lengths`` are buckets.
        total_s: Seconds that it all took.
        total_bytes: Device bytes of all that is captured.
    """

    pipeline: str
    rows: tuple[SignatureRow, ...]
    outcomes: tuple[RequestOutcome, ...]
    notes: tuple[str, ...] = ()
    text_lengths: tuple[int, ...] | None = None
    is_bucketed: bool = False
    total_s: float = 0.0
    total_bytes: int = 0

    @property
    def shortfalls(self) -> tuple[str, ...]:
        """Requests of the plan that will not replay, and why."""
        return tuple(f"{one.request}: {reason}" for one in self.outcomes for reason in _reasons(one))

    @property
    def complete(self) -> bool:
        """Whether every request of the plan will replay."""
        return bool(self.outcomes) and not self.shortfalls

    def covers(self, *, text_length: int | None = None, **sizes: Any) -> bool:
        """Tell whether a call will replay, as far as the plan knew.

        Args:
            text_length: Tokens of its prompt, see `WarmupRequest.text_length`.
            **sizes: Fields of `WarmupRequest` that the call has, such as ``height``.

        Returns:
            Whether a request with these fields will replay, and prompts of that length do.
        """
        fits = [one for one in self.outcomes if one.will_replay and _fits(one.request, sizes)]
        return bool(fits) and self._covers_text(text_length)

    def _covers_text(self, length: int | None) -> bool:
        if self.text_lengths is None or length is None:
            return True
        return length <= max(self.text_lengths, default=0) if self.is_bucketed else length in self.text_lengths

    def to_dict(self) -> dict[str, Any]:
        """Return the report in types that JSON knows."""
        outcomes = [{**asdict(one), "will_replay": one.will_replay} for one in self.outcomes]
        for outcome in outcomes:
            outcome["request"] = {name: value for name, value in outcome["request"].items() if value is not None}
        return {
            **asdict(self),
            "outcomes": outcomes,
            "complete": self.complete,
            "shortfalls": list(self.shortfalls),
        }

    def to_json(self) -> str:
        """Return the report as JSON. Arguments that JSON does not know are written as their text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=_WIDTH, color_system=None).print(self)
        return text.getvalue().rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._table()
        for shortfall in self.shortfalls:
            yield Text(f"Will not replay: {shortfall}", style="red")
        for note in self.notes:
            yield Text(f"Note: {note}")
        replaying = sum(one.will_replay for one in self.outcomes)
        yield Text(
            f"{replaying} of {len(self.outcomes)} requests replay; {len(self.rows)} graphs, "
            f"{self.total_bytes:,} bytes, {self.total_s:.1f} s"
        )

    def _table(self) -> Table:
        table = Table(title=f"{self.pipeline}: captured", box=box.SIMPLE_HEAD, pad_edge=False, leading=1)
        table.add_column("captured for, and signature")  # the only column that gives way on a narrow terminal
        for heading in ("seg-\nments", "breaks", "guards", "capture\ns", "bytes", "eager\nms", "replay\nms"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            counts = (row.segments, row.breaks, row.guards)
            times = (_milliseconds(row.eager_ms), _milliseconds(row.replay_ms))
            table.add_row(_what(row), *map(str, counts), f"{row.capture_s:.2f}", f"{row.bytes:,}", *times)
        return table


class ShortfallError(PlanError):
    """A warm-up that had to be complete was not.

    Attributes:
        report: The report, which names what will not replay.
    """

    def __init__(self, report: WarmupReport) -> None:
        listed = "\n  ".join(report.shortfalls or ("nothing was captured",))
        super().__init__(f"{report.pipeline}: not everything in the plan will replay:\n  {listed}")
        self.report = report


def _reasons(outcome: RequestOutcome) -> Sequence[str]:
    if outcome.will_replay or outcome.reasons:
        return outcome.reasons
    return (f"{outcome.replays} of {sum(outcome.calls.values())} calls replayed",)


def _fits(request: WarmupRequest, sizes: Mapping[str, Any]) -> bool:
    return all(getattr(request, name) in (None, value) for name, value in sizes.items())


def _what(row: SignatureRow) -> Text:
    lines = [Text(f"{row.component}: {row.request}", style="bold"), Text(row.signature.replace(", ", "\n"))]
    if row.verified != "exact":
        lines.append(Text(f"verified: {row.verified}", style="yellow"))
    if row.arm is not None:
        times = ", ".join(f"{arm} {ms:.2f}" for arm, ms in sorted(row.arms_ms.items(), key=lambda item: item[1]))
        lines.append(Text(f"autotuned: {row.arm}, of {times} ms"))
    return Text("\n").join(lines)


def compile_note(component: str, module: nn.Module, config: RunnerConfig) -> str | None:
    """Say what compiled blocks would change, without a number that was not measured on this model.

    Args:
        component: The pipeline's component.
        module: Its module.
        config: Its runner's options.

    Returns:
        A sentence; None where something is compiled already, or nothing repeats.
    """
    blocks = repeated_blocks(module) if config.compile == "off" else ()
    if not blocks:
        return None
    kinds = len({type(module.get_submodule(name)) for name in blocks})
    classes = "one class" if kinds == 1 else f"{kinds} classes"
    return (
        f'{component} runs the kernels of eager (compile="off"), and equals it bit for bit. compile="blocks" would '
        f"compile its {len(blocks)} repeated blocks of {classes} for captures alone: fused kernels help most where the "
        "GPU and not the host sets the pace, and results are then close to eager, not equal. With autotune=True they "
        "are kept where they are measured to be faster."
    )


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
