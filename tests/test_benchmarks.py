"""The benchmarks at tiny sizes on CPU: every arm that runs there gives eager's results. Nothing here asserts a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # benchmarks/ is run from the repository and is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks import arms, breaks, cold, harness, memory, models, pipeline, step, together  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(params=sorted(models.MODELS))
def built(request: pytest.FixtureRequest) -> models.Built:
    return models.build(request.param, CPU, tiny=True)


class TestModels:
    def test_launch_bound_shapes_come_first_and_a_compute_bound_one_last(self, built: models.Built) -> None:
        for size in (built.model.published, built.model.tiny):
            *launch, compute = [shape.load for shape in size.shapes]
            assert launch and set(launch) == {"launch"}
            assert compute == "compute"

    def test_results_are_finite_and_depend_on_the_seed(self, built: models.Built) -> None:
        with torch.no_grad():
            for shape in built.shapes:
                first, again, other = (built.call(shape, seed)(built.module) for seed in (0, 0, 1))
                assert harness.compare(first, again).exact
                assert harness.compare(other, first).max_rel_diff not in (None, 0.0)

    def test_dtypes_are_those_of_from_pretrained(self, tmp_path: Path) -> None:
        import diffusers

        for name, constructor in (("wan", diffusers.WanTransformer3DModel), ("sd35", diffusers.SD3Transformer2DModel)):
            ours = models.build(name, CPU, tiny=True).module
            ours.save_pretrained(tmp_path / name)  # type: ignore[operator]
            loaded = constructor.from_pretrained(tmp_path / name, torch_dtype=torch.bfloat16)

            def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
                return {**dict(module.named_parameters()), **dict(module.named_buffers())}

            assert {k: v.dtype for k, v in tensors(ours).items()} == {k: v.dtype for k, v in tensors(loaded).items()}
            for key, value in dict(ours.named_buffers()).items():
                assert torch.equal(value, dict(loaded.named_buffers())[key]), key

    def test_an_unknown_name_lists_the_known_ones(self) -> None:
        with pytest.raises(KeyError, match="sana, sd35, flux"):
            models.build("dalle", CPU)


class TestHarness:
    def test_spread(self) -> None:
        spread = harness.Spread.of([4.0, 1.0, 2.0, 3.0, 5.0])
        assert (spread.median, spread.iqr, spread.n) == (3.0, 2.0, 5)

    def test_arms_take_turns_inside_their_contexts(self) -> None:
        import contextlib
        from collections.abc import Iterator

        seen: list[str] = []

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            seen.append("enter")
            yield
            seen.append("leave")

        turns = {"a": harness.Turn(lambda: seen.append("a"), context), "b": harness.Turn(lambda: seen.append("b"))}
        timings = harness.interleave(turns, harness.HostClock(), budget_s=0, calls=2)
        rounds = harness.LEAST_ROUNDS
        assert {name: len(timing.samples) for name, timing in timings.items()} == {"a": rounds, "b": rounds}
        turns_of = {"a": ["enter", "a", "a", "a", "leave"], "b": ["b", "b", "b"]}
        order = []
        while seen:
            name = "a" if seen[0] == "enter" else "b"
            turn = [seen.pop(0) for _ in turns_of[name]]
            assert turn == turns_of[name]
            order.append(name)
        taken = ["".join(order[start : start + 2]) for start in range(0, len(order), 2)]
        assert len(taken) == 1 + rounds  # the first does not count
        assert set(taken) == {"ab", "ba"}  # each arm once a round, in an order that changes

    def test_comparison_sees_bits(self) -> None:
        zero, negative = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
        nan = torch.tensor([float("nan")])
        assert harness.compare((zero,), (zero.clone(),)) == harness.Comparison(True, 0.0)
        assert harness.compare((zero,), (negative,)) == harness.Comparison(False, 0.0)
        assert harness.compare(nan, nan.clone()) == harness.Comparison(True, None)
        assert harness.compare(zero, zero.to(torch.bfloat16)) == harness.Comparison(False, None)
        assert harness.compare((zero, zero), (zero,)) == harness.Comparison(False, None)
        assert harness.compare([torch.tensor([2.0, 4.0])], [torch.tensor([2.0, 5.0])]).max_rel_diff == pytest.approx(
            0.2
        )

    def test_the_command_leaves_out_where_results_went(self) -> None:
        got = harness.command_line("step", ["--tiny", "--json", "/somewhere/x.json", "--models", "flux"])
        assert got == "python -m benchmarks.step --tiny --models flux"

    def test_options_are_left_out_with_their_values_in_both_spellings(self) -> None:
        given = ["--models", "flux,sd35", "--tiny", "--json=x", "--together", "9", "--budget", "1"]
        assert harness.without(given, "--models", "--json", "--together") == ["--tiny", "--budget", "1"]

    def test_unknown_names_are_refused_with_the_known_ones(self) -> None:
        with pytest.raises(Exception, match="choose from eager, graph"):
            harness.choice_list("eager", "graph")("eager,grpah")


class TestCompiledBlocks:
    @pytest.mark.parametrize("name", ["flux", "sana"])
    def test_the_module_is_untouched_outside(self, name: str) -> None:
        built = models.build(name, CPU, tiny=True)
        compiled = arms.CompiledBlocks(built.module, backend="eager")
        before = [dict(part.__dict__) for part in built.module.modules()]
        blocks = arms.repeated_blocks(built.module)
        assert len(blocks) == {"flux": 4, "sana": 2}[name]
        with torch.no_grad():
            want = built.call(built.shapes[0])(built.module)
            with compiled.active():
                assert all(block._compiled_call_impl is not None for block in blocks)
                got = built.call(built.shapes[0])(built.module)
        assert harness.compare(got, want).exact
        assert [dict(part.__dict__).keys() for part in built.module.modules()] == [facts.keys() for facts in before]
        torch.compiler.reset()


class TestTogether:
    """Processes that note when they enter their turn, and when they leave it."""

    TURN = (
        "import sys, time, pathlib; from benchmarks.together import Gate; "
        "gate, out = (pathlib.Path(sys.argv[sys.argv.index(name) + 1]) for name in ('--gate', '--json')); "
        "Gate(gate.parent, gate.name).wait(); start = time.monotonic(); time.sleep(0.3); "
        'out.write_text(\'{"start": %r, "end": %r}\' % (start, time.monotonic()))'
    )

    def script(self, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str) -> list[str]:
        (folder / f"{name}.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{harness.ROOT}")
        return [name]

    def test_turns_do_not_overlap(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        command = self.script(tmp_path, monkeypatch, "takes_a_turn", self.TURN)
        first, second = together.run_together({"a": command, "b": command}, prepare_s=60).values()
        assert isinstance(first, dict) and isinstance(second, dict)
        assert first["end"] <= second["start"]

    def test_what_fails_after_a_part_was_written_is_told_with_the_part(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written = 'import sys; out = sys.argv[sys.argv.index("--json") + 1]; '
        written += """open(out, "w").write('{"rows": [1], "notes": []}'); raise SystemExit("no room")"""
        command = self.script(tmp_path, monkeypatch, "writes_and_fails", written)
        assert together.run_together({"a": command}, prepare_s=60) == {
            "a": {"rows": [1], "notes": ["a: ended with 1: no room"]}
        }

    def test_what_fails_or_is_late_is_told_and_the_rest_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        good = self.script(tmp_path, monkeypatch, "takes_a_turn", self.TURN)
        bad = self.script(tmp_path, monkeypatch, "fails", "raise SystemExit('no such thing')")
        late = self.script(tmp_path, monkeypatch, "sleeps", "import time; time.sleep(100)")
        reports = together.run_together({"bad": bad, "late": late, "good": good}, prepare_s=20)
        assert reports["bad"] == "ended with 1: no such thing"
        assert reports["late"] == "not prepared after 20 s of compiling"
        assert isinstance(reports["good"], dict)


class TestScripts:
    def test_step_replays_every_model_exactly(self, tmp_path: Path) -> None:
        path = tmp_path / "step.json"
        step.main(["--tiny", "--device", "cpu", "--budget", "0", "--json", str(path)])
        written = json.loads(path.read_text())
        rows = written["rows"]
        assert {row["arm"] for row in rows} == {"eager", "bcg"}  # the hand-written graph needs CUDA
        assert len(rows) == 2 * 2 * len(models.MODELS)
        assert [(row["model"], row["shape"], row["status"]) for row in rows if row["status"] != "ok"] == []
        assert all(row["verified"] and row["step_ms"]["n"] >= harness.LEAST_ROUNDS for row in rows)
        assert all(row["speedup"] > 0 for row in rows if row["arm"] == "bcg")
        assert str(tmp_path) not in path.read_text()

    def test_a_used_up_time_box_still_writes(self, tmp_path: Path) -> None:
        path = tmp_path / "step.json"
        step.main(["--tiny", "--device", "cpu", "--time-box", "-1", "--json", str(path)])
        written = json.loads(path.read_text())
        assert written["rows"] == []
        assert len(written["notes"]) == len(models.MODELS)

    def test_an_arm_that_fails_is_a_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Broken(arms.Arm):
            name = "broken"

            def start(self, shape: str, call: models.Call) -> None:
                raise RuntimeError("no such thing")

        monkeypatch.setitem(arms.ARMS, "broken", Broken)
        report = step.main(["--tiny", "--device", "cpu", "--budget", "0", "--models", "flux", "--arms", "broken,eager"])
        statuses = {(row["arm"], row["status"]) for row in report.rows}
        assert statuses == {("broken", "error: RuntimeError: no such thing"), ("eager", "ok")}

    def test_models_are_prepared_together_and_timed_in_turns(self) -> None:
        report = step.main(
            [
                "--tiny",
                "--device=cpu",
                "--budget=0",
                "--models=flux,sd35",
                "--arms=eager,bcg",
                "--only=flux:64x64,sd35:64x64",
                "--together=120",
            ]
        )
        assert [(row["model"], row["arm"], row["status"]) for row in report.rows] == [
            (model, arm, "ok") for model in ("flux", "sd35") for arm in ("eager", "bcg")
        ]
        assert all(row["cold_start_s"] is None and row["step_ms"]["n"] >= harness.LEAST_ROUNDS for row in report.rows)

    def test_breaks_counts_every_attention_call(self) -> None:
        report = breaks.main(["--tiny", "--device", "cpu", "--budget", "0"])
        rows = {row["arm"]: row for row in report.rows}
        assert {(name, row["status"]) for name, row in rows.items() if row["status"] != "ok"} == set()
        assert all(row["verified"] for row in rows.values())
        assert rows["no break"]["breaks"] == 0
        assert rows["attention"]["breaks"] == 4
        assert rows["attention"]["segments"] == 5
        assert rows["cuts, every call"]["segments"] == 5

    def test_memory_replays_every_resolution_both_ways(self) -> None:
        report = memory.main(["--tiny", "--device", "cpu"])
        assert len(report.rows) == len(memory.shapes(tiny=True)) >= 6
        assert [row for row in report.rows if not row["verified"]] == []
        assert report.summary["entries"] == len(report.rows)


TINY_FLUX = ["--tiny", "--device", "cpu", "--models", "flux", "--shapes", "2"]


class TestCold:
    def test_every_shape_has_calls_that_a_model_can_make(self, built: models.Built) -> None:
        wanted = cold.shapes(built.model.name, tiny=True)
        assert len({shape.name for shape in wanted}) == cold.POSITIONS
        assert len({shape.name for shape in cold.shapes(built.model.name, tiny=False)}) == cold.POSITIONS
        with torch.no_grad():
            for shape in wanted:
                assert harness.compare(built.call(shape)(built.module), built.call(shape)(built.module)).exact

    def test_what_is_ready_is_the_end_of_the_slow_calls(self) -> None:
        got = cold.Start([60.0, 2.0, 0.1, 0.1, 0.5, 0.1]).as_json()  # the fifth was disturbed
        assert (got["first_call_s"], got["ready_s"], got["slow_calls"]) == (60.0, 62.0, 2)
        assert cold.Start([0.1, 0.1, 0.1, 0.1]).as_json()["ready_s"] == 0.1

    def test_processes_replay_what_eager_gives(self, tmp_path: Path) -> None:
        path = tmp_path / "cold.json"
        cold.main([*TINY_FLUX, "--arms", "eager,bcg,reduce_overhead", "--json", str(path)])
        rows = json.loads(path.read_text())["rows"]
        # reduce-overhead needs CUDA
        assert [(row["arm"], row["position"]) for row in rows] == [("eager", 1), ("eager", 2), ("bcg", 1), ("bcg", 2)]
        assert [(row["arm"], row["status"]) for row in rows if row["status"] != "ok" or not row["verified"]] == []
        assert all(0 < row["first_call_s"] <= row["ready_s"] for row in rows)
        assert str(tmp_path) not in path.read_text()

    def test_the_cache_is_there_for_the_second_process_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[tuple[str, Path | None]] = []

        def process(child: cold.Child, folder: Path) -> None:
            environment = child._environment(folder)
            assert all(not list(Path(environment[name]).iterdir()) for name in CACHES)
            cache = environment.get("BCG_COMPILE_CACHE")
            seen.append((child.name, None if cache is None else Path(cache)))
            rows = [{"position": 1, "status": "ok"}, {"position": 2, "status": "ok"}]
            (folder / "result.json").write_text(json.dumps({"rows": rows}))

        monkeypatch.setenv("BCG_COMPILE_CACHE", str(tmp_path))  # the caller's own is no part of a benchmark
        monkeypatch.setattr(cold.Child, "_process", process)
        report = cold.main([*TINY_FLUX, "--arms", "bcg_blocks,bcg_blocks_cached"])
        (_, none), (_, filled), (_, read) = seen
        assert [name for name, _ in seen] == ["bcg_blocks", "bcg_blocks_fill", "bcg_blocks_cached"]
        assert none is None and filled == read is not None and filled != tmp_path
        assert [row["status"] for row in report.rows] == ["ok"] * 6

    def test_a_process_that_fails_or_hangs_is_a_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        report = cold.main([*TINY_FLUX, "--arms", "eager", "--timeout", "0.1"])
        assert [row["status"] for row in report.rows] == ["timed out after 0 s"] * 2
        monkeypatch.setattr(cold.Child, "_command", lambda child, result: [sys.executable, "-c", "1 / 0"])
        report = cold.main([*TINY_FLUX, "--arms", "eager,bcg_blocks_cached"])
        assert {row["status"] for row in report.rows} == {
            "process ended with 1: ZeroDivisionError: division by zero",
            "skipped: the cache was not filled",
        }

    def test_what_a_process_wrote_before_it_ended_is_kept(self) -> None:
        options = cold.Options(CPU, True, 3, "auto", 900.0, harness.Deadline(None), None, 0.0)
        written = {"position": 1, "status": "not compared with eager", "ready_s": 2.0}
        rows = cold.Child("flux", "compile", options).rows({"rows": [written]}, "timed out after 900 s")
        assert [row["status"] for row in rows] == [
            "not compared with eager: timed out after 900 s",
            *["timed out after 900 s"] * 2,
        ]
        assert rows[0]["ready_s"] == 2.0

    def test_ratios_compare_one_position(self) -> None:
        rows = [
            {"model": "flux", "arm": arm, "position": position, "ready_s": seconds}
            for arm, position, seconds in (
                ("bcg_blocks", 1, 10.0), ("bcg_blocks", 2, 5.0), ("reduce_overhead", 1, 40.0),
                ("reduce_overhead_static", 2, 50.0),
            )
        ]  # fmt: skip
        cold.add_ratios(rows)
        assert (rows[0]["over_reduce_overhead"], rows[1]["over_reduce_overhead_static"]) == (0.25, 0.1)
        assert "over_reduce_overhead" not in rows[1]

    def test_an_earlier_run_is_taken_over_where_it_went_well(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran: list[str] = []

        def run(child: cold.Child) -> list[dict[str, object]]:
            ran.append(child.name)
            good = child.name == "eager" or len(ran) > 2
            return child.rows(
                {"rows": [{"position": 1, "status": "ok"}, {"position": 2, "status": "ok"}]} if good else {}, "no"
            )

        monkeypatch.setattr(cold.Child, "run", run)
        first = tmp_path / "first.json"
        cold.main([*TINY_FLUX, "--arms", "eager,bcg", "--json", str(first)])
        report = cold.main([*TINY_FLUX, "--arms", "eager,bcg", "--earlier", str(first)])
        assert ran == ["eager", "bcg", "bcg"]
        assert [(row["arm"], row["status"]) for row in report.rows] == [("eager", "ok")] * 2 + [("bcg", "ok")] * 2
        first.write_text(first.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'))
        with pytest.raises(ValueError, match="the earlier run has torch"):
            cold.main([*TINY_FLUX, "--arms", "eager", "--earlier", str(first)])

    def test_a_used_up_time_box_starts_no_process(self) -> None:
        report = cold.main([*TINY_FLUX, "--arms", "bcg,bcg_blocks_cached", "--time-box", "-1"])
        assert all(row["status"].startswith("skipped") for row in report.rows)
        assert len(report.rows) == 6


CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class TestPipeline:
    def test_whole_calls_replay_exactly(self, tmp_path: Path) -> None:
        path = tmp_path / "pipeline.json"
        every = ",".join(pipeline.RECIPES)
        pipeline.main(["--tiny", "--device", "cpu", "--models", every, "--arms", "eager,bcg", "--steps", "2",
                       "--budget", "0", "--json", str(path)])  # fmt: skip
        written = json.loads(path.read_text())
        rows = written["rows"]
        assert {row["model"] for row in rows} == set(pipeline.RECIPES)
        assert len(rows) == 2 * len(pipeline.RECIPES)
        assert [(row["model"], row["arm"], row["status"]) for row in rows if row["status"] != "ok"] == []
        assert all(row["verified"] and row["per_s"] > 0 for row in rows)
        assert all(row["eager_calls"] == 0 < row["replays"] for row in rows if row["arm"] == "bcg")
        assert str(tmp_path) not in path.read_text()

    def test_compiled_blocks_are_close(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BCG_COMPILE_BACKEND", "aot_eager")  # makes no machine code
        report = pipeline.main(["--tiny", "--device", "cpu", "--models", "flux", "--steps", "2", "--budget", "0"])
        assert [(row["arm"], row["status"]) for row in report.rows] == [
            ("eager", "ok"), ("bcg", "ok"), ("bcg_blocks", "ok")
        ]  # fmt: skip

    def test_an_arm_that_fails_is_a_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(pipeline.OPTIONS, "bcg", {"max_entries": 0})
        report = pipeline.main(["--tiny", "--device", "cpu", "--models", "wan", "--arms", "eager,bcg", "--steps", "2",
                                "--budget", "0"])  # fmt: skip
        eager, failed = report.rows
        assert eager["status"] == "ok"
        assert failed["status"].startswith("error: ConfigError")


class TestPlot:
    @pytest.fixture(autouse=True)
    def _needs_matplotlib(self) -> None:
        pytest.importorskip("matplotlib", reason="of the extra `bench`")

    def test_every_stored_result_of_a_known_benchmark_is_drawn(self, tmp_path: Path) -> None:
        from benchmarks import plot

        known = {
            source.stem
            for source in plot.RESULTS.glob("*.json")
            if json.loads(source.read_text()).get("title") in plot.DRAW
        }
        pictures = plot.main(["--to", str(tmp_path)])
        assert {picture.stem for picture in pictures} == known >= {"breaks", "memory", "step-exact"}
        assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)

    def test_cold_starts_and_pipelines_are_drawn_without_what_failed(self, tmp_path: Path) -> None:
        from benchmarks import plot

        cold_rows = [
            {"model": "flux", "arm": arm, "position": 1, "shape": "64x64", "status": status, "ready_s": 1.0,
             "verified": arm == "bcg"}
            for arm, status in (("bcg", "ok"), ("compile", "timed out after 9 s"), ("bcg_blocks", "ok"))
        ]  # fmt: skip
        pipeline_rows = [
            {"model": "flux", "arm": arm, "shape": "64x64", "steps": 2, "status": "ok", "speedup": 1.0, "per_s": 1.0}
            for arm in pipeline.OPTIONS
        ]
        for name, title, rows in (("c", "Cold start", cold_rows), ("p", "Whole pipeline calls", pipeline_rows)):
            report = harness.Report(title, harness.machine(CPU), "command", rows=rows)
            report.write(tmp_path / f"{name}.json")
            assert plot.draw(tmp_path / f"{name}.json", tmp_path) == tmp_path / f"{name}.png"
        said = plot.conditions(json.loads((tmp_path / "c.json").read_text()))
        assert "Not drawn, since they failed: flux 64x64 compile" in said
        assert "Close to eager's results, not equal: bcg + compiled blocks\n" in said

    def test_other_files_are_left_alone(self, tmp_path: Path) -> None:
        from benchmarks import plot

        (tmp_path / "other.json").write_text("{}")
        assert plot.draw(tmp_path / "other.json", tmp_path) is None
