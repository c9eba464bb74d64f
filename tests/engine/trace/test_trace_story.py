"""The story's two halves meet: the line that `check` names beforehand is the one that `explain` finds in the crash."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[1] / "remedy"))
from remedy_engine import pair, write_engine

TAIL = """(APIServer pid=71) pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig
(APIServer pid=71)   Value error, Eagle3 is only supported for ['llama', 'qwen', 'minicpm'] models. Got self.target_model_config.hf_text_config.model_type='kimi_k2' [type=value_error, input_value=ArgsKwargs((), {'model': ..., 'target': 1}), input_type=ArgsKwargs]
(APIServer pid=71)     For further information visit https://errors.pydantic.dev/2.12/v/value_error
"""  # noqa: E501


@pytest.mark.parametrize("keep", [3, 2])
def test_check_and_explain_name_one_line(tmp_path: Path, keep: int) -> None:
    site = write_engine(tmp_path / "site")
    target, drafter = pair(tmp_path, "UnableForCausalLM", "kimi_k25")
    config = json.loads((tmp_path / "target/config.json").read_text())
    inner = {k: v for k, v in config.items() if k not in ("architectures", "model_type")} | {"model_type": "kimi_k2"}
    wrapper = {"architectures": config["architectures"], "model_type": "kimi_k25", "text_config": inner}
    (tmp_path / "target/config.json").write_text(json.dumps(wrapper))
    words = ["--engine", str(site), "--json"]
    run = CliRunner()
    checked = run.invoke(app, ["check", target, drafter, *words, "--platform", "cuda"])
    assert checked.exit_code == 1, checked.output
    rows = {r["id"]: r for r in json.loads(checked.stdout)["checks"]}
    assert rows["gate.list"]["status"] == rows["gate.interface"]["status"] == "fail"
    explained = run.invoke(app, ["explain", "-", *words], input="".join(TAIL.splitlines(keepends=True)[-keep:]))
    assert explained.exit_code == 0, explained.output
    found = json.loads(explained.stdout)
    place = found["place"]
    assert (place["file"], place["function"]) == ("vllm/config/speculative.py", "SpeculativeConfig._verify_args")
    assert place["line"] in [e["line"] for e in rows["gate.list"]["evidence"] if e["file"] == place["file"]]
    assert place["values"]["self.target_model_config.hf_text_config.model_type"] == "'kimi_k2'"
    assert any("supported_model in" in g["text"] for g in found["guards"])
    assert "0.18.0" in found["advice"]["fix"] and "gate.list" in found["advice"]["checks"]


def test_a_log_without_error_says_no_before_it_asks_for_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_ENGINE", str(tmp_path / "none"))
    (tmp_path / "log").write_text("INFO 11-30 16:05:38 [core.py:1] all is well\n")
    done = CliRunner().invoke(app, ["explain", str(tmp_path / "log"), "--json"])
    assert done.exit_code == 1 and json.loads(done.stdout)["error"] is None
    wrong = CliRunner().invoke(app, ["explain", str(tmp_path / "log"), "--engine", str(tmp_path / "none")])
    assert isinstance(wrong.exception, UserError)  # one that is named must be there


def test_an_unknown_error_says_that_it_cannot_tell(tmp_path: Path) -> None:
    site = write_engine(tmp_path / "site")
    done = CliRunner().invoke(
        app, ["explain", "-", "--engine", str(site)], input="ValueError: words of another program"
    )
    assert done.exit_code == 3 and "no line of vllm 0.16.0" in done.output


def test_advice_names_checks_that_exist() -> None:
    from draftsmith.check.catalog import CATALOG
    from draftsmith.engine.trace_advice import ADVICE

    named = {c for row in ADVICE for c in row.checks}
    assert named - set(CATALOG) == set()
