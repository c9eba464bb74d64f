"""The life of a launched engine: ready, deaths that explain themselves, and never an orphan."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftsmith.engine.process_guard import descendants
from draftsmith.engine.server import Server
from draftsmith.engine.server_death import last_errors
from draftsmith.errors import Exit, UserError
from draftsmith.ui import QuietUi

sys.path.insert(0, str(Path(__file__).parent))
from fake_vllm import make_engine


def serve(root: Path, mode: str = "ok", **more: Any) -> Server:
    engine = make_engine(root)
    env = {"FAKE_MODE": mode, "PYTHONPATH": str(engine.site), "LD_PRELOAD": ""}
    return Server(engine, "/target", log=root / "engine.log", env=env, plugin=False, **more)


def alive(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return False
    return fields[0] != b"Z"


def wait_gone(pids: list[int], seconds: float = 30.0) -> list[int]:
    end = time.monotonic() + seconds
    while (left := [p for p in pids if alive(p)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def test_ready_and_stopped_without_remains(tmp_path: Path) -> None:
    ui = QuietUi()
    with serve(tmp_path, ui=ui) as server:
        assert httpx.get(server.url + "/health").is_success
        assert server.kv_tokens == 46592
        assert server.stages[1:3] == ["loading the target's weights", "weights loaded: 0.42 seconds"]
        assert server._guarded is not None
        pids = [server._guarded.pid, *descendants(server._guarded.pid)]
        assert len(pids) == 3
    assert wait_gone(pids, 1.0) == []
    assert any("engine ready in" in n and "46,592" in n for n in ui.notes)


def test_no_orphan_after_sigkill_of_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_server_life import serve\n"
        f"with serve(Path({str(tmp_path)!r})) as s:\n"
        "    print(s._guarded.pid, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        guard = int(parent.stdout.readline())
        pids = [guard, *descendants(guard)]
        assert len(pids) == 3
        parent.kill()
    assert wait_gone(pids) == []


def test_no_orphan_after_sigkill_of_the_guard(tmp_path: Path) -> None:
    """The engine itself dies with the guard (parent-death signal), whatever it has started is its own to end."""
    server = serve(tmp_path)
    with server:
        assert server._guarded is not None
        engine = descendants(server._guarded.pid)
        direct = [p for p in engine if b"api_server" in Path(f"/proc/{p}/cmdline").read_bytes()]
        os.kill(server._guarded.pid, signal.SIGKILL)
        assert direct and wait_gone(direct) == []
    for pid in engine:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_death_is_one_block_with_the_root_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="head size 24 is not supported") as e:
        serve(tmp_path, "die").start()
    assert e.value.code == Exit.NO
    assert "exit code 1" in e.value.what
    assert "engine.log" in e.value.fix


def test_death_after_ready_is_seen(tmp_path: Path) -> None:
    with serve(tmp_path, "late") as server:
        end = time.monotonic() + 30
        while server.alive() and time.monotonic() < end:
            time.sleep(0.05)
        with pytest.raises(UserError, match="exit code 9"):
            server.require_alive()


def test_not_ready_in_time(tmp_path: Path) -> None:
    server = serve(tmp_path, "hang", timeout=2.0)
    with pytest.raises(UserError, match="not ready after 2 s"):
        server.start()
    assert not server.alive()


def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}"):
            serve(tmp_path, port=port).start()
    assert not (tmp_path / "engine.log").exists()


def test_a_speculative_config_needs_its_method(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no method"):
        serve(tmp_path, speculative={"model": "/d/my-eagle3", "num_speculative_tokens": 3})


def test_flags_are_said_in_the_releases_own_words(tmp_path: Path) -> None:
    new = make_engine(tmp_path / "new")
    old = make_engine(tmp_path / "old", "0.9.2", "--disable-log-requests")
    words = [Server(e, "/t", log=tmp_path / "l", plugin=False).command() for e in (new, old)]
    assert "--no-enable-log-requests" in words[0] and "--disable-log-requests" not in words[0]
    assert "--disable-log-requests" in words[1] and "--no-enable-log-requests" not in words[1]
    assert all("--no-enable-prefix-caching" in w and "--generation-config" not in w for w in words)
    assert all(w[w.index("--served-model-name") + 1] == "target" for w in words)


def test_the_plain_command_is_whole(tmp_path: Path) -> None:
    spec = {"method": "ngram", "num_speculative_tokens": 3}
    server = serve(tmp_path, speculative=spec, args=["--max-num-seqs", "4"])
    words = subprocess.run(
        ["bash", "-c", "printf '%s\\0' " + server.shell_command().replace("\\\n", " ")], capture_output=True, check=True
    ).stdout.split(b"\0")
    assert [w.decode() for w in words if w][-len(server.command()) :] == server.command()


def test_errors_of_a_log_without_its_prefixes() -> None:
    log = (
        "(EngineCore pid=9) ERROR 11-30 10:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory\n"
        "RuntimeError: Engine core initialization failed\nRuntimeError: Engine core initialization failed\n"
    )
    assert last_errors(log) == [
        "torch.OutOfMemoryError: CUDA out of memory",
        "RuntimeError: Engine core initialization failed",
    ]
