"""The command: it prints and writes what it found, fails where it must, and hands the pipeline on."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from bcg.pipelines.tiny_registry import TINY

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
def serve(pipe):
    before = pipe.transformer.stats.captures
    pipe("a fox", height=32, width=48, num_inference_steps=2, output_type="latent")
    stats = pipe.transformer.stats
    return 7 if stats.captures == before and stats.replays >= 2 else 1


def nothing(pipe):
    print("served by", type(pipe).__name__)


number = 1
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("flux", "lumina2")}
    for name, path in found.items():
        TINY[name].build(path)
    return found


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module of its own, run in a folder with a server."""
    spec = importlib.util.spec_from_file_location("bcg_warmup_under_test", ROOT / "scripts" / "warmup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    (tmp_path / "my_server.py").write_text(SERVER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_server", raising=False)
    return module


@pytest.fixture
def run(script: ModuleType, checkpoints: dict[str, Path]) -> Any:
    def run(name: str, *options: str) -> int:
        status = script.main(["--model", str(checkpoints[name]), "--device", "cpu", "--steps", "1", *options])
        assert isinstance(status, int)
        return status

    return run


def test_it_prints_the_table_and_the_totals_and_writes_the_report(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    options = ["--resolutions", "32x48,32x32", "--guidance", "on,off", "--strict", "--report", str(report)]
    assert run("flux", *options) == 0
    printed = capsys.readouterr().out
    assert "FluxPipeline: captured" in printed
    assert "4 of 4 requests replay; 2 graphs, " in printed and " bytes, " in printed
    found = json.loads(report.read_text())
    assert found["complete"] and len(found["rows"]) == 2
    assert [one["request"]["width"] for one in found["outcomes"]] == [48, 48, 32, 32]


def test_the_server_gets_the_warmed_pipeline_in_the_same_process(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("flux", "--resolutions", "32x48", "--then", "my_server:serve") == 7
    assert run("flux", "--resolutions", "32x48", "--then", "my_server:nothing") == 0
    assert "served by FluxPipeline" in capsys.readouterr().out


def test_strict_fails_where_something_falls_short_and_serves_nothing(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["--resolutions", "35x32,32x32", "--then", "my_server:nothing"]
    assert run("lumina2", *plan, "--strict") == 1
    printed = capsys.readouterr().out
    assert "Will not replay: 35x32" in printed and "1 of 2 requests replay" in printed
    assert "served by" not in printed
    assert run("lumina2", *plan) == 0
    assert "served by" in capsys.readouterr().out


def test_a_plan_is_read_from_a_file(
    script: ModuleType, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text('{"resolutions": ["32x32"], "guidance": [false], "steps": 1}')
    model = ["--model", str(checkpoints["flux"]), "--device", "cpu", "--plan"]
    assert script.main([*model, "plan.json", "--strict"]) == 0
    assert "transformer: 32x32, guidance off" in capsys.readouterr().out
    assert script.main([*model, "none.json"]) == 2
    assert "none.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main([*model, "plan.json", "--steps", "2"])
    assert "--plan says all that --steps could say" in capsys.readouterr().err


def test_adapters_are_loaded_and_warmed_each_and_without(
    run: Any, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    from peft.utils import get_peft_model_state_dict

    pipe = TINY["flux"].load(checkpoints["flux"])
    pipe.transformer.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    layers = get_peft_model_state_dict(pipe.transformer)
    type(pipe).save_lora_weights(tmp_path, transformer_lora_layers=layers, weight_name="ink.v1.safetensors")
    assert run("flux", "--resolutions", "32x32", "--lora", "ink.v1.safetensors:0.5", "--strict") == 0
    printed = capsys.readouterr().out
    assert "adapters ink_v1 0.5" in printed and "no adapters" in printed and "2 graphs" in printed


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--pipeline", "NoSuchPipeline"], "no class NoSuchPipeline"),
        (["--then", "no_such_module:serve"], "no_such_module"),
        (["--then", "my_server:number"], "is a int, not a function"),
        (["--then", "my_server"], "Give package.module:function"),
        (["--resolutions", "32x32,48x48,64x64", "--max-entries", "1"], "max_entries=1"),
    ],
)
def test_what_cannot_be_run_is_told(
    run: Any, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("flux", *options) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--resolutions", "32"], "give height and width"),
        (["--guidance", "much"], "invalid list value"),
        (["--dtype", "float99"], "float99 is not a torch dtype"),
    ],
)
def test_options_of_a_wrong_form_are_told(
    run: Any, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("flux", *options)
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def test_the_command_finds_its_interpreter_and_stays_where_the_caller_is(tmp_path: Path) -> None:
    path = ROOT / "scripts" / "warmup"
    assert path.stat().st_mode & 0o111 == 0o111 and "set -euo pipefail" in path.read_text()
    result = subprocess.run(
        [path, "--model", "missing"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert result.returncode != 0 and "missing" in result.stderr
