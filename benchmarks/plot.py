"""Draw one picture of each result file, with the conditions under which it was measured.

    python -m benchmarks.plot                                 every file of benchmarks/results that can be drawn
    python -m benchmarks.plot step.json cold.json --to docs   these

The picture of ``step.json`` is ``step.png``. Rows that failed, or whose results were not as they should be, are not
drawn but named below.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from benchmarks.harness import MIB, ROOT
from benchmarks.models import MODELS

RESULTS: Final = ROOT / "benchmarks" / "results"
PICTURES: Final = ROOT / "docs"
WIDTH_IN: Final = 9.0
DPI: Final = 130
NOTE_COLUMNS: Final = 150

ARMS: Final[dict[str, tuple[str, str]]] = {
    "eager": ("eager", "#999999"),
    "graph": ("hand-written graph", "#56b4e9"),
    "pypi": ("breakable-cuda-graphs", "#cc79a7"),
    "bcg": ("bcg", "#0072b2"),
    "blocks": ("compiled blocks", "#f0c808"),
    "bcg_blocks": ("bcg + compiled blocks", "#009e73"),
    "bcg_blocks_cached": ("bcg + compiled blocks, cached", "#7fd1b9"),
    "compile": ("torch.compile", "#e69f00"),
    "reduce_overhead": ("reduce-overhead", "#d55e00"),
    "reduce_overhead_static": ("reduce-overhead, static shapes", "#8c2d04"),
}
"""Name and colour of each arm, in the order of the bars; told apart without seeing red or green. No other is drawn."""

Row = Mapping[str, Any]
Result = Mapping[str, Any]


# ------------------------------------------------------------------------------------------------------- the parts


def is_good(row: Row) -> bool:
    """Return whether a row may be drawn."""
    return bool(row.get("status", "ok") == "ok")


def arms_of(rows: Sequence[Row]) -> list[str]:
    """Return the arms of rows that are drawn, in their order."""
    there = {row["arm"] for row in rows}
    return [arm for arm in ARMS if arm in there]


def shape_text(shape: str) -> str:
    """Shorten the name of a square.

    Example:
        >>> shape_text("512x512"), shape_text("480x832x17")
        ('512²', '480x832x17')
    """
    first, *others = shape.split("x")
    return f"{first}²" if others == [first] else shape


def conditions(result: Result) -> str:
    """Return what was measured where, and what is not drawn."""
    machine = result["machine"]
    facts = [machine["device"], f"torch {machine['torch']}", f"diffusers {machine['diffusers']}"]
    facts += [f"commit {machine['commit']}"] if machine.get("commit") else []
    text = ", ".join(facts) + "\n" + result["command"]
    good = [row for row in result["rows"] if is_good(row)]
    close = {row.get("arm") for row in good if row.get("verified") is False}
    if close:
        text += "\nClose to eager's results, not equal: " + ", ".join(ARMS[arm][0] for arm in ARMS if arm in close)
    names = ("model", "shape", "arm")
    left_out = [row for row in result["rows"] if not is_good(row)]
    if left_out:
        rows = [" ".join(str(row[name]) for name in names if name in row) for row in left_out]
        text += "\nNot drawn, since they failed: " + "; ".join(dict.fromkeys(rows))
    return "\n".join(textwrap.fill(line, NOTE_COLUMNS) for line in text.splitlines())


def canvas(result: Result, height_in: float, columns: int = 1) -> tuple[Any, Sequence[Any]]:
    """Make a figure with the conditions below, and its axes."""
    note = conditions(result)
    size = (WIDTH_IN, height_in + 0.16 * (note.count("\n") + 1))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)
    figure.supxlabel(note, fontsize=6.5, color="#555555", x=0.01, ha="left")
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8)
    return figure, axes[0]


def bars(
    axis: Any,
    groups: Sequence[str],
    arms: Sequence[str],
    value: Callable[[int, str], float | None],
    label: Callable[[int, str], str],
    error: Callable[[int, str], tuple[float, float] | None] = lambda group, arm: None,
) -> None:
    """Draw horizontal bars, a group for each of ``groups`` and in it a bar for each arm, from top to bottom.

    Args:
        axis: Where to draw.
        groups: Labels of the groups.
        arms: Keys of `ARMS`.
        value: Length of the bar of a group and an arm; None for no bar.
        label: What is written at its end.
        error: How far the quartiles lie below and above it; None for no mark.
    """
    width = 0.8 / len(arms)
    for place, arm in enumerate(arms):
        name, colour = ARMS[arm]
        drawn = [(index, length) for index in range(len(groups)) if (length := value(index, arm)) is not None]
        at = [index + (place - (len(arms) - 1) / 2) * width for index, _ in drawn]
        axis.barh(at, [length for _, length in drawn], height=0.92 * width, color=colour, label=name)
        for y, (index, length) in zip(at, drawn, strict=True):
            spread = error(index, arm)
            if spread is not None:
                axis.errorbar(length, y, xerr=[[spread[0]], [spread[1]]], color="#222222", elinewidth=0.7, capsize=1.5)
            end = length + (spread[1] if spread is not None else 0)
            write(axis, label(index, arm), end, y)
    axis.set_yticks(range(len(groups)), groups)
    axis.set_ylim(len(groups) - 0.4, -0.6)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.margins(x=0.12)


def write(axis: Any, text: str, x: float, y: float) -> None:
    """Write at the end of a bar, over the lines of the grid."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
    axis.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=6.5, bbox=box)


def legend(axis: Any, columns: int) -> None:
    """Write the names of the arms above an axis."""
    axis.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, frameon=False, fontsize=8, handlelength=1.2
    )


def height(groups: int, arms: int) -> float:
    """Return the height that bars need, in inches."""
    return 1.3 + groups * (0.14 * arms + 0.14)


def groups_of(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the models and shapes that have a row to draw, in their order."""
    return list(dict.fromkeys((row["model"], row["shape"]) for row in rows))


# ---------------------------------------------------------------------------------------------------- the pictures


def draw_step(result: Result) -> Any:
    """Draw step times relative to eager, with the milliseconds at the bars."""
    rows = [row for row in result["rows"] if is_good(row) and row.get("over_eager") is not None]
    arms, groups = arms_of(rows), groups_of(rows)
    by_key = {(row["model"], row["shape"], row["arm"]): row for row in rows}

    def find(group: int, arm: str) -> Row | None:
        return by_key.get((*groups[group], arm))

    def ratio(group: int, arm: str) -> float | None:
        row = find(group, arm)
        return None if row is None else float(row["over_eager"])

    def text(group: int, arm: str) -> str:
        return f"{by_key[(*groups[group], arm)]['step_ms']['median']:.1f} ms"

    def quartiles(group: int, arm: str) -> tuple[float, float]:
        row = by_key[(*groups[group], arm)]
        step = row["step_ms"]
        unit = step["median"] / row["over_eager"]  # eager's milliseconds
        return (step["median"] - step["q1"]) / unit, (step["q3"] - step["median"]) / unit

    figure, (axis,) = canvas(result, height(len(groups), len(arms)))
    labels = [f"{MODELS[model].title}\n{shape_text(shape)}" for model, shape in groups]
    bars(axis, labels, arms, ratio, text, quartiles)
    axis.axvline(1, color="#999999", linewidth=0.8)
    axis.set_xlabel("time of one transformer step, eager = 1 (median and quartiles)", fontsize=8)
    legend(axis, 4)
    return figure


def draw_pipeline(result: Result) -> Any:
    """Draw the speed of whole calls relative to eager, with the calls per second at the bars."""
    rows = [row for row in result["rows"] if is_good(row) and row.get("speedup") is not None]
    arms, groups = arms_of(rows), groups_of(rows)
    by_key = {(row["model"], row["shape"], row["arm"]): row for row in rows}

    def speed(group: int, arm: str) -> float | None:
        row = by_key.get((*groups[group], arm))
        return None if row is None else float(row["speedup"])

    def text(group: int, arm: str) -> str:
        return f"{by_key[(*groups[group], arm)]['per_s']:.2f} a second"

    figure, (axis,) = canvas(result, height(len(groups), len(arms)))
    steps = {(row["model"], row["shape"]): row["steps"] for row in rows}
    labels = [f"{MODELS[model].title}\n{shape_text(shape)}, {steps[model, shape]} steps" for model, shape in groups]
    bars(axis, labels, arms, speed, text)
    axis.axvline(1, color="#999999", linewidth=0.8)
    axis.set_xlabel("speed of whole pipeline calls without VAE, eager = 1", fontsize=8)
    legend(axis, 4)
    return figure


def draw_cold(result: Result) -> Any:
    """Draw the seconds until each shape is in its steady state, a panel for each model."""
    rows = [row for row in result["rows"] if is_good(row) and row.get("ready_s") is not None]
    arms = arms_of(rows)
    models = list(dict.fromkeys(row["model"] for row in rows))
    ready = {(row["model"], row["position"], row["arm"]): float(row["ready_s"]) for row in rows}
    shapes = {(row["model"], row["position"]): row["shape"] for row in rows}
    positions = sorted({row["position"] for row in rows})
    figure, axes = canvas(result, height(len(positions), len(arms)), len(models))
    for axis, model in zip(axes, models, strict=True):
        there = [position for position in positions if (model, position) in shapes]

        def seconds(group: int, arm: str, model: str = model, there: Sequence[int] = there) -> float | None:
            return ready.get((model, there[group], arm))

        def text(group: int, arm: str, model: str = model, there: Sequence[int] = there) -> str:
            return f"{ready[model, there[group], arm]:.1f}"

        labels = [f"shape {position}\n{shape_text(shapes[model, position])}" for position in there]
        bars(axis, labels, arms, seconds, text)
        axis.set_title(MODELS[model].title, fontsize=9)
        axis.set_xlabel("seconds until a new shape is ready", fontsize=8)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3, frameon=False, fontsize=8, handlelength=1.2)
    return figure


def draw_breaks(result: Result) -> Any:
    """Draw step times against the ways to cut a graph."""
    rows = [row for row in result["rows"] if is_good(row)]

    def label(row: Row) -> str:
        if row["arm"] == "eager":
            return "eager"
        breaks = f", {row['breaks']} breaks" if row["breaks"] else ""
        return f"{row['arm']}: {row['segments']} segment{'s' if row['segments'] > 1 else ''}{breaks}"

    figure, (axis,) = canvas(result, height(len(rows), 2))
    medians = [row["step_ms"]["median"] for row in rows]
    colours = [ARMS["eager" if row["arm"] == "eager" else "bcg"][1] for row in rows]
    spread = [
        [row["step_ms"]["median"] - row["step_ms"]["q1"] for row in rows],
        [row["step_ms"]["q3"] - row["step_ms"]["median"] for row in rows],
    ]
    axis.barh(range(len(rows)), medians, color=colours, height=0.6, xerr=spread, error_kw={"elinewidth": 0.7})
    for index, row in enumerate(rows):
        text = f"{row['step_ms']['median']:.1f} ms, {row['over_no_break']:.3f} times the step without a break"
        write(axis, text, row["step_ms"]["q3"], index)
    axis.set_yticks(range(len(rows)), [label(row) for row in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.4 * max(medians))
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_xlabel("time of one transformer step, ms (median and quartiles)", fontsize=8)
    model, shape = rows[0]["model"], rows[0]["shape"]
    axis.set_title(f"{MODELS[model].title} at {shape_text(shape)}", fontsize=9)
    return figure


def draw_memory(result: Result) -> Any:
    """Draw what all entries hold together, after each further one."""
    rows = [row for row in result["rows"] if is_good(row)]
    places = range(len(rows))
    reserved = [row["reserved_bytes"] / MIB for row in rows]
    outside = [row["outside_bytes"] / MIB for row in rows]
    figure, (axis,) = canvas(result, 3.6)
    axis.bar(places, reserved, color=ARMS["bcg"][1], label="in torch's allocator")
    axis.bar(places, outside, bottom=reserved, color=ARMS["graph"][1], label="outside: the graphs themselves")
    for place, total in enumerate(map(sum, zip(reserved, outside, strict=True))):
        axis.annotate(f"{total:.0f}", (place, total), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    ticks = [f"{index}\n{'+ ' if index > 1 else ''}{shape_text(row['shape'])}" for index, row in enumerate(rows, 1)]
    axis.set_xticks(places, ticks, fontsize=7)
    axis.set_ylabel("MiB above the weights", fontsize=8)
    axis.set_xlabel("shapes in one runner", fontsize=8)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.margins(y=0.08)
    legend(axis, 2)
    return figure


DRAW: Final[dict[str, Callable[[Result], Any]]] = {
    "One transformer step": draw_step,
    "Whole pipeline calls": draw_pipeline,
    "Cold start": draw_cold,
    "Breaks": draw_breaks,
    "Memory of one runner": draw_memory,
}
"""What draws the result of a benchmark, by its title."""


# ---------------------------------------------------------------------------------------------------------- script


def draw(source: Path, folder: Path) -> Path | None:
    """Draw one result file.

    Args:
        source: The file.
        folder: Where the picture goes.

    Returns:
        The picture; None where the file is no result that can be drawn, or has no row to draw.
    """
    result = json.loads(source.read_text())
    drawer = DRAW.get(result.get("title", ""))
    if drawer is None or not any(is_good(row) for row in result["rows"]):
        return None
    figure = drawer(result)
    picture = folder / f"{source.stem}.png"
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=DPI, metadata={"Software": None})  # the same picture of the same numbers
    return picture


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """Draw from the command line, and return the pictures."""
    parser = argparse.ArgumentParser(description="Draw one picture of each result file.")
    parser.add_argument("files", nargs="*", type=Path, help="default: all of benchmarks/results")
    parser.add_argument("--to", type=Path, default=PICTURES, metavar="FOLDER", help="default: docs")
    asked = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    pictures = []
    for source in asked.files or sorted(RESULTS.glob("*.json")):
        picture = draw(source, asked.to)
        print(f"{source.name}: {'nothing to draw' if picture is None else picture.name}")
        if picture is not None:
            pictures.append(picture)
    return pictures


if __name__ == "__main__":
    main()
