"""SGLang by its own flags: what is printed and launched is what its source names, in the old and the new layout; a made-up
server that takes exactly those flags comes up and goes down.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.engine.find import Engine
from draftsmith.engine.server import Server
from draftsmith.engine.sglang_server import SglangServer, server_class, sglang_flags
from draftsmith.errors import UserError

FLAGS = ("model_path", "served_model_name", "host", "port", "context_length", "dtype", "device", "enable_metrics",
         "disable_radix_cache", "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
         "speculative_eagle_topk", "speculative_num_draft_tokens")  # fmt: skip
LAUNCH = """
import argparse, json, os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
parser = argparse.ArgumentParser()
for name in {flags!r}:
    switch = name in ("enable_metrics", "disable_radix_cache")
    parser.add_argument("--" + name.replace("_", "-"), **({{"action": "store_true"}} if switch else {{}}))
given = vars(parser.parse_args())
open(os.environ["GIVEN"], "w").write(json.dumps(given))

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

ThreadingHTTPServer((given["host"], int(given["port"])), Handler).serve_forever()
"""


def write_sglang(site: Path, layout: str, leave_out: tuple[str, ...] = ()) -> Path:
    """An unpacked "sglang" at `site` with its flags as literals ("old", 0.5.3) or annotated fields ("new", 0.5.23)."""
    names = [f for f in FLAGS if f not in leave_out]
    files = {"__init__.py": "", "_version.py": "__version__ = version = '0.5.23'\n", "version.py": "__version__ = '0.5.23'\n",
             "launch_server.py": LAUNCH.format(flags=FLAGS)}  # fmt: skip
    if layout == "old":
        lines = [f'parser.add_argument("--{n.replace("_", "-")}")' for n in names]
        files["srt/server_args.py"] = "\n".join(lines) + "\n"
    else:
        fields = [f'    {n}: A[\n        str,\n        Arg(help="x"),\n    ] = None' for n in names]
        files["srt/server_args.py"] = "class ServerArgs: ...\n"
        files["srt/arg_groups/fields/all.py"] = "\n".join(["class All:", "    other: int = 3", *fields]) + "\n"
    for name, text in files.items():
        (site / "sglang" / name).parent.mkdir(parents=True, exist_ok=True)
        (site / "sglang" / name).write_text(text)
    return site


def engine(site: Path) -> Engine:
    return Engine("sglang", "0.5.23", Path(sys.executable), site, site / "sglang", "cuda", None, "sglang")


SPEC = {"method": "eagle3", "model": "/drafters/d-eagle3", "num_speculative_tokens": 3}


@pytest.mark.parametrize("layout", ["old", "new"])
def test_every_flag_is_one_that_the_source_names(layout: str, tmp_path: Path) -> None:
    site = write_sglang(tmp_path, layout)
    known = sglang_flags(site / "sglang")
    assert known >= {"--" + f.replace("_", "-") for f in FLAGS} and "--other" not in known
    server = SglangServer(engine(site), "/target", speculative=SPEC, log=tmp_path / "log", port=31000, dtype="bfloat16")
    command = server.command()
    assert command[1:3] == ["-m", "sglang.launch_server"]
    assert {w for w in command if w.startswith("--")} <= known
    said = dict(itertools.pairwise(command))
    assert said["--speculative-num-steps"] == "3" and said["--speculative-num-draft-tokens"] == "4"
    assert said["--speculative-algorithm"] == "EAGLE3" and said["--speculative-eagle-topk"] == "1"
    assert said["--speculative-draft-model-path"] == "/drafters/d-eagle3" and "--enable-metrics" in command


def test_what_it_cannot_say_is_refused(tmp_path: Path) -> None:
    site = write_sglang(tmp_path, "new", leave_out=("speculative_algorithm", "enable_metrics"))
    server = SglangServer(engine(site), "/target", speculative=SPEC, log=tmp_path / "log", port=31000)
    with pytest.raises(UserError, match="speculative-algorithm"):
        server.command()
    plain = SglangServer(engine(site), "/target", log=tmp_path / "log", port=31000)
    assert "--enable-metrics" not in plain.command() and not any("speculative" in w for w in plain.command())
    odd = SglangServer(engine(site), "/t", speculative=SPEC | {"method": "medusa"}, log=tmp_path / "log", port=31000)
    with pytest.raises(UserError, match="medusa"):
        odd.command()
    with pytest.raises(UserError, match="only a vllm"):
        Server(engine(site), "/target", log=tmp_path / "log")
    assert server_class("sglang") is SglangServer and server_class("vllm") is Server


def test_it_comes_up_with_these_flags_and_goes_down(tmp_path: Path) -> None:
    site = write_sglang(tmp_path, "new")
    env = {"PYTHONPATH": str(site), "GIVEN": str(tmp_path / "given.json"), "LD_PRELOAD": ""}
    with SglangServer(
        engine(site), "/target", speculative=SPEC, log=tmp_path / "log", env=env, dtype="float16"
    ) as server:
        assert httpx.get(server.url + "/health").is_success
        given: dict[str, Any] = json.loads((tmp_path / "given.json").read_text())
    assert given["model_path"] == "/target" and given["enable_metrics"] is True
    assert (given["speculative_num_steps"], given["speculative_num_draft_tokens"]) == ("3", "4")
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.url + "/health", timeout=2)


def test_serve_prints_the_command(tmp_path: Path) -> None:
    environment = tmp_path / "env"
    site = write_sglang(environment / "lib" / "python3.11" / "site-packages", "new")
    (environment / "bin").mkdir()
    (environment / "bin" / "python").symlink_to(sys.executable)
    (environment / "pyvenv.cfg").write_text("home = /usr/bin\n")
    target, drafter = tmp_path / "target", tmp_path / "d-eagle3"
    for folder in (target, drafter):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    said = CliRunner().invoke(
        app, ["serve", str(target), str(drafter), "--engine", str(environment), "--no-check", "--print", "--json"]
    )
    assert said.exit_code == 0, said.output
    command = json.loads(said.stdout)["command"]
    assert command[:3] == [str(environment / "bin" / "python"), "-m", "sglang.launch_server"]
    assert command[command.index("--speculative-draft-model-path") + 1] == str(drafter)
    assert {w for w in command if w.startswith("--")} <= sglang_flags(site / "sglang")
