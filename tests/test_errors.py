"""The exception tree: one base class, and the drawing in the module's docstring is what the classes are."""

from __future__ import annotations

import inspect
import re

import pytest

from bcg import errors
from bcg.errors import BcgError, CaptureError, ReplayError

CLASSES: dict[str, type[Exception]] = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
}


def drawn_tree() -> dict[str, str]:
    """Read (class, parent) from the drawing; every level is indented further than its parent."""
    parents: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in inspect.cleandoc(errors.__doc__ or "").splitlines():
        found = re.match(r"[│├└─ ]*(?=(\w+(?:Error|Miss))\b)", line)
        if found is None or (not path and found[1] != "BcgError"):
            continue
        depth = len(found[0])
        path = [step for step in path if step[0] < depth]
        if path:
            parents[found[1]] = path[-1][1]
        path.append((depth, found[1]))
    return parents


def test_drawn_tree_is_the_tree_of_the_classes() -> None:
    real = {name: cls.__bases__[0].__name__ for name, cls in CLASSES.items() if cls is not BcgError}
    assert drawn_tree() == real


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_is_a_documented_bcg_error(name: str) -> None:
    assert issubclass(CLASSES[name], BcgError)
    assert (CLASSES[name].__doc__ or "").strip().split("\n\n")[0].endswith(".")


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("BackendError", RuntimeError),
        ("NotAModuleError", TypeError),
        ("CaptureError", RuntimeError),
        ("ReplayError", RuntimeError),
        ("PlanError", ValueError),
    ],
)
def test_callers_that_know_only_python_can_catch_it(name: str, builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="why"):
        raise CLASSES[name]("why")


def test_a_failed_capture_and_a_failed_replay_are_told_apart() -> None:
    captures = {name for name, cls in CLASSES.items() if issubclass(cls, CaptureError)}
    replays = {name for name, cls in CLASSES.items() if issubclass(cls, ReplayError)}
    assert captures & replays == set()
    assert "GuardMiss" in replays
    assert {"StateWriteError", "HostileOperationError", "NestedCaptureError"} <= captures
