"""What is shipped: the package list, the versions, the public names, and that importing bcg stays cheap."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires, version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import bcg
import bcg.pipelines

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def modules() -> list[str]:
    found = [package.__name__ for package in (bcg, bcg.pipelines)]
    for package in (bcg, bcg.pipelines):
        found += [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    return list(dict.fromkeys(found))


PUBLIC_MODULES = [name for name in modules() if is_public(name)]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): pinned for name, pinned in pins}


def packages_on_disk() -> set[str]:
    roots = {"bcg": ROOT / "bcg", "bcg.pipelines": ROOT / "pipelines"}
    return {
        ".".join([name, *path.parent.relative_to(root).parts])
        for name, root in roots.items()
        for path in root.rglob("__init__.py")
    }


def test_every_package_folder_is_in_the_wheel() -> None:
    """A folder that is missing from pyproject.toml works from the source tree and is gone from the wheel."""
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    assert packages_on_disk() - listed == set(), "add these to pyproject.toml"
    assert listed - packages_on_disk() == set(), "take these out of pyproject.toml"


def test_every_folder_with_code_is_a_package() -> None:
    """A folder without ``__init__.py`` would be left out in silence."""
    folders = {path.parent for root in ("bcg", "pipelines") for path in (ROOT / root).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_pipelines_are_installed_below_bcg() -> None:
    assert Path(bcg.pipelines.__file__ or "").resolve() == ROOT / "pipelines" / "__init__.py"
    assert (ROOT / "typings" / "bcg" / "pipelines").resolve() == ROOT / "pipelines"


def test_type_checkers_may_use_the_annotations() -> None:
    assert (ROOT / "bcg" / "py.typed").exists()
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"]["bcg"]


def test_python_versions_are_those_of_diffusers() -> None:
    from importlib.metadata import metadata

    theirs = SpecifierSet(metadata("diffusers")["Requires-Python"])
    ours = SpecifierSet(PROJECT["requires-python"])
    minors = [f"3.{minor}.0" for minor in range(8, 20)]
    assert [minor in ours for minor in minors] == [minor in theirs for minor in minors]


def test_dependencies_have_lower_bounds_at_most() -> None:
    """An upper bound or a pin of torch would choose a build for the user; versions belong into constraints.txt."""
    for text in PROJECT["dependencies"]:
        assert {bound.operator for bound in Requirement(text).specifier} <= {">="}, text


def test_every_direct_dependency_has_a_version_that_ci_tests() -> None:
    direct = [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]
    assert {canonicalize_name(Requirement(text).name) for text in direct} <= set(constraints())


def test_constraints_satisfy_the_bounds() -> None:
    pins = constraints()
    for text in PROJECT["dependencies"]:
        requirement = Requirement(text)
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, text


def test_extras_are_what_users_are_told() -> None:
    assert sorted(EXTRAS) == ["bench", "serve", "test"]


def test_installed_metadata_is_that_of_this_tree() -> None:
    assert version("bcg") == PROJECT["version"] == bcg.__version__
    installed = {Requirement(text).name for text in requires("bcg") or [] if "extra ==" not in text}
    assert installed == {Requirement(text).name for text in PROJECT["dependencies"]}


def test_changelog_has_a_section_for_what_is_coming() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "keepachangelog.com" in changelog
    assert "\n## [Unreleased]\n" in changelog


def test_licence_is_apache_2() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


COMMANDS = [
    ".ci/run",
    *(f"scripts/{name}" for name in ("check", "demo", "inspect", "mutate", "test", "warmup", "wheel")),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_can_be_run_and_stop_at_the_first_failure(command: str) -> None:
    path = ROOT / command
    assert path.stat().st_mode & 0o111 == 0o111
    assert "set -euo pipefail" in path.read_text()


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_every_public_module_says_what_it_is(name: str) -> None:
    assert (inspect.getdoc(importlib.import_module(name)) or "").strip()


def test_all_is_what_is_public() -> None:
    named = {name for name, value in vars(bcg).items() if is_public(name) and not isinstance(value, ModuleType)}
    assert set(bcg.__all__) == named - {"annotations"}


def test_public_names_are_documented_and_say_where_they_are_imported_from() -> None:
    for name in bcg.__all__:
        value = getattr(bcg, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert value.__module__ == "bcg", f"{name} shows as {value.__module__}.{name}"
            assert inspect.getdoc(value), f"{name} has no docstring"


@pytest.mark.parametrize("name", bcg.pipelines.__all__)
def test_no_module_takes_the_place_of_a_name_of_bcg_pipelines(name: str) -> None:
    """Importing a submodule sets its name in the package, over a function of the same name."""
    assert inspect.getdoc(getattr(bcg.pipelines, name)), f"{name} has no docstring"
    assert importlib.util.find_spec(f"bcg.pipelines.{name}") is None


def test_what_warms_a_pipeline_is_imported_from_one_place() -> None:
    assert {"WarmupPlan", "WarmupReport", "plan_from_misses", "warm", "wrap_pipeline"} <= set(bcg.pipelines.__all__)


def test_importing_bcg_does_not_import_what_only_some_users_need() -> None:
    """The core knows torch alone: diffusers takes seconds to import, and a user may not have transformers or peft."""
    loaded = loaded_by("import bcg, bcg.pipelines")
    assert loaded & {"diffusers", "transformers", "peft", "accelerate", "prometheus_client", "matplotlib"} == set()


def loaded_by(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"\S+", output))
