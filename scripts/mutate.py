"""Turn off the guards of the module state one by one, and check that a test fails for each.

Each mutation changes one place of a copy of bcg and runs the tests that are to notice. One that no test notices is a
guard that could be lost without anybody knowing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1200

# Tests that are to notice a mutation; the narrowest first, since the first failure ends a run.
TESTS = {
    "state": ("tests/test_state_guards.py", "tests/test_module_state.py", "tests/test_probes.py"),
    "changes": ("tests/test_module_changes.py",),
    "runner": ("tests/test_state_guards.py", "tests/test_failure_cases.py", "tests/test_runner.py"),
    "ambient": ("tests/test_ambient.py",),
    "interception": ("tests/test_interception.py",),
}


@dataclass(frozen=True)
class Mutation:
    """One guard, and how it is turned off.

    Attributes:
        name: The guard.
        file: The file, relative to the repository.
        old: Text that is there once.
        new: What takes its place.
        tests: A key of `TESTS`; one of these must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = tuple(
    Mutation(**entry) for entry in tomllib.loads((ROOT / "scripts/mutations.toml").read_text())["mutation"]
)


@contextmanager
def mutated(mutation: Mutation | None) -> Iterator[Path]:
    """Copy what the tests need into a folder, and make the change there.

    Args:
        mutation: The change; None for a copy as it is.

    Yields:
        The folder.

    Raises:
        ValueError: The text to change is not there exactly once.
    """
    with tempfile.TemporaryDirectory(prefix="bcg-mutation-") as name:
        folder = Path(name)
        for part in ("bcg", "docs", "tests"):
            ignored = shutil.ignore_patterns("__pycache__", *(["pipelines"] if part == "bcg" else []))
            shutil.copytree(ROOT / part, folder / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        # As it is installed: the folder at the top is bcg.pipelines.
        (folder / "bcg" / "pipelines").symlink_to(ROOT / "pipelines")
        if mutation is not None:
            file = folder / mutation.file
            file.write_text(changed(file.read_text(), mutation))
        yield folder


def changed(text: str, mutation: Mutation) -> str:
    """Return a file's text with one guard turned off."""
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"mutation {mutation.name!r}: its text is in {mutation.file} {text.count(mutation.old)} times, not once."
        )
    return text.replace(mutation.old, mutation.new)


def is_noticed(mutation: Mutation | None, tests: tuple[str, ...], *options: str) -> tuple[bool, str]:
    """Run tests against a copy with one guard turned off.

    Args:
        mutation: The guard; None for none.
        tests: Files of tests, or single tests.
        *options: More for pytest.

    Returns:
        Whether a test failed, and the last lines that pytest printed.
    """
    with mutated(mutation) as folder:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
        run = subprocess.run(
            [*command, *options, *tests], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
            env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
    if run.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {run.returncode}:\n{run.stdout}{run.stderr}")
    return run.returncode == 1, run.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutations to try; all where left out")
    parser.add_argument("--list", action="store_true", help="print the names of all mutations")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(mutation.name for mutation in MUTATIONS))
        return 0
    unknown = set(arguments.names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"unknown mutations: {', '.join(sorted(unknown))}; --list prints all.")
    chosen = [mutation for mutation in MUTATIONS if not arguments.names or mutation.name in arguments.names]
    for group in dict.fromkeys(mutation.tests for mutation in chosen):
        fails, output = is_noticed(None, TESTS[group])
        if fails:
            print(f"The tests {group!r} fail with every guard turned on, and so would show nothing:\n{output}")
            return 1
    survivors = []
    for mutation in chosen:
        started = time.perf_counter()
        noticed, output = is_noticed(mutation, TESTS[mutation.tests])
        failed = [line.partition(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        verdict = failed[0] if noticed and failed else "NOTICED BY NO TEST"
        print(f"{time.perf_counter() - started:6.1f} s  {mutation.name}: {verdict}", flush=True)
        if not noticed:
            survivors.append(mutation.name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
