"""The contract: decided fields are compared, undecided ones are not; a broken file gives one block."""

import json

import pytest

from draftsmith.contract import Contract, TargetFacts, compare, require_agreement
from draftsmith.errors import UserError


def make(**changes):
    facts = TargetFacts(
        name="t", config_hash="h", architecture="LlamaForCausalLM", model_type="llama", outer_model_type="llama",
        hidden_size=64, num_layers=8, vocab_size=512,
    )  # fmt: skip
    return Contract(target=facts).with_(**changes)


def test_round_trip(tmp_path):
    contract = make(aux_layer_ids=[2, 4, 5], rope={"rope_theta": 1e4, "rope_type": "default"})
    contract.save(tmp_path)
    assert Contract.load(tmp_path) == contract


def test_undecided_fields_do_not_disagree():
    assert compare(make(), make(aux_layer_ids=[2, 4, 5])) == []


def test_disagreement_names_field_and_both_values():
    found = compare(make(aux_layer_ids=[2, 4, 5]), make(aux_layer_ids=[1, 3, 4]))
    assert [(d.field, d.ours, d.theirs) for d in found] == [("aux_layer_ids", [2, 4, 5], [1, 3, 4])]
    with pytest.raises(UserError, match=r"aux_layer_ids: \[2, 4, 5\] in states, \[1, 3, 4\] in drafter"):
        require_agreement(make(aux_layer_ids=[2, 4, 5]), make(aux_layer_ids=[1, 3, 4]), "states", "drafter")


def test_name_alone_is_no_disagreement():
    other = make().model_copy(deep=True)
    other.target.name = "elsewhere"
    require_agreement(make(), other, "a", "b")


def test_rope_is_compared_as_a_whole():
    found = compare(make(rope={"rope_theta": 1e4}), make(rope={"rope_theta": 1e6}))
    assert [d.field for d in found] == ["rope"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read"),
        (json.dumps({"format": 99}), "format 99"),
        (json.dumps({"target": 3}), "field target"),
        (json.dumps([1]), "whole file"),
    ],
)
def test_broken_file_is_one_block(tmp_path, text, says):
    (tmp_path / "contract.json").write_text(text)
    with pytest.raises(UserError, match=says):
        Contract.load(tmp_path)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="is missing"):
        Contract.load(tmp_path)
