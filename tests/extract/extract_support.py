"""What tests of the extract stage share: captured rows without an engine, and a run around them."""

from pathlib import Path

import torch

from draftsmith.capture.rows import Row, RowWriter
from draftsmith.contract import Contract
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
