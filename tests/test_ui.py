"""Progress as lines: nothing is said that is not known."""

from __future__ import annotations

import pytest

from draftsmith.ui import _Line


def test_no_time_is_left_to_tell_before_anything_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    line = _Line("capture", 16, "answers", every=0)
    line.advance(0, "120 tokens of 16 answers in the making")
    told = capsys.readouterr().err
    assert "0 of 16 answers" in told and "120 tokens" in told and " s left" not in told
    line.advance(4)
    assert " s left" in capsys.readouterr().err
