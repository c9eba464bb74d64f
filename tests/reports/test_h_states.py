"""Public reports about hidden states (H01, H03, H04, H05): each would be seen here, before training."""

from pathlib import Path

import pytest
import torch

from draftsmith.contract import Contract
from draftsmith.errors import UserError
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.source import finite
from draftsmith.extract.stage import _require_few_nan
from draftsmith.extract.states import States
from draftsmith.extract.store import StateWriter
from made_states import facts


def contract() -> Contract:
    return facts(8, (0, 1, 2), layers=4, vocab=9)


def states(tokens: int = 5, aux: tuple[int, ...] | None = None) -> States:
    return States(torch.arange(tokens), 1, torch.zeros(aux or (tokens, 3, 8)), 0, torch.zeros(tokens, 8))


def test_h01_fewer_states_than_tokens_are_refused(tmp_path: Path) -> None:
    """vllm#44485: with prefix caching the engine returned states for a part of the prompt only."""
    with (
        StateWriter(tmp_path, contract(), make_codec("bf16")) as w,
        pytest.raises(ValueError, match=r"\(4, 3, 8\), want \[5 tokens"),
    ):
        w.add("r", states(aux=(4, 3, 8)))


def test_h03_nan_states_are_counted_and_stop_above_one_percent() -> None:
    """speculators#615: training went on with NaN states."""
    bad = states()
    bad.aux[2, 1, 3] = float("nan")
    assert finite(states()) and not finite(bad)
    _require_few_nan(1, 100)
    _require_few_nan(3, 50)  # too early to tell
    for args, last in (((2, 100), False), ((1, 50), True)):
        with pytest.raises(UserError, match="NaN or infinite"):
            _require_few_nan(*args, last=last)


def test_h04_swapped_axes_are_refused_also_where_sizes_are_equal(tmp_path: Path) -> None:
    """A blog and the documentation disagreed on [tokens, layers, hidden]. With as many layers as tokens a shape cannot
    tell, so the writer takes token ids along and the self-check compares values; with other sizes the shape is enough."""
    with StateWriter(tmp_path, contract(), make_codec("bf16")) as w:
        with pytest.raises(ValueError, match="want"):
            w.add("r", states(aux=(3, 5, 8)))
        with pytest.raises(ValueError, match="holds 5 layers, want 3"):
            w.add("r", states(aux=(5, 5, 8)))


def test_h05_a_folder_that_cannot_be_written_stops_at_the_start(tmp_path: Path) -> None:
    """speculators#743: the folder was never created, every save failed with a warning, exit 0."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="states cannot be written"):
        StateWriter(tmp_path / "file" / "states", contract(), make_codec("bf16"))
    StateWriter(tmp_path / "new" / "deep", contract(), make_codec("bf16")).close()
    assert (tmp_path / "new" / "deep" / "store.json").is_file()
