"""Publishing: what the card says, what it must not say, and an upload to a made-up hub."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import save_file
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.contract import Contract, TargetFacts
from draftsmith.errors import UserError
from draftsmith.publish.push import drafter_of, is_repository, to_folder
from draftsmith.record import write_json, write_record

TOKEN = "hf_" + "t" * 24
BENCH = {
    "tokens_per_target_step": 1.523, "acceptance_length": 1.531, "acceptance_per_position": [0.341, 0.131], "drafts": 5806,
    "lossless": True, "sets": {"mt_bench": {}}, "speedup": {"8": 1.21},
    "engine": {"name": "vllm", "version": "0.32.0", "path": "/secret/place"},
}  # fmt: skip


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A finished run with records, whose target lies at a path of this machine and is named by an attacker."""
    import numpy as np

    run = tmp_path / "runs" / "mine"
    folder = run / "export" / "mine-eagle3"
    folder.mkdir(parents=True)
    save_file({"fc.weight": np.zeros((2, 6), "<f4")}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    facts = TargetFacts(
        name="/home/someone/models/chat<b>", config_hash="a" * 64, architecture="LlamaForCausalLM", model_type="llama",
        outer_model_type="llama", hidden_size=64, num_layers=8, vocab_size=320,
    )  # fmt: skip
    Contract(target=facts, aux_layer_ids=[2, 4, 5], draft_vocab_size=96, ttt_steps=2).save(folder)
    write_json(run / "recipe.json", {})
    config = {
        "capture": {
            "prompts": ["gsm8k_train:36", "/home/someone/logs.jsonl"],
            "held_out": ["mt_bench"],
            "temperature": 0.7,
        }
    }
    result: dict[str, Any] = {"rows": 39, "answer_tokens": 1193}
    write_record(run / "capture", stage="capture", key="k", inputs={}, config=config, result=result, started=0)
    result = {"folder": "/moved/away/mine-eagle3"}
    write_record(run / "export", stage="export", key="k", inputs={}, config={}, result=result, started=0)
    write_json(run / "bench" / "bench.json", BENCH)
    verdict = {"verdict": "yes", "engine": {"name": "vllm", "version": "0.32.0"}, "checks": [{"status": "pass"}] * 57}
    write_json(run / "check" / "verdict.json", verdict)
    return run


def test_the_card_is_made_of_the_records(run_folder: Path, tmp_path: Path) -> None:
    names = to_folder(run_folder, tmp_path / "out" / "mine-eagle3", "apache-2.0")
    assert names == ["README.md", "config.json", "contract.json", "figures.json", "model.safetensors"]
    card = (tmp_path / "out" / "mine-eagle3" / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["license"] == "apache-2.0" and "eagle3" in head["tags"] and "base_model" not in head
    for said in (
        "| tokens per target step | 1.523 |", "| acceptance at position 1 | 0.131 |", "| speed-up at 8 at once | 1.210 |",
        "generated tokens / (generated tokens − accepted tokens)", "said **yes** for `vllm 0.32.0`: 57 pass",
        "GSM8K (MIT)", "`logs.jsonl`: licence not recorded", "39 answers, 1,193 answer tokens", "enter layers [2, 4, 5]",
        "vllm serve", '"method": "eagle3"',
    ):  # fmt: skip
        assert said in card, said
    everything = (
        card
        + (tmp_path / "out/mine-eagle3/contract.json").read_text()
        + (tmp_path / "out/mine-eagle3/figures.json").read_text()
    )
    assert "/home/someone" not in everything and "/secret" not in everything and "`chat<b>`" in card


def test_a_drafter_without_records_says_what_is_not_known(run_folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    (run_folder / "export" / "mine-eagle3").rename(alone)
    to_folder(alone, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "Not measured in an engine." in card
        and "Not checked against" in card
        and "No record of the training data" in card
    )


def test_what_is_refused_leaves_nothing(run_folder: Path, tmp_path: Path) -> None:
    write_json(run_folder / "check" / "verdict.json", {"verdict": "no", "checks": []})
    with pytest.raises(UserError, match="said no"):
        to_folder(run_folder, tmp_path / "out")
    with pytest.raises(UserError, match="neither"):
        drafter_of(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(UserError, match="there already"):
        to_folder(run_folder, tmp_path / "full")
    write_json(run_folder / "check" / "verdict.json", {"verdict": "yes", "checks": []})
    (run_folder / "export" / "mine-eagle3" / "more.safetensors").symlink_to(tmp_path / "full" / "x")
    with pytest.raises(UserError, match="is a link"):
        to_folder(run_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".publish-*"))


def test_a_path_is_never_taken_for_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert is_repository("owner/name")
    assert not any(map(is_repository, ("./owner/name", "/owner/name", "~/name", "a/b", "name", "a/b/c", "owner/")))


class Hub(BaseHTTPRequestHandler):
    """As much of a hub's interface as one commit of small files needs."""

    tokens: set[str]
    files: dict[str, bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.tokens.add(self.headers.get("authorization", ""))
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "no"}, 401)
        elif self.path == "/api/repos/create":
            self.answer({"url": f"http://{self.headers['host']}/owner/name"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer(
                {
                    "commitUrl": f"http://{self.headers['host']}/owner/name/commit/{'1' * 40}",
                    "commitOid": "1" * 40,
                    "success": True,
                }
            )
        else:
            self.answer({}, 404)

    def do_GET(self) -> None:
        self.answer({"id": "owner/name", "sha": "0" * 40, "siblings": []})

    def answer(self, value: Any, status: int = 200) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    mine = type("Mine", (Hub,), {"tokens": set(), "files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), mine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield mine
    server.shutdown()
    server.server_close()


def test_to_a_hub_with_the_environments_token(
    run_folder: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="HF_TOKEN is not set"):
        CliRunner().invoke(app, ["publish", str(run_folder), "owner/name"], catch_exceptions=False)
    assert not hub.tokens, "the hub was asked without a token from the environment"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    done = CliRunner().invoke(app, ["publish", str(run_folder), "owner/name", "--json"], catch_exceptions=False)
    assert done.exit_code == 0 and json.loads(done.stdout)["address"].endswith("/owner/name")
    assert sorted(hub.files) == ["README.md", "config.json", "contract.json", "figures.json", "model.safetensors"]
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert not any(TOKEN.encode() in raw for raw in hub.files.values()) and TOKEN not in done.output


def test_a_refused_upload_is_one_block_without_the_token(
    run_folder: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = "hf_" + "x" * 24
    monkeypatch.setenv("HF_TOKEN", wrong)
    with pytest.raises(UserError, match="did not take owner/name") as e:
        CliRunner().invoke(app, ["publish", str(run_folder), "owner/name"], catch_exceptions=False)
    assert wrong not in str(e.value) and not hub.files
