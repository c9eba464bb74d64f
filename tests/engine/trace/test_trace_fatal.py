"""Ends that no exception tells, and logs that other loggers wrote."""

from __future__ import annotations

import json

import pytest

from draftsmith.engine.trace_advice import advice_for
from draftsmith.engine.trace_log import errors

SEGFAULT = """INFO 11-30 17:46:01 [core.py:1] ready
!!!!!!! Segfault encountered !!!!!!!
Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/opt/x/site-packages/vllm/v1/worker/gpu_model_runner.py", line 3502 in _bookkeeping_sync
  File "/opt/x/site-packages/vllm/v1/worker/gpu_model_runner.py", line 4100 in execute_model

Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
Extension modules: numpy.core._multiarray_umath (total: 1)
"""
TRACE = """Traceback (most recent call last):
  File "/opt/x/site-packages/vllm/config/vllm.py", line 12, in check
    raise ValueError("no such kind")
ValueError: no such kind"""


def test_a_fatal_error_of_the_interpreter_ends_at_its_deepest_line() -> None:
    first = errors(SEGFAULT)[0]
    assert (first.type, first.message) == ("Fatal Python error", "Segmentation fault")
    assert [f.function for f in first.frames] == ["execute_model", "_bookkeeping_sync"]
    assert first.frames[-1].line == 3502


@pytest.mark.parametrize(("line", "what"), [
    ("./serve.sh: line 3: 12345 Killed                  vllm serve m", "Killed"),
    ("12345 Killed", "Killed"),
    ("Killed", "Killed"),
    ("Segmentation fault (core dumped)", "Segmentation fault"),
    ("run.sh: line 9:  77 Aborted                 (core dumped) python x.py", "Aborted"),
])  # fmt: skip
def test_what_a_shell_says_of_a_dead_process(line: str, what: str) -> None:
    first = errors(f"INFO 11-30 17:46:01 [core.py:1] loading\n{line}\n")[0]
    assert (first.type, first.message, first.first) == ("signal", what, 2)


def test_an_error_of_the_engine_comes_before_the_signal_that_followed() -> None:
    found = errors(TRACE + "\nKilled\n")
    assert [e.message for e in found] == ["no such kind", "Killed"]


@pytest.mark.parametrize("line", ["Killed the old worker", "INFO Aborted request 3", "3 Killed requests", "killed"])
def test_words_of_a_sentence_are_no_signal(line: str) -> None:
    assert errors(line + "\n") == []


def test_a_killed_process_is_told_where_to_look() -> None:
    advice = advice_for("Killed", "")
    assert advice is not None and "memory" in advice["fix"] and "pair.memory" in advice["checks"]


@pytest.mark.parametrize("record", [
    {"level": "ERROR", "message": "ValueError: no such kind"},
    {"severity": "error", "msg": "startup failed", "exc_info": TRACE},
    {"time": 3, "levelname": "CRITICAL", "event": "x", "traceback": TRACE, "pid": 4},
])  # fmt: skip
def test_json_records_are_read(record: dict[str, object]) -> None:
    log = "\n".join([json.dumps({"level": "INFO", "message": "ready"}), json.dumps(record), "{not json", "{}"])
    first = errors(log)[0]
    assert (first.type, first.message, first.first) == ("ValueError", "no such kind", 2)
    assert bool(first.frames) is (TRACE in record.values())


def test_headers_without_frames_do_not_hide_the_exception() -> None:
    first = errors("Traceback (most recent call last):\n" * 50 + "ValueError: no such kind\n")[0]
    assert (first.type, first.message) == ("ValueError", "no such kind")


def test_the_frame_of_an_exception_group_is_no_part_of_a_message() -> None:
    log = "\n".join([
        "  + Exception Group Traceback (most recent call last):",
        "  | ExceptionGroup: two (1 sub-exception)",
        "  +-+---------------- 1 ----------------",
        *("    | " + line for line in TRACE.split("\n")),
        "    +------------------------------------",
    ])  # fmt: skip
    assert [e.message for e in errors(log) if e.type == "ValueError"] == ["no such kind"]
