"""D10, D15: names of roles and keys (speculators#907), images as string or list (SenseNova-SI#31)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from capture_support import as_target, capture

from draftsmith.capture.prompts import Dropped, Prompt, Rules, read_record
from draftsmith.errors import UserError


def test_a_model_name_as_role_is_not_dropped_in_silence(tmp_path: Path, byte_tokenizer: Callable[..., Path]) -> None:
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "laguna_s", "content": "b"}]}
    with pytest.raises(UserError, match="role 'laguna_s' is not known"):
        capture(tmp_path, as_target(byte_tokenizer()), [record])


@pytest.mark.parametrize(
    "talk",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]},
        {"conversation": [{"from": "user", "value": "a"}, {"from": "chatgpt", "value": "b"}]},
        {"dialog": [{"role": "Human", "content": "a"}, {"role": "Assistant", "content": "b"}]},
    ],
)
def test_keys_and_roles_of_every_tribe(talk: dict[str, Any]) -> None:
    found = read_record(talk, "s", Rules(), "f:1")
    assert isinstance(found, Prompt)
    assert [m["role"] for m in found.messages] == ["user", "assistant"]
    assert found.points == [1]


IMAGES: list[dict[str, Any]] = [
    {"image": "a.png", "conversations": [{"from": "human", "value": "<image> what?"}]},
    {"image": ["a.png", "b.png"], "conversations": [{"from": "human", "value": "what?"}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {}}]}
        ]
    },
    {"messages": [{"role": "user", "content": [{"type": "input_image"}, {"type": "text", "text": "what?"}]}]},
]


@pytest.mark.parametrize("record", IMAGES)
def test_images_are_refused_by_reason_unless_dropped(record: dict[str, Any]) -> None:
    assert read_record(record, "s", Rules(), "f:1") == Dropped("has images")
    found = read_record(record, "s", Rules(drop_images=True), "f:1")
    assert isinstance(found, Prompt)
    assert "what?" in found.messages[0]["content"]
