"""Every example in a docstring runs and gives what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import bcg
import bcg.pipelines

MODULES = [package.__name__ for package in (bcg, bcg.pipelines)]
for package in (bcg, bcg.pipelines):
    MODULES += [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]


@pytest.mark.parametrize("name", dict.fromkeys(MODULES))
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(module, extraglobs={"bcg": bcg, "torch": torch}, optionflags=options)
    assert result.failed == 0, "see the captured output for the examples that failed"
