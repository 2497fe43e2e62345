"""Names of models and devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bcg.model_key import device_key, model_key


def model(**config: Any) -> nn.Module:
    module = nn.Linear(2, 2)
    module.config = config  # type: ignore[assignment]
    return module


def test_a_key_says_class_configuration_and_dtypes() -> None:
    key = model_key(model(layers=2))
    assert key.startswith("Linear-")
    assert key == model_key(model(layers=2))
    assert len({key, model_key(model(layers=3)), model_key(model(layers=2).half()), model_key(nn.Linear(2, 3))}) == 4


def test_a_key_is_the_same_wherever_the_model_came_from_and_in_every_process() -> None:
    """diffusers keeps the path in a config, and a list made of a set, whose order changes with the hash seed."""
    one = model(layers=2, _name_or_path="/a", _use_default_values=["x", "y"])
    other = model(layers=2, _name_or_path="/b", _use_default_values=["y", "x"])
    assert model_key(one) == model_key(other)


def test_a_device_without_an_architecture_is_named_by_its_type() -> None:
    assert device_key(torch.device("cpu")) == "cpu"
