"""The report on host overhead, in the short form that CI prints. Nothing here asserts a time."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # benchmarks/ is run from the repository and is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks import overhead  # noqa: E402


def test_every_part_of_a_call_and_a_refused_one_is_reported() -> None:
    report = overhead.main(["--device", "cpu", "--calls", "4"])
    parts = {(row["model"], row["part"]) for row in report.rows}
    for model in ("FLUX.1-dev", "FLUX.1-dev + LoRA"):
        for part in ("bind and sign", "module state", "before launch", "copies in", "72,000 nested numbers"):
            assert (model, part) in parts
    assert {("72,000 numbers", "refused, eager"), ("72,000 numbers", "refused, through a runner")} <= parts
    assert all(row["median_us"] > 0 for row in report.rows)


def test_ci_prints_the_report_and_sets_no_limit() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert "-m benchmarks.overhead --device cpu" in script
