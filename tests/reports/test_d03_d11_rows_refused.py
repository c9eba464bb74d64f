"""D03, D11: rows that the template refuses (speculators#801), and everything skipped without a word (ModelOpt#2172)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from capture_support import as_target, capture

from draftsmith.errors import UserError

STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GOOD = {"role": "user", "content": "hi"}


def with_system(i: int) -> dict[str, object]:
    return {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{i}"}]}


def test_refused_rows_are_counted_by_the_templates_reason(tmp_path: Path, byte_tokenizer: Callable[..., Path]) -> None:
    target = as_target(byte_tokenizer(template=STRICT))
    records = [{"prompt": f"p{i}"} for i in range(8)]
    records += [with_system(0), {"messages": [{"role": "assistant", "content": "a"}, GOOD]}, {"messages": []}]
    rows, result, ui = capture(tmp_path, target, records)
    assert len(rows) == 8
    assert result["answers_given_up"] == {"the template refuses it (System role not supported)": 1}
    assert result["prompts_dropped"] == {"starts with the assistant": 1, "no user turn": 1}
    assert any("dropped 2: 1 starts with the assistant, 1 no user turn" in n for n in ui.notes)


def test_more_than_the_set_share_stops(tmp_path: Path, byte_tokenizer: Callable[..., Path]) -> None:
    target = as_target(byte_tokenizer(template=STRICT))
    records = [{"prompt": "p"}, *(with_system(i) for i in range(5))]
    with pytest.raises(UserError, match="kept 1, dropped 5: 5 the template refuses it"):
        capture(tmp_path, target, records, max_dropped=0.5)


def test_no_rows_at_all_is_always_an_error(tmp_path: Path, byte_tokenizer: Callable[..., Path]) -> None:
    target = as_target(byte_tokenizer(template=STRICT))
    with pytest.raises(UserError, match="kept 0"):
        capture(tmp_path, target, [with_system(i) for i in range(3)], max_dropped=1.0)
