"""`draftsmith serve` with the real engine in a terminal: the live panel, the orderly end, and what is left after a kill."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftsmith.engine.process import free_port
from draftsmith.engine.process_guard import descendants


class Terminal:
    """A process in a terminal of its own, and all that it has shown there."""

    def __init__(self, command: list[str]) -> None:
        self.master, slave = pty.openpty()
        env = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env)
        os.close(slave)
        self.text = ""

    def read(self, seconds: float = 0.2) -> None:
        while select.select([self.master], [], [], seconds)[0]:
            try:
                part = os.read(self.master, 65536)
            except OSError:  # the other side is gone
                return
            if not part:
                return
            self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part.decode(errors="replace"))

    def wait_for(self, word: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while word not in self.text:
            self.read()
            assert self.process.poll() is None, self.text[-3000:]
            assert time.monotonic() < end, f"{word!r} not shown in {seconds} s: {self.text[-3000:]}"


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_it_is_shown_and_ends_whole(tiny_llama: Any, real_engine: Any, tmp_path: Path, end: signal.Signals) -> None:
    # heads of 64: the CPU kernels answer with an error for narrower ones
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128}
    target, port = tiny_llama(num_hidden_layers=2, **sizes), free_port()
    command = [sys.executable, "-m", "draftsmith.cli.main", "serve", str(target), "--engine", str(real_engine.prefix),
               "--max-model-len", "128", "--dtype", "float32", "--port", str(port), "--log", str(tmp_path / "engine.log")]  # fmt: skip
    shown = Terminal(command)
    try:
        shown.wait_for("ready in", 600)
        shown.wait_for("KV cache", 30)
        question = {"model": target.name, "prompt": [5, 6, 7], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=question, timeout=120)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 16, answer.text
        shown.wait_for("16 tokens", 30)
        below = descendants(shown.process.pid)
        assert any(b"EngineCore" in Path(f"/proc/{p}/cmdline").read_bytes() for p in below)
        shown.process.send_signal(end)
        give_up = time.monotonic() + 60
        while shown.process.poll() is None and time.monotonic() < give_up:
            shown.read()
        assert shown.process.poll() == (0 if end == signal.SIGINT else -signal.SIGKILL)
    finally:
        shown.process.kill()
        shown.process.wait()
    shown.read()
    assert ("no process of the engine is left" in shown.text) == (end == signal.SIGINT)
    give_up = time.monotonic() + 20
    while (left := [p for p in below if alive(p)]) and time.monotonic() < give_up:
        time.sleep(0.1)
    assert not left, "orphans of the engine"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
