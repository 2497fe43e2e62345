"""Check the wheel named on the command line, in an environment where it is installed: see scripts/wheel."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import zipfile
from pathlib import Path


def main(wheel: Path) -> None:
    """Check the wheel's contents, then import each public module from where it was installed."""
    _check_contents(wheel)
    import bcg

    home = Path(sys.prefix).resolve()
    imported = [_import_from(home, name) for name in _public_modules(bcg.__path__)]
    print(f"{wheel.name}: {len(imported)} public modules imported away from the source tree")


def _check_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top_level = {name.split("/")[0] for name in names}
    metadata = {name for name in top_level if name.endswith(".dist-info")}
    assert top_level - metadata == {"bcg"}, f"top-level names: {sorted(top_level)}"
    for expected in ("bcg/py.typed", "bcg/pipelines/__init__.py"):
        assert expected in names, f"{expected} is missing from the wheel"
    assert any(name.endswith("LICENSE") for name in names), "the licence is missing from the wheel"


def _public_modules(paths: list[str]) -> list[str]:
    found = ["bcg", *(module.name for module in pkgutil.walk_packages(paths, "bcg."))]
    return [name for name in found if not any(part.startswith("_") for part in name.split("."))]


def _import_from(home: Path, name: str) -> str:
    location = Path(importlib.import_module(name).__file__ or "").resolve()
    assert home in location.parents, f"{name} was imported from {location}, not from the installed wheel"
    return name


if __name__ == "__main__":
    main(Path(sys.argv[1]))
