"""What tests of the extract stage share: captured rows without an engine, and a run around them."""

from pathlib import Path

import torch

from draftsmith.capture.rows import Row, RowWriter
from draftsmith.contract import Contract
from draftsmith.extract.self_check import AGREES_BF16, relative_l2
from draftsmith.extract.states import States
from draftsmith.extract.transformers_backend import TransformersStates
from draftsmith.recipe import parse_recipe
from draftsmith.record import write_record
from draftsmith.stage import Run
from draftsmith.target.config import target_facts
from draftsmith.ui import QuietUi


def some_rows(count: int, temperature: float = 0.7, high: int = 95) -> list[Row]:
    g = torch.Generator().manual_seed(0)
    rows = []
    for i in range(count):
        length = int(torch.randint(6, 60, (1,), generator=g))
        ids = torch.randint(3, high, (length,), generator=g).tolist()
        rows.append(Row(f"p{i}-0-0", f"p{i}", 0, 0, "t", ids, 4, "stop", "default", temperature, 1.0, "m", ""))
    return rows


def make_run(folder: Path, target: Path, rows: list[Row], **extract: object) -> Run:
    capture = folder / "capture"
    if not capture.exists():
        with_rows = RowWriter(capture / "rows")
        for row in rows:
            with_rows.add([row])
        with_rows.close_part()
        Contract(target=target_facts(target)).save(capture)
        write_record(capture, stage="capture", key="k", inputs={}, config={}, result={"output_hash": "h"}, started=0)
    recipe = parse_recipe(
        {
            "target": {"model": str(target)},
            "capture": {"prompts": ["x"]},
            "extract": {"aux_layers": [1, 3, 5], "batch_tokens": 256, **extract},
        },
        "test",
    )
    return Run(recipe, folder, QuietUi())


def agree(states: States, model: TransformersStates, ids: list[int], aux: list[int], layers: int = 6) -> None:
    """Every stream within bf16 rounding of transformers' own float32 forward, and the same most likely tokens."""
    streams, tops = model.all_streams(ids), model.own_tops(ids)
    last = len(ids) - (states.argmax is not None and int(states.argmax[-1]) < 0)  # a generated row lacks its last state
    for a, k in enumerate(aux):
        assert relative_l2(states.aux[:last, a], streams[k][:last]) < AGREES_BF16, f"stream {k}"
    start = states.final_start
    assert states.final is not None and states.argmax is not None
    assert relative_l2(states.final[: last - start], streams[layers][start:last]) < AGREES_BF16
    found = states.argmax[: last - start].tolist()
    assert sum(a == b for a, b in zip(found, tops[start:last], strict=True)) >= 0.99 * len(found)
