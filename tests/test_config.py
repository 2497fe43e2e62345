"""Options: defaults, the environment, who wins, and what a bad value is told."""

from __future__ import annotations

import dataclasses
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcg.config import ENVIRONMENT_PREFIX, RunnerConfig
from bcg.errors import ConfigError

NAMES = [option.name for option in fields(RunnerConfig)]

ACCEPTED: dict[str, list[tuple[str, Any]]] = {
    "backend": [("tape", "tape"), (" cuda ", "cuda")],
    "max_entries": [("4", 4), (" 12 ", 12)],
    "max_bytes": [("none", None), ("None", None), ("1048576", 1048576)],
    "max_rejections": [("1", 1)],
    "max_segments": [("2", 2)],
    "max_variants": [("3", 3)],
    "max_capture_attempts": [("1", 1)],
    "max_leaves": [("100", 100)],
    "warmup_iterations": [("5", 5)],
    "verify": [("off", "off"), ("exact", "exact")],
    "collectives": [("break", "break")],
    "eager_modules": [("*.ff_i", ("*.ff_i",)), ("a, b ,", ("a", "b")), ("", ())],
    "eager_functions": [("package.module:function", ("package.module:function",))],
    "module_breaks": [("0", False), ("TRUE", True), ("off", False), ("Yes", True)],
    "compile": [("blocks", "blocks"), ("model", "model")],
    "compile_mode": [("max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs")],
    "compile_options": [
        ("combo_kernels=false", {"combo_kernels": False}),
        (" triton.multi_kernel=1, x = 0.5,y=text", {"triton.multi_kernel": 1, "x": 0.5, "y": "text"}),
        ("", {}),
    ],
    "compile_backend": [("aot_eager", "aot_eager")],
    "compile_dynamic": [("no", "no")],
    "compile_cache": [("/some/folder", "/some/folder"), ("none", None)],
    "autotune": [("1", True)],
    "attention_backends": [("installed", ("installed",)), ("_native_cudnn, flash", ("_native_cudnn", "flash"))],
    "min_speedup": [("1.05", 1.05), ("none", None)],
    "autotune_cache": [("0", False)],
    "cache_dir": [("/some/folder", "/some/folder"), ("none", None)],
    "capture_error_mode": [("relaxed", "relaxed")],
    "debug": [("1", True), ("false", False)],
}

REFUSED: dict[str, list[tuple[str, Any]]] = {
    "backend": [("gpu", "gpu"), ("", None)],
    "max_entries": [("0", 0), ("many", "4"), ("1.5", 1.5), ("-1", -1), ("", True)],
    "max_bytes": [("0", 0), ("2GB", "2GB")],
    "max_rejections": [("0", 0)],
    "max_segments": [("0", 0)],
    "max_variants": [("0", 0)],
    "max_capture_attempts": [("0", 0)],
    "max_leaves": [("0", 0)],
    "warmup_iterations": [("0", 0)],
    "verify": [("maybe", "maybe")],
    "collectives": [("eager", "eager")],
    "eager_modules": [],
    "eager_functions": [],
    "module_breaks": [("perhaps", 1)],
    "compile": [("all", "all")],
    "compile_mode": [("reduce-overhead", "reduce-overhead"), ("max-autotune", "max-autotune")],
    "compile_options": [("combo_kernels", ("combo_kernels",)), ("a=1, b", {1: True})],
    "compile_backend": [("", ""), ("cudagraphs", "cudagraphs")],
    "compile_dynamic": [("maybe", True)],
    "compile_cache": [("", 3)],
    "autotune": [("perhaps", 1)],
    "attention_backends": [],
    "min_speedup": [("0", 0.0), ("fast", "2")],
    "autotune_cache": [("perhaps", 1)],
    "cache_dir": [("", 3)],
    "capture_error_mode": [("strict", "strict")],
    "debug": [("", "true"), ("2", None)],
}


def flat(table: dict[str, list[tuple[str, Any]]]) -> list[Any]:
    return [
        pytest.param(name, text, value, id=f"{name}-{text!r}") for name, rows in table.items() for text, value in rows
    ]


def test_every_option_is_tried_here() -> None:
    """Adding an option means saying here what it accepts."""
    assert sorted(ACCEPTED) == sorted(REFUSED) == sorted(NAMES)


def test_defaults_are_accepted_and_nothing_in_an_empty_environment_changes_them() -> None:
    assert RunnerConfig.from_environment({}) == RunnerConfig()


@pytest.mark.parametrize(("name", "text", "value"), flat(ACCEPTED))
def test_environment_text_gives_the_value(name: str, text: str, value: Any) -> None:
    config = RunnerConfig.from_environment({ENVIRONMENT_PREFIX + name.upper(): text})
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)
    assert config == RunnerConfig(**{name: value})


@pytest.mark.parametrize(("name", "text", "value"), flat(REFUSED))
def test_a_bad_value_is_refused_by_name_value_and_accepted_form(name: str, text: str, value: Any) -> None:
    variable = ENVIRONMENT_PREFIX + name.upper()
    with pytest.raises(ConfigError) as from_environment:
        RunnerConfig.from_environment({variable: text})
    assert f"{variable}={text!r}" in str(from_environment.value)

    with pytest.raises(ConfigError) as from_code:
        RunnerConfig(**{name: value})
    assert f"{name}={value!r}" in str(from_code.value)

    accepted = str(from_code.value).partition("give ")[2]
    assert accepted and accepted in str(from_environment.value)


def test_code_wins_over_environment_and_environment_over_default() -> None:
    environment = {"BCG_MAX_ENTRIES": "4", "BCG_VERIFY": "off"}
    config = RunnerConfig.from_environment(environment, max_entries=7)
    assert (config.max_entries, config.verify, config.backend) == (7, "off", "auto")


def test_a_value_given_in_code_hides_a_bad_one_in_the_environment() -> None:
    assert RunnerConfig.from_environment({"BCG_MAX_ENTRIES": "many"}, max_entries=7).max_entries == 7


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BCG_MAX_ENTRIES", "9")
    assert RunnerConfig.from_environment().max_entries == 9


def test_variables_of_other_programs_are_left_alone() -> None:
    assert RunnerConfig.from_environment({"MAX_ENTRIES": "9", "BCG_SOMETHING": "x"}) == RunnerConfig()


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown option max_entrees") as refused:
        RunnerConfig.from_environment({}, max_entrees=4)
    assert all(name in str(refused.value) for name in NAMES)


def test_options_are_keyword_only_and_frozen() -> None:
    with pytest.raises(TypeError):
        RunnerConfig("tape")  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunnerConfig().max_entries = 3  # type: ignore[misc]


def test_every_option_is_documented() -> None:
    documented = (RunnerConfig.__doc__ or "").partition("Attributes:")[2]
    assert [name for name in NAMES if f"\n        {name}: " not in documented] == []


@given(count=st.integers(min_value=1), names=st.lists(st.from_regex(r"[a-z_.*]+", fullmatch=True)), flag=st.booleans())
def test_what_is_written_to_the_environment_is_read_back(count: int, names: list[str], flag: bool) -> None:
    config = RunnerConfig.from_environment(
        {"BCG_MAX_BYTES": str(count), "BCG_EAGER_MODULES": ",".join(names), "BCG_DEBUG": str(flag)}
    )
    assert config == RunnerConfig(max_bytes=count, eager_modules=tuple(names), debug=flag)


@given(text=st.text())
def test_no_text_gets_past_a_choice(text: str) -> None:
    try:
        config = RunnerConfig.from_environment({"BCG_VERIFY": text})
    except ConfigError as refused:
        assert repr(text) in str(refused)
    else:
        assert config.verify in {"auto", "exact", "close", "off"}


@given(text=st.text())
def test_no_text_gets_past_a_count(text: str) -> None:
    try:
        config = RunnerConfig.from_environment({"BCG_MAX_ENTRIES": text})
    except ConfigError as refused:
        assert repr(text) in str(refused)
    else:
        assert config.max_entries >= 1


def test_a_config_can_be_hashed_and_keeps_the_options_that_were_checked() -> None:
    given = {"combo_kernels": False}
    config = RunnerConfig(compile_options=given)
    given["combo_kernels"] = True
    assert config.compile_options == {"combo_kernels": False}
    assert hash(config) == hash(RunnerConfig(compile_options={"combo_kernels": False}))
    assert config != RunnerConfig()
