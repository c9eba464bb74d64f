"""A vLLM server on another host, by ssh: launched under a guard there, its log and its port brought here.

One ssh process carries everything: its output is the engine's log, its -L the port. When it goes (because we stop, or
die, or the line breaks), the guard on the other side sees its parent gone and takes the engine down. Nothing is
installed there: guard and plugin travel in the command line and live in a temporary folder.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.engine import process_guard
from draftsmith.engine.find import DISTRIBUTIONS, Engine, Platform
from draftsmith.engine.flags import SOURCES, flags_in
from draftsmith.engine.inject import plugin_files
from draftsmith.engine.process import Guarded, free_port
from draftsmith.engine.server import Server
from draftsmith.errors import Exit, UserError

OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
    *("-o", "StrictHostKeyChecking=yes"),
)
"""No terminal, no questions, a dead line is noticed within a minute; and an unknown host key ends it, whatever
~/.ssh/config says: the command that runs there is ours, and so are the weights that it is given."""

PROBE = """
import glob, json, os, socket, sys
path, names, sources = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
path = os.path.expanduser(path)
root = os.path.dirname(os.path.dirname(path)) if os.path.isfile(path) else path
python = path if os.path.isfile(path) else os.path.join(root, "bin", "python")
found = {"path": path, "exists": os.path.exists(path), "python": python if os.path.exists(python) else None, "dists": {}}
for site in [*glob.glob(os.path.join(root, "lib*", "python3*", "site-packages")), root]:
    dists = {}
    for info in glob.glob(os.path.join(site, "*.dist-info")):
        name, _, version = os.path.basename(info)[:-10].rpartition("-")
        dists[name.replace("_", "-").lower()] = version
    package = os.path.join(site, "vllm")
    if any(n in dists for n in names) and os.path.isdir(package):
        found.update(site=site, dists={k: dists[k] for k in [*names, "torch"] if k in dists}, files={})
        for name in sources:
            try:
                with open(os.path.join(package, name), encoding="utf-8") as f:
                    found["files"][name] = f.read()
            except OSError:
                pass
        found["iomp"] = os.path.exists(os.path.join(root, "lib", "libiomp5.so"))
        found["cuda"] = os.path.exists(os.path.join(site, "torch", "lib", "libtorch_cuda.so"))
        break
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    found["port"] = s.getsockname()[1]
found["cores"] = sorted(os.sched_getaffinity(0))
print("PROBE" + json.dumps(found))
"""

LOADER = """
import base64, json, os, shutil, sys, tempfile, zlib
job = json.loads(zlib.decompress(base64.b64decode(sys.argv[1])))
folder = tempfile.mkdtemp(prefix="draftsmith-")
for name, text in job["files"].items():
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
os.environ.update(job["env"])
if job["files"]:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
space = {"__name__": "guard"}
exec(compile(job["guard"], "process_guard.py", "exec"), space)
try:
    code = space["guard"](job["command"], job["grace"], None, os.getppid())
finally:
    shutil.rmtree(folder, ignore_errors=True)
sys.exit(code)
"""


def _pack(job: Mapping[str, Any]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(job).encode(), 9)).decode()


def require_host(host: str) -> None:
    """UserError where ssh would take the host for an option of its own, such as one that runs a command here."""
    if host.startswith("-"):
        raise UserError(f"{host!r} is no host", "ssh would take it for an option", "write user@host")


def _ssh(host: str) -> list[str]:
    """ssh's words for "user@host" or "user@host:port"."""
    require_host(host)
    name, colon, port = host.rpartition(":")
    return ["ssh", *OPTIONS, *(["-p", port, name] if colon and port.isdigit() else [host])]


def probe(host: str, path: str) -> dict[str, Any]:
    """What lies in an environment on another host; UserError if it cannot be reached or holds no vLLM."""
    words = " ".join(map(shlex.quote, [path, json.dumps(DISTRIBUTIONS["vllm"]), json.dumps(SOURCES)]))
    try:
        done = subprocess.run(
            [*_ssh(host), f"exec python3 - {words}"],
            input=PROBE,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        raise UserError("there is no ssh command here", "", "install the OpenSSH client") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{host} did not answer within 60 s", "", f"make sure that `ssh {host}` works") from None
    line = next((row for row in done.stdout.splitlines() if row.startswith("PROBE")), None)
    if line is None:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(
            f"{host} cannot be used over ssh: {said}",
            "the login must work without a password, with a host key that is known, and python3 must be there",
            f"make sure that `ssh {host} python3 -V` works",
        )
    found: dict[str, Any] = json.loads(line.removeprefix("PROBE"))
    if not found["exists"] or not found["dists"] or not found["python"]:
        what = "does not exist" if not found["exists"] else "holds no vLLM with an interpreter"
        raise UserError(f"{path} on {host} {what}", "", "give the vLLM environment's folder on that host (--engine)")
    return found


def engine_of(found: Mapping[str, Any]) -> Engine:
    """The probed environment as an Engine; its paths are the other host's."""
    distribution = next(n for n in reversed(DISTRIBUTIONS["vllm"]) if n in found["dists"])
    version, torch = found["dists"][distribution], found["dists"].get("torch")
    cpu = distribution.endswith("-cpu") or "cpu" in version or "+cpu" in (torch or "")
    platform: Platform = "cpu" if cpu else "cuda" if found["cuda"] else "unknown"
    site = Path(found["site"])
    return Engine("vllm", version, Path(found["python"]), site, site / "vllm", platform, torch, distribution)


class RemoteServer(Server):
    """As Server, on `host` ("user@host", "user@host:port" or an alias of ~/.ssh/config), reached through a tunnel.

    engine_path: the environment there. model: a path there, or a hub id."""

    def __init__(self, host: str, engine_path: str, model: str, **settings: Any) -> None:
        self.machine = host
        self.found = probe(host, engine_path)
        if settings.get("dtype", "auto") == "auto":
            # What this machine's own CPU can says nothing about the other one's.
            settings["dtype"] = "float32" if engine_of(self.found).platform == "cpu" else "bfloat16"
        super().__init__(engine_of(self.found), model, **settings)
        self.local_port = self._given_port or free_port()
        self._given_port, self._port = None, int(self.found["port"])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.local_port}"

    def known_flags(self) -> frozenset[str]:
        return flags_in(self.found["files"])

    def environment(self) -> dict[str, str]:
        added = {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
        if self.engine.platform == "cpu":
            added |= {"VLLM_CPU_KVCACHE_SPACE": str(self.kv_gib)}
            if self.found["iomp"]:
                added["LD_PRELOAD"] = str(self.engine.prefix / "lib" / "libiomp5.so")
        return added | self.env

    def launch(self) -> Guarded:
        files = plugin_files() if self.plugin and "VLLM_PLUGINS" not in self.env else {}
        job = {
            "command": self.command(),
            "env": self.environment(),
            "files": files,
            "grace": 20.0,
            "guard": Path(process_guard.__file__).read_text(encoding="utf-8"),
        }
        tunnel = ["-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{self.local_port}:127.0.0.1:{self.port}"]
        ssh = _ssh(self.machine)
        remote = f"exec python3 -c {shlex.quote(LOADER)} {_pack(job)}"
        return Guarded([ssh[0], *tunnel, *ssh[1:], remote], dict(os.environ), self.log)

    def death(self, code: int) -> UserError:
        """ssh's own end is 255; anything else is the engine's, whose log we have and whose source we have not."""
        from draftsmith.engine.server_death import last_errors

        text = self.log.read_text(encoding="utf-8", errors="replace")
        tail = [line for line in text.splitlines() if line.strip()][-3:]
        shown = " | ".join(last_errors(text) or tail) or "it wrote nothing"
        what = (
            f"the line to {self.machine} broke"
            if code == 255
            else f"{self.engine.label} on {self.machine} ended by itself"
        )
        return UserError(
            f"{what} (exit code {code}): {shown[:700]}",
            "",
            f"see {self.log}; draftsmith explain {self.log} --engine ssh://{self.machine}{self.engine.prefix} names the line",
            Exit.NO,
        )
