"""A warm start as the story has it: a drafter of the public Kimi-K2 form (Llama layer of as many key as query heads, head_dim
that is not hidden / heads, nested ids in vLLM's meaning, its own draft vocab, rope theta 1e6, bfloat16), trained on beside
a tiny Kimi-K2.5: what it could is there before the first step. Sizes are scaled down; the form's are 7168 wide, 64 heads,
aux ids [2, 30, 58].
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import _families

from draftsmith.capture.rows import Row, write_rows
from draftsmith.contract import Contract
from draftsmith.dialects import native, others
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.store import StateWriter
from draftsmith.extract.transformers_backend import TransformersStates
from draftsmith.pipeline import open_run
from draftsmith.recipe import load_recipe
from draftsmith.record import write_record
from draftsmith.stage import execute
from draftsmith.target.config import target_facts
from draftsmith.train.stage import STAGE
from draftsmith.ui import QuietUi
from draftsmith.vocab.map import VocabMap

V, D, AUX = _families.VOCAB, 128, [2, 4, 5]
ROWS, TOKENS = 40, 20
FORM = {"form": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 256,
        "rope": {"rope_type": "default", "rope_theta": 1e6}}  # fmt: skip


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """(folder of a tiny Kimi-K2.5, its states). Its text model is DeepSeek-V3's with the same weights, which transformers
    can load."""
    root = tmp_path_factory.mktemp("kimi")
    target = _families.write_target(_families.family("Kimi-K2.5"), root / "kimi")
    twin = _families.write_target(_families.family("DeepSeek-V3"), root / "twin")
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, V, (4,), generator=g).tolist() for _ in range(ROWS)]
    model = TransformersStates(twin, AUX, dtype=torch.float32, device="cpu")
    while len(rows[0]) < TOKENS:  # its own greedy answers
        rows = [[*r, int(s.argmax[-1])] for r, s in zip(rows, model.states(rows, [len(r) for r in rows]), strict=True)]
    return target, model.states(rows, [4] * ROWS)


def run_with(folder, kimi, chosen, **train):
    """A run whose states lie there and whose draft vocab is `chosen`, trained; (figures, what it said, folder)."""
    target, states = kimi
    plan = {
        "name": "k", "out": str(folder), "target": {"model": str(target)}, "capture": {"prompts": ["x.jsonl"]},
        "drafter": FORM if "from" not in train else {},
        "train": {"batch_tokens": 256, "ttt_steps": 2, "held_out_rows": 0.2, "eval_every": 1000, "lr": 0.005} | train,
    }  # fmt: skip
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(plan))
    ui = QuietUi()
    run = open_run(load_recipe(folder / "recipe.yaml"), ui)
    facts = Contract(target=target_facts(target), aux_layer_ids=AUX, final_state="pre_norm")
    for name in ("capture", "vocab", "extract"):
        run.stage_dir(name).mkdir(parents=True)
        facts.save(run.stage_dir(name))
    rows = [
        Row(f"r{i}", f"r{i}", 0, 0, "x", s.token_ids.tolist(), 4, "stop", "default", 0.7, 1.0, "t", "")
        for i, s in enumerate(states)
    ]
    write_rows(run.stage_dir("capture"), rows)
    t2d = np.zeros(V, dtype=bool)
    t2d[chosen] = True
    VocabMap(np.flatnonzero(t2d) - np.arange(D), t2d).save(run.stage_dir("vocab"))
    with StateWriter(run.stage_dir("extract"), facts, make_codec("bf16")) as writer:
        for i, s in enumerate(states):
            writer.add(f"r{i}", s)
    for name in ("capture", "vocab", "extract"):
        write_record(run.stage_dir(name), stage=name, key=name, inputs={}, config={}, result={"output_hash": name},
                     started=time.time())  # fmt: skip
    return execute(STAGE, run)["result"], ui, run.stage_dir("train")


def public_form(best, out):
    """The checkpoint as such a drafter is published: no contract, no word on what its ids mean, nested ids, old rope keys."""
    point = native.read(best)
    point.contract = None
    others.write("vllm", point, out, dtype="bfloat16")
    raw = json.loads((out / "config.json").read_text())
    for key in ("eagle_aux_hidden_state_layer_ids", "draftsmith_aux_layer_ids", "num_aux_hidden_states", "rope_parameters",
                "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):  # fmt: skip
        del raw[key]
    raw |= {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX, "use_aux_hidden_state": True},
        "rope_scaling": None,
    }
    (out / "config.json").write_text(json.dumps(raw))
    return out


def test_what_it_could_is_there_before_the_first_step(tmp_path, kimi):
    tops = torch.cat([s.argmax[s.argmax >= 0] for s in kimi[1]])
    often = torch.bincount(tops, minlength=V).argsort(descending=True, stable=True).numpy()
    first, ui, folder = run_with(tmp_path / "a", kimi, np.sort(often[:D]), steps=60)
    assert first["acceptance_length"] > 1.3, "nothing was learnt that could be lost"
    start = public_form(folder / "best", tmp_path / "made-eagle3")
    assert json.loads((start / "config.json").read_text())["head_dim"] != 128 // 4
    # Its own draft vocab: 112 of its tokens are the run's as well.
    other = np.sort(np.concatenate([often[: D - 16], often[D : D + 16]]))
    for chosen, share in ((np.sort(often[:D]), 0.98), (other, 0.85)):
        name = f"b{share}"
        again, ui, _ = run_with(tmp_path / name, kimi, chosen, steps=2, lr=1e-5, **{"from": str(start)})
        kept = (again["start_acceptance_length"] - 1) / (first["acceptance_length"] - 1)
        print(name, first["acceptance_length"], again["start_acceptance_length"])
        assert kept >= share, (first["acceptance_length"], again["start_acceptance_length"])
        assert any("[2, 4, 5]" in n and "vLLM's meaning" in n for n in ui.notes)
    assert any("112 lm_head rows moved, 16 new ones" in n for n in ui.notes)
