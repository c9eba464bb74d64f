"""From log to line, on a made-up engine: every way to build a message, every way that logs garble it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trace_engine import line_of, write_engine

from draftsmith.engine.reader.source import FolderSource
from draftsmith.engine.trace import Explanation, explain
from draftsmith.engine.trace_index import Index

GATE = "eagle3 is only supported for ['llama', 'qwen'] models. Got self.target.kind='kimi_k2'"
PYDANTIC = f"""pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig
  Value error, {GATE} [type=value_error, input_value=ArgsKwargs((), {{'model': 1}}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error"""
SECONDARY = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(tmp_path_factory.mktemp("site"))


def ask(log: str, site: Path) -> Explanation:
    found = explain(log, Index(FolderSource(site), "vllm"))
    assert found is not None
    return found


def traceback(error: str, *frames: str) -> str:
    rows = ["Traceback (most recent call last):"]
    for frame in frames or ('"/usr/lib/python3.12/asyncio/runners.py", line 195, in run',):
        rows.append(f"  File {frame}")
    return "\n".join([*rows, error])


@pytest.mark.parametrize(
    ("error", "file", "raised", "function", "values"),
    [
        (f"ValueError: {GATE}", "vllm/config.py", "raise ValueError(", "SpeculativeConfig._verify",
         {"self.method": "eagle3", "ALLOWED": "['llama', 'qwen']", "self.target.kind": "'kimi_k2'"}),
        ("ValueError: count must be given for eagle3 and 7", "vllm/config.py", 'raise ValueError("count',
         "SpeculativeConfig._verify", {"self.method": "eagle3", "self.n": "7"}),
        ("RuntimeError: Could not place the weights of fc because 'x'", "vllm/worker.py", "raise RuntimeError(msg)",
         "load", {"item.name": "fc", "e": "'x'"}),
        ("RuntimeError: Could not place the weights of fc.bias ", "vllm/worker.py", "raise RuntimeError(msg)",
         "load", {"item.name": "fc.bias"}),
        ("AssertionError: Expected 3 weights in the folder, found 2", "vllm/worker.py", "assert size", "load",
         {"size": "3", "len(weights)": "2"}),
        ("TypeError: Loader gguf has no way to read the parts", "vllm/worker.py", "raise err", "load", {"name": "gguf"}),
        ("vllm.worker.ShapeError: The tensor wants 8 rows and the file gives 9 rows", "vllm/worker.py",
         "super().__init__", "ShapeError.__init__", {"wanted": "8", "got": "9"}),
        ("ERROR 11-30 16:05:38 [worker.py:28] The loader of main lost 4 of its parts", "vllm/worker.py",
         "logger.error", "load", {"name": "main", "size": "4"}),
    ],
)  # fmt: skip
def test_the_line_and_its_values(
    site: Path, error: str, file: str, raised: str, function: str, values: dict[str, str]
) -> None:
    log = error if error.startswith("ERROR") else traceback(error)
    found = ask(log, site)
    assert found.place is not None
    assert (found.place.file, found.place.line) == (file, line_of(site, file, raised))
    assert found.place.function == function
    assert dict(found.place.values) == values


def test_the_conditions_around_the_line(site: Path) -> None:
    found = ask(traceback(f"ValueError: {GATE}"), site)
    assert found.around is not None
    assert [(g.kind, g.text) for g in found.around.guards] == [
        ("if", "self.method == 'eagle3' and self.target"),
        ("if", "not any((w in self.target.kind for w in ALLOWED))"),
    ]
    found = ask(traceback("ValueError: count must be given for eagle3 and 7"), site)
    assert found.around is not None
    assert [(g.kind, g.text) for g in found.around.guards][1:] == [
        ("not", "not any((w in self.target.kind for w in ALLOWED))"),
        ("if", "self.count is None"),
    ]
    found = ask(traceback("RuntimeError: Could not place the weights of fc "), site)
    assert found.around is not None
    assert [g.kind for g in found.around.guards] == ["for", "except"]
    assert found.around.guards[1].text == "KeyError"
    found = ask("AssertionError: Expected 3 weights in the folder, found 2", site)
    assert found.around is not None and found.around.guards[-1].text == "size == len(weights)"


def test_the_lines_shown_hold_the_statement(site: Path) -> None:
    found = ask(traceback(f"ValueError: {GATE}"), site)
    text = "\n".join(row for _, row in found.lines)
    assert "raise ValueError(" in text and "Got {self.target.kind=}" in text


def interleaved() -> str:
    """Two workers, the core and the front end write at once, in colours; the root is in the first worker."""
    worker = traceback("RuntimeError: Could not place the weights of fc because 'x'").split("\n")
    rows = ["\x1b[1;36m(APIServer pid=1)\x1b[0;0m INFO 11-30 16:05:30 [api.py:1] starting"]
    for row in worker:
        rows.append(f"\x1b[1;36m(Worker_TP0 pid=3)\x1b[0;0m ERROR 11-30 16:05:38 [exec.py:9] {row}")
        rows.append("\x1b[1;36m(Worker_TP1 pid=4)\x1b[0;0m INFO 11-30 16:05:38 [cuda.py:3] using a backend")
        rows.append("(EngineCore_0 pid=2) WARNING 11-30 16:05:38 [shm.py:8] no message for 60 seconds")
    for row in traceback("Exception: WorkerProc initialization failed due to an exception").split("\n"):
        rows.append(f"(EngineCore_0 pid=2) ERROR 11-30 16:05:39 [core.py:866] {row}")
    for row in traceback(SECONDARY).split("\n"):
        rows.append(f"(APIServer pid=1) {row}")
    return "\n".join(rows)


@pytest.mark.parametrize(
    "garble",
    [
        lambda s: s,
        lambda s: s.replace("\n", "\r\n"),
        lambda s: "\n".join(f"vllm-1  | {row}" for row in s.split("\n")),
        lambda s: "\n".join(f"2026-11-30T16:05:38.123456789Z {row}" for row in s.split("\n")),
        lambda s: "\n".join(f"2026-11-30T16:05:38.1+01:00 stderr F {row}" for row in s.split("\n")),
        lambda s: s[s.index("Worker_TP0") - 12 :],
        lambda s: s + "\n\n[rank0]:[W1130 16:05:40 ProcessGroup.cpp:1] Warning: destroy_process_group() was not called",
    ],
)
def test_the_root_is_found_in_the_noise(site: Path, garble) -> None:  # type: ignore[no-untyped-def]
    found = ask(garble(interleaved()), site)
    assert found.place is not None and found.place.line == line_of(site, "vllm/worker.py", "raise RuntimeError(msg)")
    assert found.error.process == "Worker_TP0 3"
    assert "WorkerProc initialization failed" not in found.error.message


def test_pydantic_is_unwrapped(site: Path) -> None:
    found = ask(traceback(PYDANTIC), site)
    assert found.place is not None and found.place.line == line_of(site, "vllm/config.py", "raise ValueError(")
    assert found.error.type == "ValueError" and found.error.wrapped == "ValidationError for SpeculativeConfig"


def test_a_wrapped_error_is_not_where_its_frames_end(site: Path) -> None:
    log = traceback(
        PYDANTIC,
        '"/venv/lib/python3.12/site-packages/vllm/worker.py", line 3, in create\n    logger = logging.getLogger(__name__)',
        '"/venv/lib/python3.12/site-packages/pydantic/_internal/_dataclasses.py", line 121, in __init__\n    s.validate()',
    )
    found = ask(log, site)
    assert found.place is not None and found.place.line == line_of(site, "vllm/config.py", "raise ValueError(")


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_tail_of_a_few_lines_is_enough(site: Path, keep: int) -> None:
    rows = [f"(APIServer pid=7) {row}" for row in traceback(PYDANTIC).split("\n")][:-1]
    found = ask("\n".join(rows[-keep:]), site)
    assert found.place is not None and found.place.line == line_of(site, "vllm/config.py", "raise ValueError(")


@pytest.mark.parametrize("keep", [40, 60, 75])
def test_a_message_that_breaks_off_is_still_found(site: Path, keep: int) -> None:
    found = ask(traceback(f"ValueError: {GATE[:keep]}"), site)
    assert found.place is not None and found.place.line == line_of(site, "vllm/config.py", "raise ValueError(")


def test_the_cause_of_a_chain_is_the_root(site: Path) -> None:
    log = "\n".join(
        [
            traceback("RuntimeError: Could not place the weights of fc because 'x'"),
            "",
            "The above exception was the direct cause of the following exception:",
            "",
            traceback("ValueError: something that nobody knows"),
        ]
    )
    found = ask(log, site)
    assert found.place is not None and found.place.line == line_of(site, "vllm/worker.py", "raise RuntimeError(msg)")
    assert [c.message for c in found.caused] == ["something that nobody knows"]


def test_a_frame_outside_leads_to_the_engines_deepest_line(site: Path) -> None:
    at = line_of(site, "vllm/worker.py", "return tensor @ other")
    log = traceback(
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x128 and 192x64)",
        f'"/opt/venv/lib/python3.12/site-packages/vllm/worker.py", line {at}, in run\n    return tensor @ other',
        '"/opt/venv/lib/python3.12/site-packages/torch/nn/functional.py", line 7, in linear\n    return f(x)',
    )
    found = ask(log, site)
    assert found.place is not None and (found.place.file, found.place.line) == ("vllm/worker.py", at)
    assert found.around is not None and found.around.function == "run"
    assert "torch/nn/functional.py:7" in found.notes[0]


def test_what_the_interpreter_raises_is_at_its_line(site: Path) -> None:
    at = line_of(site, "vllm/worker.py", "item.copy()")
    log = traceback(
        "AttributeError: 'list' object has no attribute 'copi'",
        f'"/venv/lib/python3.12/site-packages/vllm/worker.py", line {at}, in load\n    item.copy()',
    )
    found = ask(log, site)
    assert found.place is not None and (found.place.line, found.place.kind) == (at, "call")
    assert found.around is not None and [g.kind for g in found.around.guards] == ["for"]


def test_a_frame_of_another_release_is_found_by_its_code(site: Path) -> None:
    log = traceback(
        "RuntimeError: Could not place the weights of fc ",
        '"/usr/local/lib/python3.12/dist-packages/vllm/worker.py", line 999, in load\n    raise RuntimeError(msg) from e',
    )
    found = ask(log, site)
    assert found.place is not None and found.place.line == line_of(site, "vllm/worker.py", "raise RuntimeError(msg)")


def test_equal_texts_are_told(site: Path) -> None:
    found = ask(traceback("NotImplementedError: Mode 7 is not available on this device"), site)
    assert found.place is not None and len(found.others) == 1
    assert {found.place.function, found.others[0].function} == {"twin_a", "twin_b"}
    assert "1 other place" in found.notes[-1]


def test_a_warning_that_was_survived_is_not_the_root(site: Path) -> None:
    rows = [
        f"WARNING 11-30 16:05:38 [a.py:1] {r}"
        for r in traceback("TypeError: Loader x has no way to read the parts").split("\n")
    ]
    found = ask("\n".join([*rows, traceback(f"ValueError: {GATE}")]), site)
    assert found.error.type == "ValueError"


def test_what_the_engine_does_not_say_has_no_place(site: Path) -> None:
    found = ask(traceback("ValueError: entirely unheard of words here"), site)
    assert found.place is None and "no line" in found.notes[0]


@pytest.mark.parametrize("log", ["", "\n\n", "INFO 11-30 16:05:38 [a.py:1] all is well\n", "\x00\x1b[31m"])
def test_a_log_without_error(site: Path, log: str) -> None:
    assert explain(log, Index(FolderSource(site), "vllm")) is None


def test_json_is_json(site: Path) -> None:
    value = json.loads(json.dumps(ask(traceback(PYDANTIC), site).to_json()))
    assert value["place"]["file"] == "vllm/config.py" and value["place"]["values"]["self.method"] == "eagle3"
    assert {"error", "place", "guards", "lines", "others", "caused", "notes"} <= set(value)
