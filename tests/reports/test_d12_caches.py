"""D12: caches that do not notice a change (SpecForge#602, 1de70d1, speculators#602).

The stage's key holds the content of every input: template, tokenizer, target config, prompt file, sampling.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from capture_support import as_target, make_run, write_prompts

from draftsmith.capture.stage import STAGE


def change_template(target: Path, prompts: Path) -> None:
    (target / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def change_tokenizer(target: Path, prompts: Path) -> None:
    raw = json.loads((target / "tokenizer.json").read_text())
    raw["model"]["vocab"]["Ġanother"] = 320
    (target / "tokenizer.json").write_text(json.dumps(raw))


def change_config(target: Path, prompts: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))


def change_prompts(target: Path, prompts: Path) -> None:
    prompts.write_text(prompts.read_text().replace("one", "two"))


@pytest.mark.parametrize("change", [change_template, change_tokenizer, change_config, change_prompts])
def test_the_key_hears_every_input(
    tmp_path: Path, byte_tokenizer: Callable[..., Path], change: Callable[[Path, Path], None]
) -> None:
    target, prompts = as_target(byte_tokenizer()), write_prompts(tmp_path / "p.jsonl", ["one"])
    run = make_run(tmp_path, target, [str(prompts)], ["http://127.0.0.1:1"])
    before = STAGE.key(run)[0]
    assert STAGE.key(run)[0] == before
    change(target, prompts)
    assert STAGE.key(run)[0] != before
