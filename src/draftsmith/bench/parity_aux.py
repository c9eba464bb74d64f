"""The target's aux streams as the engine computes them, against transformers': the input of every drafter step."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.bench.parity import distance
from draftsmith.diagnose.subject import SampleRow, Subject
from draftsmith.ui import Ui

if TYPE_CHECKING:
    from draftsmith.engine.find import Engine


def engine_streams_distance(engine: Engine, subject: Subject, rows: Sequence[SampleRow], ui: Ui) -> dict[int, float]:
    """Aux id → relative L2 of the engine's stream (bf16) against transformers' (float32), the worst row."""
    import numpy as np

    from draftsmith.contract import Contract
    from draftsmith.engine.server import Server
    from draftsmith.extract.rows import Item
    from draftsmith.extract.vllm_backend import VllmBackend
    from draftsmith.extract.wire import Wire
    from draftsmith.target.config import target_facts

    ids = list(subject.setup().aux_ids)
    contract = subject.contract or Contract(target=target_facts(subject.target))
    contract = contract.with_(aux_layer_ids=ids, final_state="pre_norm")
    worst = dict.fromkeys(ids, 0.0)
    with tempfile.TemporaryDirectory(prefix="draftsmith-parity-") as work, ExitStack() as stack:
        wire = stack.enter_context(Wire(contract, Path(work)))
        log = Path(work) / "engine.log"
        server = stack.enter_context(
            Server(
                engine, subject.target, log=log, max_model_len=2048, dtype="float32" if engine.platform == "cpu" else "auto",
                args=wire.arguments(), env=wire.environment(), ui=ui,
            )
        )  # fmt: skip
        backend = VllmBackend(server, wire, subject.target, contract.target.hidden_size, None, 0)
        stack.callback(backend.close)
        for row in rows:
            boundary = min(row.boundary, row.tokens - 1)
            item = Item(row.row_id, np.asarray(row.token_ids, dtype=np.int32), boundary)
            states = backend.compute([item])[0]
            for b, k in enumerate(ids):
                worst[k] = max(worst[k], distance(states.aux[:, b].float(), row.streams[k][: states.tokens].float()))
    return worst
