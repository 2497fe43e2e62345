"""What every test shares: the markers, what skips them and why, and the checks that no test leaves anything behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from bcg.config import ENVIRONMENT_PREFIX
from bcg.graph import current_capture

GPU_FOLDER = Path(__file__).parent / "gpu"

# Before anything imports them: pytest shows the values of an assertion only in files that it knows of.
pytest.register_assert_rewrite(*(path.stem for path in (Path(__file__).parent / "helpers").glob("*.py")))

# Shared machines stall for seconds at a time; pytest's own timeout is what catches a hang.
hypothesis.settings.register_profile("bcg", deadline=None, print_blob=True)
hypothesis.settings.load_profile("bcg")

# Tiny tensors gain nothing from a second thread, and on a busy machine the threads mostly wait for each other.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also run the soak tests, which take minutes each")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "gpu(count=1): needs that many CUDA devices; everything in tests/gpu is marked by itself"
    )
    config.addinivalue_line("markers", "soak: runs for minutes; only with --soak")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_FOLDER in item.path.parents and item.get_closest_marker("gpu") is None:
            item.add_marker("gpu")
        reason = _skip_reason(config, item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _skip_reason(config: pytest.Config, item: pytest.Item) -> str | None:
    gpu = item.get_closest_marker("gpu")
    if gpu is not None:
        needed, present = gpu.kwargs.get("count", 1), torch.cuda.device_count()
        if present < needed:
            return f"needs {needed} CUDA device(s), here are {present}"
    if item.get_closest_marker("soak") is not None and not config.getoption("--soak"):
        return "a soak test: run it with --soak"
    return None


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the caller's BCG_ variables, which change defaults, out of the tests."""
    for variable in list(os.environ):
        if variable.startswith(ENVIRONMENT_PREFIX):
            monkeypatch.delenv(variable)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Give every test the same random numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_open_capture() -> Iterator[None]:
    """Fail the test that leaves a capture open; the next one would fail in its place."""
    yield
    assert current_capture() is None, "the test left a capture open"
