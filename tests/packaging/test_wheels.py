"""What is given to strangers: both distributions build from source and from their sdist, hold what they must, and typed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build(source: Path, out: Path, *kinds: str) -> None:
    """`python -m build` without a network: the build's own requirements are in the dev extra."""
    env = os.environ | {"PIP_NO_INDEX": "1", "SOURCE_DATE_EPOCH": "1700000000"}
    command = [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def copy_of(folder: str, to: Path) -> Path:
    """The tracked part of the repository, links kept: building must not write into it."""
    tracked = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    return to


def files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as z:
        return {n: z.read(n) for n in z.namelist()}


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_draftsmiths_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    source = copy_of(".", tmp_path / "source")
    build(source, tmp_path / "out", "--sdist", "--wheel")
    found = files(next((tmp_path / "out").glob("draftsmith-*.whl")))
    inside = {str(p.relative_to(source / "src")) for p in (source / "src" / "draftsmith").rglob("*") if p.is_file()}
    assert inside - set(found) == set(), "files of the package that the wheel lacks"
    assert not [n for n in found if n.startswith(("tests", "benchmarks", "docs"))]
    meta = message_from_bytes(next(v for n, v in found.items() if n.endswith("/METADATA")))
    needed = [r for r in meta.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert not any(re.match(r"(vllm|sglang|ray|nvidia|triton)\b", r) for r in needed), needed
    assert set(meta.get_all("Provides-Extra", [])) >= {"engine", "ray", "dev"}
    with tarfile.open(next((tmp_path / "out").glob("draftsmith-*.tar.gz"))) as tar:
        tar.extractall(tmp_path / "again", filter="data")
    again = next((tmp_path / "again").iterdir())
    build(again, tmp_path / "second", "--wheel")
    assert set(files(next((tmp_path / "second").glob("*.whl")))) == set(found)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_plugins_wheel_holds_real_files_and_needs_nothing(tmp_path: Path) -> None:
    source = copy_of(".", tmp_path / "source")
    assert (source / "plugin" / "draftsmith_vllm").is_symlink()
    build(source / "plugin", tmp_path / "out", "--sdist", "--wheel")
    with tarfile.open(next((tmp_path / "out").glob("*.tar.gz"))) as tar:
        members = [m for m in tar.getmembers() if "draftsmith_vllm/" in m.name and not m.isdir()]
        assert members and all(m.isreg() for m in members), "the sdist holds links"
        tar.extractall(tmp_path / "again", filter="data")
    build(next((tmp_path / "again").iterdir()), tmp_path / "second", "--wheel")
    package = {p.name: p.read_bytes() for p in (ROOT / "src/draftsmith/engine/plugin_src/draftsmith_vllm").glob("*.py")}
    for wheel in (*(tmp_path / "out").glob("*.whl"), *(tmp_path / "second").glob("*.whl")):
        found = files(wheel)
        assert {n.removeprefix("draftsmith_vllm/") for n in found if n.endswith(".py")} == set(package)
        assert all(found[f"draftsmith_vllm/{n}"] == raw for n, raw in package.items())
        meta = message_from_bytes(next(v for n, v in found.items() if n.endswith("/METADATA")))
        assert meta.get_all("Requires-Dist") is None, "the plugin must bring nothing into the engine's environment"
        points = next(v for n, v in found.items() if n.endswith("entry_points.txt")).decode()
        assert "[vllm.general_plugins]" in points and "draftsmith_vllm:register" in points


def test_the_cuda_engine_is_one_version_everywhere() -> None:
    from draftsmith.engine.install import DEFAULTS

    pinned = [r for r in PROJECT["optional-dependencies"]["engine"] if r.startswith("vllm==")]
    assert pinned and pinned[0].partition("==")[2].partition(";")[0].strip() == DEFAULTS["cuda"][1]


def test_the_package_is_typed_and_its_pythons_are_named() -> None:
    assert (ROOT / "src" / "draftsmith" / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"] and PROJECT["requires-python"] == ">=3.11"
    named = {
        c.rpartition(" ")[2] for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python :: 3.")
    }
    assert named == {"3.11", "3.12", "3.13"}


def interpreters() -> list[Path]:
    """One interpreter of each named version that runs here."""
    found: dict[str, Path] = {}
    places = [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep) if p]
    places += sorted(Path("~/.pyenv/versions").expanduser().glob("*/bin"))
    for version in ("3.11", "3.12", "3.13"):
        for place in places:
            python = place / f"python{version}"
            if version not in found and python.is_file() and "shims" not in place.parts:
                done = subprocess.run([python, "-c", ""], capture_output=True, check=False)
                if done.returncode == 0:
                    found[version] = python
    return list(found.values())


@pytest.mark.parametrize("python", interpreters(), ids=lambda p: p.name)
def test_every_source_compiles_on_each_python_that_is_here(python: Path, tmp_path: Path) -> None:
    """And what depends on the standard library alone is imported; the rest needs wheels of that version."""
    env = os.environ | {"PYTHONPYCACHEPREFIX": str(tmp_path)}
    words = [str(python), "-W", "error", "-m", "compileall", "-q", "-j", "1", str(ROOT / "src" / "draftsmith")]
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    code = "import draftsmith.errors, draftsmith.secrets, draftsmith.untrusted, draftsmith.record, draftsmith.formats"
    words, env = [str(python), "-c", code], env | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
