"""Widening the list: only for the type that is asked for, only where the class has the interface."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_engine
import pytest
from pydantic import ValidationError

from draftsmith.engine.plugin_src import draftsmith_vllm as plugin
from draftsmith.engine.plugin_src.draftsmith_vllm.gate import list_constant
from draftsmith.engine.plugin_src.draftsmith_vllm.interface import has_interface


def target(model_type: str, architecture: str) -> Any:
    return SimpleNamespace(hf_text_config=SimpleNamespace(model_type=model_type), architecture=architecture)


@pytest.fixture(autouse=True)
def only_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.FEATURES_VARIABLE, "gate")
    monkeypatch.delenv(plugin.TARGETS_VARIABLE, raising=False)


def take(model_type: str, architecture: str, method: str = "eagle3") -> bool:
    config = import_module("vllm.config.speculative").SpeculativeConfig
    try:
        made = config(method=method, target_model_config=target(model_type, architecture))
    except ValidationError:
        return False
    return isinstance(made, config)


@pytest.mark.parametrize("imported_first", [True, False])
def test_a_capable_class_is_let_in_and_no_other(tmp_path: Path, imported_first: bool) -> None:
    with fake_engine.importable(fake_engine.write_engine(tmp_path)):
        if imported_first:
            assert not take("able", "AbleForCausalLM")
        plugin.register()
        plugin.register()
        assert take("able", "AbleForCausalLM")
        assert take("wrap", "Wrapped")
        assert take("llama4_text", "whatever")
        assert not take("unable", "UnableForCausalLM")
        assert not take("stranger", "NotRegistered")
        assert take("unable", "UnableForCausalLM", method="other")
        # What was let in once must not stay on the list for the next target.
        assert not take("able_too", "UnableForCausalLM")


def test_without_the_plugin_nobody_is_let_in(tmp_path: Path) -> None:
    with fake_engine.importable(fake_engine.write_engine(tmp_path)):
        assert not take("able", "AbleForCausalLM")
        assert take("qwen2", "whatever")


def test_a_type_named_by_the_user_is_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.TARGETS_VARIABLE, " unable , x")
    with fake_engine.importable(fake_engine.write_engine(tmp_path)):
        plugin.register()
        assert take("unable", "UnableForCausalLM")
        assert not take("unable2", "UnableForCausalLM")


def test_the_refusal_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fake_engine.importable(fake_engine.write_engine(tmp_path)), caplog.at_level(logging.INFO, "vllm"):
        plugin.register()
        take("unable", "UnableForCausalLM")
        assert "UnableForCausalLM" in caplog.text and "no EAGLE-3 interface" in caplog.text


@pytest.mark.parametrize("types", ['"llama"', '"gemma", "mistral", "phi"', '*("llama",), "qwen"'])
def test_a_release_without_such_a_list_is_not_touched(tmp_path: Path, types: str) -> None:
    with fake_engine.importable(fake_engine.write_engine(tmp_path, types)):
        function = import_module("vllm.config.speculative").SpeculativeConfig._verify_args
        code = function.__code__
        assert list_constant(code) is None
        plugin.register()
        assert function.__code__ is code


def test_the_interface_is_found_through_files(tmp_path: Path) -> None:
    with fake_engine.importable(fake_engine.write_engine(tmp_path)):
        models = "vllm.model_executor.models"
        assert has_interface(f"{models}.able", "AbleForCausalLM") is True
        assert has_interface(f"{models}.wrapped", "Wrapped") is True
        assert has_interface(f"{models}.unable", "UnableForCausalLM") is False
        assert has_interface(f"{models}.able", "Nothing") is None
        assert has_interface(f"{models}.nowhere", "Nothing") is None


def test_an_unknown_feature_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(plugin.FEATURES_VARIABLE, "gate,wings")
    with caplog.at_level(logging.WARNING, "vllm"):
        assert plugin.wanted() == ["gate"]
    assert "wings" in caplog.text
