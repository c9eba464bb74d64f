"""Counters off a metrics page: summed, subtracted, and never over a restart."""

from __future__ import annotations

import pytest

from draftsmith.engine.metrics import CounterResetError, Counters, parse, read_counters
from draftsmith.errors import UserError

PAGE = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a \\"b\\", {c}"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="x"} 5.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 45.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 2.0
vllm:generation_tokens_total{engine="0"} 1.5e+02
vllm:generation_tokens_created{engine="0"} 1.7e+09
vllm:num_preemptions_total 0.0
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 12.0
something_odd NaN
"""


def test_a_page_is_read_and_summed_over_engines() -> None:
    counters = read_counters(PAGE)
    assert (counters.drafts, counters.drafted, counters.accepted, counters.tokens) == (15, 45, 9, 150)
    assert counters.accepted_per_position == [6, 3]
    assert counters.speculative
    assert counters.length == 1.6 and counters.rates == [0.4, 0.2]
    first = parse(PAGE)[0]
    assert first.labels == {"engine": "0", "model_name": 'a \\"b\\", {c}'}


def test_a_window_is_a_difference_and_windows_add() -> None:
    before, after = Counters("vllm", 10, 30, 5, [4, 1], 100), Counters("vllm", 25, 75, 12, [9, 2, 1], 190)
    window = after.since(before)
    assert (window.drafts, window.accepted_per_position, window.tokens) == (15, [5, 1, 1], 90)
    assert window.plus(before) == after
    assert Counters.from_dict(window.as_dict()) == Counters("vllm", 15, 45, 7, [5, 1, 1], 90, speculative=True)


def test_a_restart_is_noticed_by_a_fall_and_by_a_later_birth() -> None:
    before = read_counters(PAGE)
    with pytest.raises(CounterResetError, match="drafts"):
        read_counters(PAGE.replace("} 10.0", "} 1.0")).since(before)
    # counters that have overtaken the old ones look like progress; their birth tells
    overtaken = PAGE.replace("1.5e+02", "9.0e+02").replace("1.7e+09", "1.8e+09")
    with pytest.raises(CounterResetError, match="created"):
        read_counters(overtaken).since(before)


def test_a_server_without_speculation() -> None:
    counters = read_counters('vllm:generation_tokens_total{engine="0"} 7.0\n')
    assert (counters.tokens, counters.speculative, counters.length) == (7, False, 1.0)


def test_a_page_of_something_else_is_refused() -> None:
    with pytest.raises(UserError, match="neither vLLM's nor SGLang's"):
        read_counters("go_gc_duration_seconds 1\n")
