"""Keys and tokens: from the environment or the keyring alone, and nowhere else afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from threat import refused, require, threat

KEY = "private-0123456789"


def _take_any(mp: pytest.MonkeyPatch) -> None:
    mp.setattr("draftsmith.recipe.require_none", lambda *a: None)


@threat("T32", "a secret written into a recipe", _take_any)
def _(tmp: Path) -> None:
    from draftsmith.recipe import parse_recipe

    raw: dict[str, Any] = {"target": {"model": "smollm2"}, "capture": {"prompts": ["gsm8k_train:4"]}}
    for engine in ({"env": {"HF_TOKEN": KEY}}, {"args": [f"--api-key={KEY}"]}, {"args": ["--api-key", KEY]}):
        with refused("holds a secret"):
            parse_recipe(raw | {"engine": engine}, "recipe.yaml")


def _write_all(mp: pytest.MonkeyPatch) -> None:
    mp.setattr("draftsmith.record.redact", lambda value: value)


@threat("T33", "a secret in a record, and from there in the report", _write_all)
def _(tmp: Path) -> None:
    from draftsmith.record import write_record

    with pytest.MonkeyPatch.context() as mp:
        mp.setenv("MY_API_KEY", KEY)
        mp.setattr("sys.argv", ["draftsmith", "bench", "--endpoint", "http://me:word@host", f"--arg=--api-key={KEY}"])
        result = {"said": f"401 for Bearer {KEY}", "hub": "hf_" + "a" * 30}
        write_record(
            tmp, stage="bench", key="k", inputs={}, config={"env": {"X_TOKEN": "word"}}, result=result, started=0
        )
    text = (tmp / "run.json").read_text()
    found = [s for s in (KEY, "me:word", "hf_aaaa", '"word"') if s in text]
    require(not found, f"the record holds {found}")


@threat("T34", "a password in a server's address", lambda mp: mp.setattr(
    "draftsmith.engine.client.has_userinfo", lambda url: False
))  # fmt: skip
def _(tmp: Path) -> None:
    from draftsmith.engine.client import EngineClient

    with refused("holds a password"):
        EngineClient(f"http://me:{KEY}@host:8000/v1")


def _from_the_recipe(mp: pytest.MonkeyPatch) -> None:
    mp.setattr("draftsmith.capture.stage.secret", lambda name: name)


@threat("T35", "a key that is neither in the environment nor in the keyring", _from_the_recipe)
def _(tmp: Path) -> None:
    from draftsmith.capture.stage import _api_key
    from draftsmith.recipe import CaptureSection

    with refused("is not set"):
        _api_key(CaptureSection(prompts=["x.jsonl"], api_key_env="NO_SUCH_VARIABLE_HERE"))
