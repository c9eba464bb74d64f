"""X01–X12, the part that a check sees in what a converter left behind (the conversions are in test_x_convert.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_pair as tp
from asked import ask, ask_verdict
from mutant_case import Case, P, rename
from tiny_pair import as_f32, bf16

from draftsmith.check.drafter import canonical
from draftsmith.check.target import Target


def test_x01_a_lost_rename_leaves_the_layer_random(tmp_path: Path) -> None:
    """speculators#1114: `midlayer.` remap lost, saved with strict=False, 0 acceptance everywhere."""
    verdict = ask_verdict(tmp_path, lambda c: rename(c, lambda n: n.replace(P, "layers.1.")))
    rows = {r.id: r for r in verdict.checks}
    assert verdict.verdict == "no"
    assert "layers.0.hidden_norm.weight" in rows["form.inventory"].found and rows["form.names"].status == "fail"


def test_x01_both_spellings_of_the_layer_are_one(tmp_path: Path) -> None:
    verdict = ask_verdict(tmp_path, lambda c: rename(c, lambda n: n.replace(P, "midlayer.")))
    assert verdict.verdict == "yes"
    assert canonical("midlayer.self_attn.q_proj.weight") == ("layers.0.self_attn.q_proj.weight", "")


@pytest.mark.parametrize("name", sorted(n for n in tp.make_pair().drafter if n not in ("t2d", "d2t", "lm_head.weight")))
def test_x02_every_tensor_is_required(tmp_path: Path, name: str) -> None:
    """The engine loads without any one of them and accepts nothing."""
    row = ask(tmp_path, lambda c: c.t.pop(name))["form.inventory"]
    assert row.status == "fail" and name in row.found


def test_x02_lm_head_may_be_shared_only_with_the_whole_vocabulary(tmp_path: Path) -> None:
    assert ask(tmp_path / "a", lambda c: c.t.pop("lm_head.weight"))["form.lm_head"].status == "fail"

    def full(case: Case) -> None:
        for n in ("lm_head.weight", "d2t", "t2d"):
            del case.t[n]
        del case.c["draft_vocab_size"]

    assert ask(tmp_path / "b", full)["form.lm_head"].status == "pass"


def test_x02_a_declared_full_vocabulary_without_head_is_fine(tmp_path: Path) -> None:
    """nvidia's Kimi-K2.6 form: full, no lm_head tensor, yet draft_vocab_size declared."""

    def full(case: Case) -> None:
        for n in ("lm_head.weight", "d2t", "t2d"):
            del case.t[n]
        case.c["draft_vocab_size"] = tp.VOCAB

    assert ask_verdict(tmp_path, full).verdict == "yes"


def test_x03_no_map_is_an_error(tmp_path: Path) -> None:
    """Automodel#2447: the map lay in a file beside the checkpoint."""
    assert ask(tmp_path, lambda c: c.t.pop("d2t"))["form.map"].status == "fail"


def ids_of(case: Case) -> np.ndarray:
    return case.t["d2t"] + np.arange(tp.DRAFT_VOCAB)


@pytest.mark.parametrize(
    ("dtype", "status"), [("<i4", "warn"), ("<f4", "warn"), ("<f8", "warn"), ("<f2", "fail"), ("|u1", "fail")]
)
def test_x04_d2t_is_int64(tmp_path: Path, dtype: str, status: str) -> None:
    """vLLM casts what it finds: right while every offset fits, and nothing says so."""
    row = ask(tmp_path, lambda c: c.t.update(d2t=c.t["d2t"].astype(dtype)))["form.map_type"]
    assert row.status == status and row.fix == "save it as int64"


def test_x04_absolute_ids_are_told_apart_from_offsets(tmp_path: Path) -> None:
    """verl-SpeCo#67, EAGLE#222."""
    row = ask(tmp_path, lambda c: c.t.update(d2t=ids_of(c).astype("<i8")))["form.map_values"]
    assert row.status == "fail" and "absolute" in row.found and "convert" in row.fix


@pytest.mark.parametrize("value", [tp.VOCAB, -1, 2**62])
def test_x04_a_map_that_leaves_the_vocabulary(tmp_path: Path, value: int) -> None:
    """mblt-model-zoo#110; an IndexError only when served."""

    def change(case: Case) -> None:
        d2t = case.t["d2t"].copy()
        d2t[-1] = value - (tp.DRAFT_VOCAB - 1)
        case.t["d2t"] = d2t

    assert ask(tmp_path, change)["form.map_values"].status == "fail"


def test_x06_an_untrained_table_of_its_own(tmp_path: Path) -> None:
    """TorchSpec#39: random embed_tokens counts as the drafter's own. The target's copy is fine, and could be left out."""

    def random(case: Case) -> None:
        case.options["deep"] = True
        case.t["embed_tokens.weight"] = bf16(np.random.default_rng(1).standard_normal((tp.VOCAB, tp.HIDDEN)))

    assert ask(tmp_path / "a", random)["silence.embedding"].status == "fail"

    def same(case: Case) -> None:
        case.options["deep"] = True
        case.t["embed_tokens.weight"] = case.pair.target["model.embed_tokens.weight"]

    assert ask(tmp_path / "b", same)["silence.embedding"].status == "pass"

    def trained(case: Case) -> None:
        case.options["deep"] = True
        table = as_f32(case.pair.target["model.embed_tokens.weight"])
        case.t["embed_tokens.weight"] = bf16(table + 0.2 * np.random.default_rng(2).standard_normal(table.shape))

    assert ask(tmp_path / "c", trained)["silence.embedding"].status == "pass"


def test_x06_saved_in_float32(tmp_path: Path) -> None:
    """speculators#136."""

    def change(case: Case) -> None:
        case.pair.drafter = {
            n: as_f32(x) if hasattr(x, "view") and n not in ("d2t", "t2d") else x for n, x in case.t.items()
        }

    assert ask(tmp_path, change)["form.dtypes"].status == "warn"


def test_x07_a_tied_save_overwrote_the_head(tmp_path: Path) -> None:
    """speculators#74: [32000, 4096] became [128256, 4096]."""

    def change(case: Case) -> None:
        case.c["tie_word_embeddings"] = True
        case.t["lm_head.weight"] = case.pair.target["lm_head.weight"]

    rows = ask(tmp_path, change)
    assert rows["form.lm_head"].status == "fail" and "tied" in rows["form.lm_head"].found
    assert rows["form.tie"].status == "warn"


def test_x08_head_dim_comes_from_the_tensors(tmp_path: Path) -> None:
    """speculators#134 (Qwen3-32B: 80 for 128), ModelOpt#398 (gpt-oss: 45 for 64)."""
    from mutants_form import head_dim_lost

    row = ask(tmp_path, head_dim_lost)["form.sizes"]
    assert row.status == "fail" and "head_dim 32" in row.fix


@pytest.mark.parametrize("prefix", ["model.", "draft_model.", "_orig_mod.", "module.", "draft_model.model."])
def test_x10_stray_prefixes(tmp_path: Path, prefix: str) -> None:
    rows = ask(tmp_path, lambda c: rename(c, lambda n: prefix + n))
    assert rows["form.names"].status == "fail" and prefix in rows["form.names"].found
    assert rows["form.inventory"].status == "pass", "one fault, one row"


@pytest.mark.parametrize(
    "name", ["verifier_norm.weight", "verifier_lm_head.weight", "optimizer.exp_avg", "layers.0.foo"]
)
def test_x10_extra_tensors_are_refused_by_name(tmp_path: Path, name: str) -> None:
    row = ask(tmp_path, lambda c: c.t.update({name: bf16(np.ones(4))}))["form.names"]
    assert row.status == "fail" and name in row.found


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["model.embed_tokens.weight"], True),
        (["model.language_model.embed_tokens.weight"], True),
        (["language_model.model.embed_tokens.weight"], True),
        (["backbone.embeddings.weight"], True),
        (["model.embed_tokens.weight", "model.layers.61.embed_tokens.weight"], True),  # DeepSeek's MTP layer
        (["a.embed_tokens.weight", "b.embed_tokens.weight"], False),
    ],
)
def test_x12_the_targets_embedding_by_a_name_that_is_unique(tmp_path: Path, names: list[str], found: bool) -> None:
    from draftsmith.check.headers import read_weights

    tp.write_safetensors(tmp_path / "model.safetensors", {n: bf16(np.ones((8, 4))) for n in names})
    target = Target(tmp_path, {"hidden_size": 4, "vocab_size": 8}, read_weights(tmp_path))
    assert (target.embedding is not None) is found
