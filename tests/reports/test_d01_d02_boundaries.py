"""D01, D02: masks from template marks or regexes (Megatron-Bridge#3359, ModelOpt#1965, speculators#210, #346).

The boundary is where the server's prompt ids end: no mark in the template, no regex, no turn's end token is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from capture_support import as_target, capture
from stub_server import Stub

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "BODY{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BODIES = {
    "no mark": "{{ m['content'] }}",
    "mark": "{% generation %}{{ m['content'] }}{% endgeneration %}",
    "mark with whitespace control": "{%- generation -%}{{ m['content'] }}{%- endgeneration -%}",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_the_boundary_does_not_hang_on_marks(tmp_path: Path, byte_tokenizer: Callable[..., Path], body: str) -> None:
    target = as_target(byte_tokenizer(template=CHATML.replace("BODY", body)))
    rows, _, _ = capture(tmp_path, target, ["end of turn?", "assistant\n", "x"])
    stub = Stub(target)
    for row in rows:
        assert row.token_ids[row.boundary :] == [*stub.encode(row.answer_text), stub.end]
        assert row.token_ids[: row.boundary][-11:] == [stub.start, *stub.encode("assistant\n")]
