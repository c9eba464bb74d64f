"""P27–P29: parallel sizes, paths that do not exist, wrapped configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asked import ask, engine
from mutant_case import Case, good_case

from draftsmith.check.inputs import model_folder
from draftsmith.check.run import check_pair
from draftsmith.errors import Exit, UserError


@pytest.mark.parametrize(("size", "status"), [(1, "pass"), (2, "pass"), (4, "pass"), (3, "fail"), (8, "fail")])
def test_p27_heads_must_divide(tmp_path: Path, size: int, status: str) -> None:
    """vllm#31345, #26328."""
    row = ask(tmp_path, lambda c: c.options.update(tensor_parallel=size))["pair.tensor_parallel"]
    assert row.status == status


def test_p27_pipeline_parallelism_needs_a_class_that_hands_states_on(tmp_path: Path) -> None:
    rows = ask(tmp_path / "a", lambda c: c.options.update(pipeline_parallel=2))
    assert rows["pair.pipeline_parallel"].status == "pass" and rows["pair.pipeline_parallel"].evidence

    def deepseek(case: Case) -> None:
        case.options["pipeline_parallel"] = 2
        case.pair.target_config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}

    assert ask(tmp_path / "b", deepseek)["pair.pipeline_parallel"].status == "fail"


def test_p28_a_hub_id_offline_gets_its_own_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vllm-ascend#10801: a drafter's id copied from docs onto an offline machine."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError) as caught:
        model_folder("someone/kimi-k2.5-eagle3", "drafter")
    assert "not in the local cache" in caught.value.what and caught.value.code == Exit.BAD_INPUT


def test_p28_a_cached_hub_id_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--someone--head-eagle3" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--someone--head-eagle3" / "refs").mkdir()
    (tmp_path / "models--someone--head-eagle3" / "refs" / "main").write_text("abc\n")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert model_folder("someone/head-eagle3", "drafter") == snapshot


def test_p28_a_wrong_path_names_the_neighbour(tmp_path: Path) -> None:
    (tmp_path / "drafter-eagle3").mkdir()
    with pytest.raises(UserError) as caught:
        model_folder(str(tmp_path / "drafter-eagl3"), "drafter")
    assert "drafter-eagle3" in caught.value.fix


def test_p28_a_checkpoint_is_no_drafter(tmp_path: Path) -> None:
    (tmp_path / "drafter.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        model_folder(str(tmp_path), "drafter")
    assert "draftsmith export" in caught.value.fix


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config", "thinker_config"])
def test_p29_wrapped_configs_are_looked_through(tmp_path: Path, key: str) -> None:
    """'Qwen3VLConfig' object has no attribute 'vocab_size'; Kimi's inner type is kimi_k2 or deepseek_v3."""
    case: Case = good_case(tmp_path / "scratch", with_contract=False)
    inner: dict[str, Any] = case.pair.target_config | {"model_type": "deepseek_v3"}
    wrapped = {"text_config": inner} if key == "thinker_config" else inner
    case.pair.target_config = {"architectures": ["LlamaForCausalLM"], "model_type": "kimi_k25", key: wrapped}
    target, drafter = case.write(tmp_path)
    verdict = check_pair(str(target), str(drafter), engine("modern-v1"), case.make_options())
    assert [r.id for r in verdict.checks if r.status == "fail"] == []


def test_p29_a_null_text_config_is_no_wrapper(tmp_path: Path) -> None:
    """speculators#626: text_config may be null."""
    rows = ask(tmp_path, lambda c: c.pair.target_config.update(text_config=None))
    assert rows["pair.vocab"].status == "pass"
