"""Fixtures of tiny random drafters and packed batches (tiny_drafters.py), and a run that is ready to be trained."""

import time

import numpy as np
import pytest
import torch
import yaml
from tiny_drafters import document, tiny_drafter, tiny_head

from draftsmith.capture.rows import Row, write_rows
from draftsmith.contract import Contract
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.states import States
from draftsmith.extract.store import StateWriter
from draftsmith.pipeline import open_run
from draftsmith.recipe import load_recipe
from draftsmith.record import write_record
from draftsmith.target.config import target_facts
from draftsmith.train.batch import join
from draftsmith.ui import QuietUi
from draftsmith.vocab.map import VocabMap

V, D, H = 320, 64, 64


@pytest.fixture
def drafter():
    return tiny_drafter()


@pytest.fixture
def head(drafter):
    return tiny_head(drafter)


@pytest.fixture
def batch():
    return join([document(9, 3, 0), document(2, 1, 1), document(14, 6, 2)], pad_to=28)


@pytest.fixture
def recipe(tiny_target, tmp_path):
    """A recipe whose run has capture, vocab and extract done, with random states."""
    path = tmp_path / "recipe.yaml"
    sections = {
        "name": "tiny",
        "out": str(tmp_path / "runs"),
        "target": {"model": str(tiny_target)},
        "capture": {"prompts": ["x.jsonl"]},
        "train": {"steps": 4, "batch_tokens": 64, "eval_every": 2, "ttt_steps": 2, "held_out_rows": 0.2},
    }
    path.write_text(yaml.safe_dump(sections))
    run = open_run(load_recipe(path), QuietUi())
    facts = Contract(target=target_facts(tiny_target), aux_layer_ids=[2, 4, 5], final_state="pre_norm")
    gen = torch.Generator().manual_seed(0)
    rows = []
    for i in range(16):
        length = int(torch.randint(12, 30, (1,), generator=gen))
        ids = torch.randint(V, (length,), generator=gen)
        rows.append((f"row-{i}", ids, 5))
    for name in ("capture", "vocab", "extract"):
        run.stage_dir(name).mkdir(parents=True)
        facts.save(run.stage_dir(name))
    write_rows(
        run.stage_dir("capture"),
        [Row(n, n, 0, 0, "x", ids.tolist(), b, "stop", "default", 0.7, 1.0, "t", "") for n, ids, b in rows],
    )
    t2d = np.arange(V) < D
    VocabMap(np.zeros(D, dtype=np.int64), t2d).save(run.stage_dir("vocab"))
    with StateWriter(run.stage_dir("extract"), facts, make_codec("bf16")) as writer:
        for name, ids, boundary in rows:
            n = len(ids)
            writer.add(
                name,
                States(
                    ids,
                    boundary,
                    torch.randn(n, 3, H, generator=gen).bfloat16(),
                    boundary - 1,
                    torch.randn(n - boundary + 1, H, generator=gen).bfloat16(),
                    torch.randint(D, (n - boundary + 1,), generator=gen),
                ),
            )
    for name in ("capture", "vocab", "extract"):
        write_record(
            run.stage_dir(name),
            stage=name,
            key=name,
            inputs={},
            config={},
            result={"output_hash": name},
            started=time.time(),
        )
    return path
