"""Ids from messages: always a list of int, the template's refusals as reasons, hashes that hear a changed template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from draftsmith.errors import UserError
from draftsmith.target.tokenizer import (
    RenderError,
    TargetTokenizer,
    as_ids,
    chat_template,
    chat_template_hash,
    stop_ids,
    tokenizer_hash,
)

Maker = Callable[..., Path]


def test_render_is_the_template_as_ids(tiny_target: Path) -> None:
    tok = TargetTokenizer.load(tiny_target)
    ids = tok.render([{"role": "user", "content": "Hé 12"}])
    assert isinstance(ids, list)
    assert all(type(i) is int for i in ids)
    assert tok.decode(ids) == "<|im_start|>user\nHé 12<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1


def test_as_ids_takes_every_form_and_refuses_the_rest() -> None:
    for value in ([1, 2], {"input_ids": [1, 2]}, {"input_ids": [[1, 2]]}, np.array([[1, 2]]), (1, 2)):
        assert as_ids(value) == [1, 2]
    for value in (["a"], {"input_ids": [[1], [2]]}, [True]):
        with pytest.raises(TypeError):
            as_ids(value)


def test_a_refusing_template_gives_its_reason(byte_tokenizer: Maker) -> None:
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('must start with user') }}{% endif %}x"
    tok = TargetTokenizer.load(byte_tokenizer(template=template))
    with pytest.raises(RenderError, match="must start with user"):
        tok.render([{"role": "assistant", "content": "hi"}])


def test_tool_arguments_as_string_or_object_render_alike(byte_tokenizer: Maker) -> None:
    template = (
        "{% for m in messages %}{{ m['role'] }}{% for c in m['tool_calls'] or [] %}"
        "{% for k, v in c['function']['arguments'] | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
    )
    tok = TargetTokenizer.load(byte_tokenizer(template=template))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    text = {**call, "function": {"name": "f", "arguments": json.dumps({"a": 1})}}
    one, two = ([{"role": "assistant", "content": "", "tool_calls": [c]}] for c in (call, text))
    assert tok.decode(tok.render(one)) == tok.decode(tok.render(two)) == "assistanta=1;"


def test_thinking_reaches_the_template(byte_tokenizer: Maker) -> None:
    template = "{% if enable_thinking is defined %}{{ 'on' if enable_thinking else 'off' }}{% else %}unset{% endif %}"
    tok = TargetTokenizer.load(byte_tokenizer(template=template))
    said = [tok.decode(tok.render([{"role": "user", "content": "x"}], mode)) for mode in ("default", "on", "off")]
    assert said == ["unset", "on", "off"]


def test_no_template_is_refused_with_the_way_out(byte_tokenizer: Maker) -> None:
    tok = TargetTokenizer.load(byte_tokenizer(template=None))
    with pytest.raises(UserError) as e:
        tok.require_template()
    assert "capture.mode: raw" in e.value.fix


def test_remote_code_is_not_run_unless_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}, "tokenizer_class": "X"})
    )
    (tmp_path / "tokenization_x.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(UserError, match="Python code of the model's own"):
        TargetTokenizer.load(tmp_path)


def test_hashes_hear_template_and_vocabulary_apart(byte_tokenizer: Maker) -> None:
    a, b, c = byte_tokenizer("a"), byte_tokenizer("b", template="x"), byte_tokenizer("c", vocab_size=321)
    assert tokenizer_hash(a) == tokenizer_hash(b) != tokenizer_hash(c)
    assert chat_template_hash(a) == chat_template_hash(c) != chat_template_hash(b)


def test_a_template_file_wins_over_the_config_and_named_ones_use_default(byte_tokenizer: Maker) -> None:
    folder = byte_tokenizer()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert chat_template(folder) == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert chat_template(folder) == "file"
    assert TargetTokenizer.load(folder).inner.chat_template == "file"


def test_stops_specials_and_the_end_of_a_turn(tiny_target: Path) -> None:
    tok = TargetTokenizer.load(tiny_target)
    assert stop_ids(tiny_target) == [0, 2]
    assert tok.special_ids == [0, 1, 2, 3, 4]
    assert tok.end_of_turn_ids == [2]
