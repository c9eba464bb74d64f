"""The command: its options, and one clear block with exit code 2 for each kind of bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from capture_support import as_target, write_prompts
from stub_server import StubServer

from draftsmith.capture.rows import count_rows
from draftsmith.cli.main import main

Maker = Callable[..., Path]


def write_recipe(path: Path, target: Path, prompts: Path, **capture: Any) -> Path:
    recipe = {
        "name": "r",
        "out": str(path.parent / "runs"),
        "target": {"model": str(target)},
        "capture": {"prompts": [str(prompts)], "held_out": [], **capture},
    }
    path.write_text(yaml.safe_dump(recipe))
    return path


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["draftsmith", *words])
    with pytest.raises(SystemExit) as e:
        main()
    return int(e.value.code or 0)


def test_many_endpoints_and_json(
    tmp_path: Path, byte_tokenizer: Maker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = as_target(byte_tokenizer())
    recipe = write_recipe(
        tmp_path / "r.yaml", target, write_prompts(tmp_path / "p.jsonl", [f"q{i}" for i in range(30)])
    )
    with StubServer(target, delay=0.01) as a, StubServer(target, delay=0.01) as b:
        assert call(monkeypatch, "capture", str(recipe), "--endpoint", a.url, "--endpoint", b.url, "--json") == 0
        assert a.asked > 0 < b.asked
    record = json.loads(capsys.readouterr().out)
    assert record["result"]["rows"] == count_rows(tmp_path / "runs" / "r" / "capture") == 30


def test_preview_shows_rows_and_leaves_no_run(
    tmp_path: Path, byte_tokenizer: Maker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = as_target(byte_tokenizer())
    recipe = write_recipe(tmp_path / "r.yaml", target, write_prompts(tmp_path / "p.jsonl", ["q0", "q1", "q2"]))
    with StubServer(target) as server:
        assert call(monkeypatch, "capture", str(recipe), "--endpoint", server.url, "--preview", "2") == 0
        assert server.asked == 2
    out = capsys.readouterr().out
    assert out.count("supervised") == 2
    assert out.count("⟦answer ") == 2
    assert not (tmp_path / "runs").exists()


def broken_lines(tmp_path: Path, target: Path) -> Path:
    prompts = write_prompts(tmp_path / "p.jsonl", ["a", "b"])
    prompts.write_text(prompts.read_text() + '{"prompt": "c\n')
    return write_recipe(tmp_path / "r.yaml", target, prompts, endpoints=["http://127.0.0.1:9"])


def server_down(tmp_path: Path, target: Path) -> Path:
    prompts = write_prompts(tmp_path / "p.jsonl", ["a"])
    return write_recipe(tmp_path / "r.yaml", target, prompts, endpoints=["http://127.0.0.1:9"])


def no_template(tmp_path: Path, target: Path) -> Path:
    config = json.loads((target / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return server_down(tmp_path, target)


def no_prompts(tmp_path: Path, target: Path) -> Path:
    return write_recipe(tmp_path / "r.yaml", target, tmp_path / "none.jsonl", endpoints=["http://127.0.0.1:9"])


def unknown_key(tmp_path: Path, target: Path) -> Path:
    return write_recipe(tmp_path / "r.yaml", target, write_prompts(tmp_path / "p.jsonl", ["a"]), temprature=0.5)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (broken_lines, "line 3 is broken"),
        (server_down, "no server answers"),
        (no_template, "no chat template"),
        (no_prompts, "no prompt file"),
        (unknown_key, "did you mean 'temperature'"),
    ],
)
def test_bad_input_is_one_block_and_exit_code_2(
    tmp_path: Path,
    byte_tokenizer: Maker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path, Path], Path],
    what: str,
) -> None:
    recipe = make(tmp_path, as_target(byte_tokenizer()))
    assert call(monkeypatch, "capture", str(recipe)) == 2
    said = capsys.readouterr().err
    assert what in said
    assert said.count("error:") == 1
    assert "Traceback" not in said
    folder = tmp_path / "runs" / "r" / "capture"
    assert not (folder / "run.json").exists()
    assert not list(folder.rglob("*.parquet"))
