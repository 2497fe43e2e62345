"""Files of compile artifacts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import bcg
from bcg.artifacts import _MAX_FILES, ArtifactStore


class FakeTorch:
    """Stands for torch's artifacts: one for each key, as text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.loaded: list[str] = []
        monkeypatch.setattr(torch.compiler, "save_cache_artifacts", self.save)
        monkeypatch.setattr(torch.compiler, "load_cache_artifacts", self.load)

    def save(self) -> Any:
        return (",".join(self.made).encode(), self._info(self.made)) if self.made else None

    def load(self, content: bytes) -> Any:
        keys = content.decode().split(",")
        self.loaded += keys
        return None if keys == ["unreadable"] else self._info(keys)

    def _info(self, keys: list[str]) -> Any:
        return SimpleNamespace(artifacts={"inductor": list(keys)})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    return FakeTorch(monkeypatch)


def test_what_one_process_stores_the_next_one_loads(fake: FakeTorch, tmp_path: Path) -> None:
    first = ArtifactStore(tmp_path / "model")
    first.load()
    fake.made = ["a"]
    first.save()
    fake.made = ["a", "b"]
    first.save()
    ArtifactStore(tmp_path / "model").load()
    assert fake.loaded == ["a", "b"]
    assert len(list(tmp_path.rglob("*.bin"))) == 1  # a process has one file


def test_a_process_that_needs_less_loses_nothing_of_the_others(fake: FakeTorch, tmp_path: Path) -> None:
    stores = [ArtifactStore(tmp_path) for _ in range(3)]
    fake.made = ["a", "b"]
    stores[0].save()
    stores[1].load()
    fake.made = ["a", "c"]  # found a, has no use for b, made c
    stores[1].save()
    fake.loaded.clear()
    stores[2].load()
    assert set(fake.loaded) == {"a", "b", "c"}


def test_a_process_that_made_nothing_new_writes_nothing(fake: FakeTorch, tmp_path: Path) -> None:
    fake.made = ["a"]
    ArtifactStore(tmp_path).save()
    later = ArtifactStore(tmp_path)
    later.load()
    later.save()
    assert len(list(tmp_path.iterdir())) == 1


def test_the_number_of_files_is_bounded_and_the_latest_stay(fake: FakeTorch, tmp_path: Path) -> None:
    for number in range(_MAX_FILES + 3):
        fake.made = [str(number)]
        ArtifactStore(tmp_path).save()
    ArtifactStore(tmp_path).load()
    assert fake.loaded == [str(number) for number in range(3, _MAX_FILES + 3)]


@pytest.mark.parametrize("damage", ["foreign", "cut off", "one bit", "empty", "unreadable by torch"])
def test_a_corrupt_or_foreign_file_is_ignored_with_one_warning(
    damage: str, fake: FakeTorch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for made in (["unreadable" if damage == "unreadable by torch" else "bad"], ["good"]):
        fake.made = made
        ArtifactStore(tmp_path).save()
    path = sorted(tmp_path.iterdir())[0]
    content = path.read_bytes()
    changed = {"foreign": b"PK" + content, "cut off": content[:-1], "one bit": content[:-1] + b"!", "empty": b""}
    path.write_bytes(changed.get(damage, content))
    store = ArtifactStore(tmp_path)
    store.load()
    store.load()
    assert "good" in fake.loaded and "bad" not in fake.loaded
    assert [record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()] != []
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_written_costs_a_warning_alone(
    fake: FakeTorch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    fake.made = ["a"]
    ArtifactStore(tmp_path / "file" / "model").save()
    assert "is not written" in caplog.text


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_capture_loads_before_it_compiles_and_stores_afterwards_by_version_device_and_model(
    fake: FakeTorch, tmp_path: Path
) -> None:
    torch._dynamo.reset()

    def capture() -> None:
        runner = bcg.wrap(Doubled(), compile="model", compile_backend="aot_eager", compile_cache=str(tmp_path))
        with torch.no_grad():
            assert runner.capture(torch.ones(3))

    fake.made = ["a"]
    capture()
    [path] = tmp_path.rglob("*.bin")
    version, device, model = path.relative_to(tmp_path).parts[:3]
    assert (version, device) == (torch.__version__, "cpu")
    assert model.startswith("Doubled-") and model.endswith(".model")
    capture()
    assert fake.loaded == ["a"]
