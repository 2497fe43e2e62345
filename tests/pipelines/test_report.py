"""What a warm-up report says of compiled code and of what was measured."""

from __future__ import annotations

from torch import nn

from bcg import RunnerConfig
from bcg.pipelines.report import SignatureRow, WarmupReport, compile_note


def model() -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2) for _ in range(3)]), "out": nn.Linear(2, 2)})


def row(**fields: object) -> SignatureRow:
    return SignatureRow(
        component="transformer", signature="x float32[1]", request="64x64", segments=1, breaks=0, guards=0,
        capture_s=0.1, bytes=10, eager_ms=2.0, replay_ms=1.0, verified="close", **fields,
    )  # fmt: skip


def test_without_compiling_the_report_says_what_blocks_would_do_and_no_number_that_nobody_measured() -> None:
    note = compile_note("transformer", model(), RunnerConfig())
    assert note is not None
    assert 'compile="blocks" would compile its 3 repeated blocks of one class' in note
    assert "%" not in note and " ms" not in note


def test_there_is_nothing_to_say_where_something_is_compiled_or_nothing_repeats() -> None:
    assert compile_note("transformer", model(), RunnerConfig(compile="blocks")) is None
    assert compile_note("transformer", nn.Linear(2, 2), RunnerConfig()) is None


def test_what_autotuning_measured_is_in_the_table_and_in_json() -> None:
    chosen = row(arm="graph+blocks", arms_ms={"eager": 9.0, "graph": 4.0, "graph+blocks": 3.0})
    report = WarmupReport(pipeline="FluxPipeline", rows=(chosen, row()), outcomes=())
    text = " ".join(str(report).split())
    assert text.count("autotuned:") == 1
    assert "autotuned: graph+blocks, of graph+blocks 3.00," in text
    assert report.to_dict()["rows"][0]["arms_ms"]["graph"] == 4.0
