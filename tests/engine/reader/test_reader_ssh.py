"""ssh://user@host/path against a real sshd on loopback with keys of its own; unknown and changed host keys are refused."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.engine.reader import read_engine
from draftsmith.errors import UserError

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(SSHD is None, reason="sshd is not installed (apt-get install openssh-server)")


def keygen(file: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """(ssh://… without a path, the folder that plays ~/.ssh) of a running sshd that lets this user in by key."""
    server, home = tmp_path / "server", tmp_path / "home" / ".ssh"
    server.mkdir()
    home.mkdir(parents=True)
    keygen(server / "host_key")
    keygen(home / "id_ed25519")
    (server / "authorized").write_text((home / "id_ed25519.pub").read_text())
    port = free_port()
    (server / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {server / 'host_key'}\nPidFile {server / 'pid'}\n"
        f"AuthorizedKeysFile {server / 'authorized'}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        "Subsystem sftp internal-sftp\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd as root insists on it
    log = (server / "log").open("wb")
    process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(server / "config")], stdout=log, stderr=log)
    try:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, (server / "log").read_text()
                time.sleep(0.05)
        key = (server / "host_key.pub").read_text().split()
        (home / "known_hosts").write_text(f"[127.0.0.1]:{port} {key[0]} {key[1]}\n")
        monkeypatch.setenv("HOME", str(home.parent))
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        yield f"ssh://{getpass.getuser()}@127.0.0.1:{port}", home
    finally:
        process.terminate()
        process.wait(10)
        log.close()


def engine_at(folder: Path) -> Path:
    """An environment with a tiny engine in its site-packages."""
    site = folder / "lib/python3.12/site-packages"
    (site / "vllm/engine").mkdir(parents=True)
    (site / "vllm/__init__.py").write_text("")
    (site / "vllm/_version.py").write_text("__version__ = version = '9.8.7'\n")
    (site / "vllm/config").mkdir()
    (site / "vllm/config/speculative.py").write_text("class SpeculativeConfig:\n    pass\n")
    return folder


def test_an_environment_on_another_host_is_read(host: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = host
    facts = read_engine(f"{url}{engine_at(tmp_path / 'env')}")
    assert (facts.name, facts.version) == ("vllm", "9.8.7")
    assert facts.model_list is None
    assert facts.model_list_place is not None
    assert facts.model_list_place.file == "vllm/config/speculative.py"
    assert facts.path.startswith("ssh://")


def test_an_editable_install_leads_to_a_checkout_on_the_same_host(host: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = host
    checkout = engine_at(tmp_path / "checkout") / "lib/python3.12/site-packages"
    info = tmp_path / "env/lib/python3.11/site-packages/vllm-9.8.7.dist-info"
    info.mkdir(parents=True)
    (info / "direct_url.json").write_text(f'{{"url": "file://{checkout}", "dir_info": {{"editable": true}}}}')
    facts = read_engine(f"{url}{tmp_path / 'env'}")
    assert facts.version == "9.8.7"
    assert facts.source.name.startswith("ssh://")
    assert facts.source.path("vllm") is None


def test_an_unknown_host_key_is_refused(host: tuple[str, Path], tmp_path: Path) -> None:
    url, home = host
    (home / "known_hosts").write_text("")
    with pytest.raises(UserError, match="is not known") as e:
        read_engine(f"{url}{engine_at(tmp_path / 'env')}")
    assert "never trusted" in e.value.why
    assert (home / "known_hosts").read_text() == ""


def test_a_changed_host_key_is_refused(host: tuple[str, Path], tmp_path: Path) -> None:
    url, home = host
    keygen(tmp_path / "other")
    other = (tmp_path / "other.pub").read_text().split()
    place = (home / "known_hosts").read_text().split()[0]
    (home / "known_hosts").write_text(f"{place} {other[0]} {other[1]}\n")
    with pytest.raises(UserError, match="not the one that is known"):
        read_engine(f"{url}{engine_at(tmp_path / 'env')}")


def test_a_refused_login_and_a_missing_folder_are_said(host: tuple[str, Path], tmp_path: Path) -> None:
    url, home = host
    with pytest.raises(UserError, match="does not exist on"):
        read_engine(f"{url}{tmp_path / 'nowhere'}")
    keygen(tmp_path / "stranger")
    shutil.copy(tmp_path / "stranger", home / "id_ed25519")
    shutil.copy(tmp_path / "stranger.pub", home / "id_ed25519.pub")
    with pytest.raises(UserError, match="refuses the login"):
        read_engine(f"{url}{engine_at(tmp_path / 'env')}")


def test_a_host_that_is_not_there(host: tuple[str, Path]) -> None:
    with pytest.raises(UserError, match="cannot be reached"):
        read_engine(f"ssh://127.0.0.1:{free_port()}/opt/env")
