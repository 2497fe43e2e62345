"""The list of guards is kept up, and tests notice when some of them are turned off; `scripts/mutate` tries all."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "mutate.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module
    spec.loader.exec_module(module)
    return module


mutate = load()
BY_NAME = {mutation.name: mutation for mutation in mutate.MUTATIONS}


def test_every_guard_of_the_list_is_in_the_code_once() -> None:
    for mutation in mutate.MUTATIONS:
        text = (mutate.ROOT / mutation.file).read_text()
        assert mutate.changed(text, mutation) != text
    assert len(BY_NAME) == len(mutate.MUTATIONS) > 80


def test_a_guard_that_is_not_there_is_an_error() -> None:
    mutation = mutate.Mutation(name="none", file="bcg/runner.py", old="not there", new="", tests="state")
    with pytest.raises(ValueError, match="0 times, not once"):
        mutate.changed("text", mutation)


@pytest.mark.parametrize(
    ("name", "file", "chosen"),
    [
        ("tensor address", "tests/test_state_guards.py", "fast_check"),
        ("state in the key of an entry", "tests/test_runner.py", "change_of_the_module_is_a_miss"),
    ],
)
def test_tests_notice_a_guard_that_is_turned_off(name: str, file: str, chosen: str) -> None:
    noticed, output = mutate.is_noticed(BY_NAME[name], (file,), "-k", chosen)
    assert noticed, output


def test_tests_pass_with_every_guard_turned_on() -> None:
    noticed, output = mutate.is_noticed(None, ("tests/test_state_guards.py",), "-k", "one_hook or fast_check")
    assert not noticed, output
