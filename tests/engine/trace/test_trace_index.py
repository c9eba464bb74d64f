"""What is kept on disk, and that matching takes linear time and no wrong templates."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_engine import line_of, write_engine

from draftsmith.engine import trace_index
from draftsmith.engine.reader.source import FolderSource
from draftsmith.engine.trace import explain
from draftsmith.engine.trace_index import Index
from draftsmith.engine.trace_log import errors
from draftsmith.engine.trace_match import match
from draftsmith.engine.trace_templates import Hole, sites

LOG = "RuntimeError: Could not place the weights of fc because of x"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))
    return write_engine(tmp_path / "site")


def of(engine: Path) -> Index:
    return Index.of(FolderSource(engine), "vllm", "0.19.0")


def test_a_second_answer_parses_nothing(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = explain(LOG, of(engine))
    calls: list[str] = []
    monkeypatch.setattr(trace_index, "sites", lambda source, file: calls.append(file) or [])
    second = explain(LOG, of(engine))
    assert calls == []
    assert first is not None and second is not None and first.place == second.place is not None


def test_a_changed_file_is_parsed_again(engine: Path) -> None:
    explain(LOG, of(engine))
    file = engine / "vllm/worker.py"
    file.write_text("# one more line\n" + file.read_text())
    found = explain(LOG, of(engine))
    assert found is not None and found.place is not None
    assert found.place.line == line_of(engine, "vllm/worker.py", "raise RuntimeError(msg)")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"vllm/worker.py": 3}', '{"vllm/worker.py": ["1:1", [[1]]]}'])
def test_a_broken_cache_is_no_obstacle(engine: Path, text: str) -> None:
    index = of(engine)
    assert index.kept is not None
    index.kept.parent.mkdir(parents=True)
    index.kept.write_text(text)
    found = explain(LOG, of(engine))
    assert found is not None and found.place is not None


def test_a_file_that_does_not_parse_is_passed_over(engine: Path) -> None:
    (engine / "vllm/broken.py").write_text("def f(:\n    raise RuntimeError('Could not place the weights of')\n")
    found = explain(LOG, of(engine))
    assert found is not None and found.place is not None and found.place.file == "vllm/worker.py"


def test_matching_is_not_fooled_into_hours() -> None:
    template = tuple(part for n in range(30) for part in (Hole(f"x{n}"), " and "))
    started = time.perf_counter()
    match((*template, "the end of it"), "a and " * 20000)
    match(("Beginning here ", *template, "the end of it"), "Beginning here " + "b " * 50000, cut=True)
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    ("template", "message", "values"),
    [
        (("Got ", Hole("a"), " of ", Hole("b"), " files"), "Got 1 of 2 of 3 files", (("a", "1"), ("b", "2 of 3"))),
        (("value is ", Hole("x")), "value is", (("x", ""),)),
        (("Cannot read ", Hole("p"), "."), "Cannot read a.b.c.", (("p", "a.b.c"),)),
        (("two\n  lines of ", Hole("x")), "two lines of text", (("x", "text"),)),
    ],
)
def test_values(template: tuple[str | Hole, ...], message: str, values: tuple[tuple[str, str], ...]) -> None:
    found = match(template, message)
    assert found is not None and found.values == values and found.whole


@pytest.mark.parametrize("template", [(Hole("e"),), ("{}: ",), (Hole("a"), ": ", Hole("b")), ("12 345 678",)])
def test_a_template_without_words_fits_nothing(template: tuple[str | Hole, ...]) -> None:
    assert match(template, "anything: at all 12 345 678") is None


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=400))
def test_no_log_is_a_traceback_of_ours(text: str) -> None:
    for error in errors(text):
        assert isinstance(error.message, str)


PIECES = st.sampled_from(
    [
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in f',
        "    x = 1",
        "ValueError: bad",
        "(W pid=1) ",
        "ERROR 11-30 16:05:38 [a.py:1] ",
        "  Value error, no [type=value_error, input_value=1]",
        "1 validation error for X",
        "During handling of the above exception, another exception occurred:",
        "\n",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=25))
def test_any_order_of_a_logs_pieces_is_read(pieces: list[str]) -> None:
    errors("\n".join(pieces))
    errors("".join(pieces))


def test_every_way_to_write_a_message() -> None:
    source = """
def f(a, b, parser):
    raise ValueError("plain words here")
    raise ValueError("in {} and {x} and {0[k]}".format(a, x=b))
    raise ValueError(("sum of " + a) + f" and {b!r:>10}")
    raise ValueError("yes it is" if a else "no it is not")
    raise ValueError(" ".join(["joined", f"{a}", "words"]))
    raise ValueError(message=f"named {a}")
    parser.error(f"argument {a} is wrong")
    raise
    raise ValueError
    raise ValueError(a) from None
"""
    found = sites(source, "x.py")
    texts = [["".join(p if isinstance(p, str) else f"<{p.expr}>" for p in t) for t in s.templates] for s in found]
    assert texts == [
        ["plain words here"],
        ["in <a> and <b> and <a>"],
        ["sum of <a> and <b>"],
        ["yes it is", "no it is not"],
        ["joined <a> words"],
        ["named <a>"],
        ["argument <a> is wrong"],
        [],
        ["<a>"],
    ]
