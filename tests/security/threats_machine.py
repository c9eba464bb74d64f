"""The machine around: the engine's installation, the folder one stands in, other hosts, the plugin in the engine."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from threat import HarmError, refused, require, threat

from draftsmith.engine import patch as patching
from draftsmith.errors import UserError


def _follow_links(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(patching, "real_file", lambda site, file: site / file)


def _patch(tmp: Path, site: Path, file: str, old: bytes) -> None:
    with pytest.MonkeyPatch.context() as mp:
        mp.setenv("DRAFTSMITH_HOME", str(tmp / "home"))
        with contextlib.suppress(UserError):
            patching.apply(patching.Patch(site, file, old, b"owned\n", "test"))


@threat("T36", "a patch through a link out of the installation", _follow_links)
def _(tmp: Path) -> None:
    shared = tmp / "shared" / "config"
    shared.mkdir(parents=True)
    (shared / "speculative.py").write_bytes(b"whole\n")
    (tmp / "site" / "vllm").mkdir(parents=True)
    (tmp / "site" / "vllm" / "config").symlink_to(shared)
    _patch(tmp, tmp / "site", "vllm/config/speculative.py", b"whole\n")
    require((shared / "speculative.py").read_bytes() == b"whole\n", "another installation's file was changed")


@threat("T37", "a patch of a file above the installation", _follow_links)
def _(tmp: Path) -> None:
    (tmp / "site").mkdir()
    (tmp / "outside.py").write_bytes(b"whole\n")
    _patch(tmp, tmp / "site", "../outside.py", b"whole\n")
    require((tmp / "outside.py").read_bytes() == b"whole\n", "a file outside was changed")


def _ssh_as_configured(mp: pytest.MonkeyPatch) -> None:
    from draftsmith.engine import remote

    kept = tuple(o for o in remote.OPTIONS if "StrictHostKeyChecking" not in o)
    mp.setattr(
        remote,
        "OPTIONS",
        tuple(o for i, o in enumerate(kept) if not (o == "-o" and kept[i + 1 : i + 2] in ((), ("-o",)))),
    )


@threat("T38", "an unknown host's key, accepted because ~/.ssh/config says so", _ssh_as_configured)
def _(tmp: Path) -> None:
    from draftsmith.engine.remote import _ssh

    (tmp / "config").write_text("Host away\n HostName 127.0.0.1\n StrictHostKeyChecking no\n")
    command = _ssh("away")
    done = subprocess.run(
        [command[0], "-G", "-F", str(tmp / "config"), *command[1:]], capture_output=True, text=True, check=True
    )
    require("stricthostkeychecking true" in done.stdout, "ssh would take any key")


@threat("T39", "a host name that is an option of ssh", lambda mp: mp.setattr(
    "draftsmith.engine.remote.require_host", lambda host: None
))  # fmt: skip
def _(tmp: Path) -> None:
    from draftsmith.engine.remote import OPTIONS, _ssh

    with refused("is no host"):
        command = _ssh(f"-oProxyCommand=mkdir {tmp / 'owned'}")
        if command[1 + len(OPTIONS)].startswith("-"):
            raise HarmError("ssh would run the host's name as an option")


def _accept_any_key(mp: pytest.MonkeyPatch) -> None:
    import paramiko

    mp.setattr(paramiko, "RejectPolicy", paramiko.AutoAddPolicy)


@threat("T40", "an unknown host's key over SFTP", _accept_any_key)
def _(tmp: Path) -> None:
    import socket

    import paramiko

    from draftsmith.engine.reader.ssh import SshSource

    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            transport = paramiko.Transport(listener.accept()[0])
            transport.add_server_key(paramiko.ECDSAKey.generate())
            transport.start_server(server=paramiko.ServerInterface())
            transport.join(5)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as mp:
        mp.setenv("HOME", str(tmp))
        with refused("is not known"):
            SshSource(f"ssh://me@127.0.0.1:{listener.getsockname()[1]}/env")
    listener.close()


def _not_isolated(mp: pytest.MonkeyPatch) -> None:
    run = subprocess.run
    mp.setattr(subprocess, "run", lambda words, **k: run([w for w in words if w != "-I"], **k))


@threat("T41", "modules in the current folder, run by the search for an engine", _not_isolated)
def _(tmp: Path) -> None:
    from draftsmith.engine.find import _sites_of_python

    (tmp / "site.py").write_text("")
    (tmp / "sysconfig.py").write_text(f"import os\nos.mkdir({str(tmp / 'owned')!r})\n")
    with pytest.MonkeyPatch.context() as mp, contextlib.suppress(UserError):
        mp.chdir(tmp)
        _sites_of_python(Path(sys.executable))
    require(not (tmp / "owned").exists(), "a module of the current folder was run")


@threat("T42", "a package vllm in the current folder", lambda mp: mp.setattr("draftsmith.engine.install.SAFE_PATH", {}))
def _(tmp: Path) -> None:
    from draftsmith.engine.install import verify

    (tmp / "vllm.py").write_text(f"import os\nos.mkdir({str(tmp / 'owned')!r})\n")
    with pytest.MonkeyPatch.context() as mp, contextlib.suppress(UserError):
        mp.chdir(tmp)
        verify(Path(sys.executable))
    require(not (tmp / "owned").exists(), "a package of the current folder was run")


PROBE = """
import os, sys
here = os.path.realpath(os.getcwd())
def watch(event, args):
    if event in ("socket.bind", "socket.connect", "socket.listen"):
        print("HARM", event, flush=True)
    if event == "open" and isinstance(args[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(args[0]))
        if path.startswith(here + os.sep):
            print("HARM", path, flush=True)
sys.addaudithook(watch)
import draftsmith_vllm
draftsmith_vllm.register()
import vllm.config.speculative, vllm.utils
print("REGISTERED")
"""
_added = ""


def _with(line: str) -> Any:
    """Takes the defence away: the plugin with a line that does what it must not."""

    def off(mp: pytest.MonkeyPatch) -> None:
        mp.setattr(sys.modules[__name__], "_added", line)

    return off


def _run_plugin(tmp: Path) -> str:
    """The plugin in a process of a made-up vLLM, started in a folder full of files it might be tempted to read."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "engine" / "plugin"))
    from fake_engine import write_engine

    import draftsmith.engine.plugin_src.draftsmith_vllm as plugin

    site = write_engine(tmp / "site")
    shutil.copytree(Path(plugin.__file__).parent, site / "draftsmith_vllm")
    start = site / "draftsmith_vllm" / "__init__.py"
    start.write_text(
        start.read_text().replace("    version = engine_version()\n", f"    version = engine_version()\n{_added}")
    )
    here = tmp / "here"
    here.mkdir()
    for name in ("draftsmith.json", "draftsmith.yaml", "draftsmith.toml", "config.json", ".env", "pyproject.toml"):
        (here / name).write_text("{}")
    env = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROBE], cwd=here, env=env, capture_output=True, text=True, check=False
    )
    if "REGISTERED" not in done.stdout:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout


@threat("T43", "the plugin opens a port", _with("    import socket; socket.create_server(('127.0.0.1', 0)).close()\n"))
def _(tmp: Path) -> None:
    require("HARM socket" not in _run_plugin(tmp), "a port was opened")


@threat("T44", "the plugin reads its settings from the current folder", _with("    open('draftsmith.json').close()\n"))
def _(tmp: Path) -> None:
    require("HARM /" not in _run_plugin(tmp), "a file of the current folder was read")


def _any_folder(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Path, "is_absolute", lambda self: True)


@threat("T45", "a folder for states that depends on where the engine was started", _any_folder)
def _(tmp: Path) -> None:
    from draftsmith.engine.plugin_src.draftsmith_vllm import states

    with pytest.MonkeyPatch.context() as mp:
        mp.setenv(states.VARIABLE, '{"folder": "states", "layers": [2]}')
        try:
            states.settings()
        except RuntimeError:
            return
    raise HarmError("a relative folder was taken")
