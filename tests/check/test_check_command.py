"""`draftsmith check` as a user meets it: exit codes, --json, --list, pickled drafters, no engine, the stage, --dry-run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from asked import engine, facts
from mutant_case import Case, good_case
from typer.testing import CliRunner

from draftsmith.check.catalog import CATALOG
from draftsmith.check.dryrun import last_error
from draftsmith.check.run import check_pair
from draftsmith.cli.main import app
from draftsmith.errors import UserError

RUN = CliRunner()


def pair(root: Path, **changes: Any) -> tuple[str, str]:
    case: Case = good_case(root / "scratch", with_contract=False)
    case.c.update(changes)
    target, drafter = case.write(root)
    return str(target), str(drafter)


def run(*args: str) -> Any:
    return RUN.invoke(app, ["check", *args], catch_exceptions=True)


def test_yes_is_zero_and_the_json_has_its_shape(tmp_path: Path) -> None:
    done = run(*pair(tmp_path), "--engine", engine("modern-v1"), "--json")
    assert done.exit_code == 0
    verdict = json.loads(done.stdout)
    assert set(verdict) == {"verdict", "engine", "checks"} and verdict["verdict"] == "yes"
    assert set(verdict["engine"]) == {"name", "version", "path"} and verdict["engine"]["version"] == "0.32.0"
    for row in verdict["checks"]:
        assert set(row) == {"id", "group", "status", "found", "evidence", "fix"}
        assert row["status"] in ("pass", "warn", "fail", "skip") and row["found"] and row["id"] in CATALOG
        assert all(set(e) == {"file", "line", "text"} for e in row["evidence"])
    assert {"gate.list", "gate.interface"} <= {r["id"] for r in verdict["checks"]}


def test_no_is_one_and_the_table_names_check_and_remedy(tmp_path: Path) -> None:
    done = run(*pair(tmp_path, vocab_size=500), "--engine", engine("modern-v1"))
    assert done.exit_code == 1
    assert "FAIL  pair.vocab" in done.stdout and "fix: write vocab_size: 512" in done.stdout
    assert "NO" in done.stdout.splitlines()[-1]


def test_bad_input_is_two(tmp_path: Path) -> None:
    done = run(str(tmp_path / "nothing"), str(tmp_path / "none"))
    assert isinstance(done.exception, UserError) and int(done.exception.code) == 2
    (tmp_path / "config.json").write_text("{]")
    done = run(str(tmp_path), str(tmp_path))
    assert isinstance(done.exception, UserError) and "not JSON" in done.exception.what
    assert isinstance(run().exception, UserError)
    assert isinstance(run(str(tmp_path)).exception, UserError)


def test_could_not_tell_is_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine; and a drafter that is only pickled."""
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DRAFTSMITH_ENGINE", raising=False)
    target, drafter = pair(tmp_path)
    done = run(target, drafter)
    assert done.exit_code == 3 and "CANNOT TELL" in done.stdout and "no engine" in done.stdout
    assert "skip  gate.list" not in done.stdout, done.stdout
    assert "those of the engine" in done.stdout
    assert done.stdout.splitlines()[-1].strip().startswith("because no engine") and "install" in done.stdout
    Path(drafter, "model.safetensors").rename(Path(drafter, "pytorch_model.bin"))
    done = run(target, drafter, "--engine", engine("modern-v1"))
    assert done.exit_code == 3 and "never opened" in done.stdout


def test_all_shows_evidence_and_what_was_skipped(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)
    short = run(target, drafter, "--engine", engine("modern-v1")).stdout
    long = run(target, drafter, "--engine", engine("modern-v1"), "--all").stdout
    assert "form.deep_values" not in short and "not made: --deep" in short
    assert "form.deep_values" in long and "vllm/model_executor/models/registry.py:" in long


def test_the_list_is_the_catalog() -> None:
    rows = json.loads(run("--list", "--json").stdout)
    assert [r["id"] for r in rows] == list(CATALOG)
    assert all(r["finds"] and "source" in r and "needs" in r for r in rows)
    assert "silence.residual" in run("--list").stdout


def test_every_row_of_a_verdict_is_in_the_catalog(tmp_path: Path) -> None:
    verdict = check_pair(*pair(tmp_path), facts=facts("modern-v1"))
    ids = [r.id for r in verdict.checks]
    assert len(ids) == len(set(ids)) and set(ids) <= set(CATALOG)


def test_before_training_by_command(tmp_path: Path) -> None:
    target, _ = pair(tmp_path)
    done = run(target, "--before-training", "--engine", engine("modern-v1"), "--json")
    assert done.exit_code == 0
    rows = {r["id"]: r for r in json.loads(done.stdout)["checks"]}
    assert "2 = stream entering layer 2" in rows["runner.default_ids"]["found"]
    assert "LlamaForCausalLMEagle3" in rows["form.choice"]["found"]


def test_check_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)
    code = (
        "import sys; from draftsmith.check.run import check_pair\n"
        f"v = check_pair({target!r}, {drafter!r}, {engine('modern-v1')!r})\n"
        "print(v.verdict, [m for m in ('torch', 'transformers', 'pyarrow', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "yes []"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("Traceback\n  File x\nValueError: Expected one of: {…}", "ValueError: Expected one of: {…}"),
        ("pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\n  Value error, Eagle3 is only\n",
         "pydantic_core.ValidationError: 1 validation error for SpeculativeConfig Value error, Eagle3 is only"),
        ("", "no output"),
    ],
)  # fmt: skip
def test_the_line_that_says_what_went_wrong(log: str, line: str) -> None:
    assert last_error(log) == line


def test_a_source_tree_can_be_read_but_not_run(tmp_path: Path) -> None:
    done = run(*pair(tmp_path), "--engine", engine("modern-v1"), "--dry-run", "--json")
    row = json.loads(done.stdout)["checks"][-1]
    assert row["id"] == "engine.dry_run" and row["status"] == "skip"
