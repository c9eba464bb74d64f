"""Recipes: unknown keys are refused with the nearest known one; values are checked with their place."""

import pytest

from draftsmith.errors import UserError
from draftsmith.recipe import STAGES, load_recipe, parse_recipe

GOOD = {"target": {"model": "m"}, "capture": {"prompts": ["p.jsonl"]}}


def test_defaults_fill_the_rest():
    recipe = parse_recipe(GOOD, "r")
    assert recipe.train.ttt_steps == 3 and recipe.bench.ways == ["drafter", "none", "ngram"]
    assert recipe.folder.name == "drafter"


@pytest.mark.parametrize(
    ("change", "says", "fix"),
    [
        ({"trian": {}}, "unknown key 'trian'", "did you mean 'train'"),
        ({"train": {"ttt_step": 3}}, "unknown key 'train.ttt_step'", "did you mean 'ttt_steps'"),
        ({"train": {"form": "x"}}, "unknown key 'train.form'", "'from'"),
        ({"bench": {"zzzz": 1}}, "unknown key 'bench.zzzz'", "known keys here"),
        ({"train": {"ttt_steps": 0}}, "train.ttt_steps is 0", "mend the value"),
        ({"extract": {"codec": "int4"}}, "extract.codec is 'int4'", "mend"),
        ({"target": {}}, "target.model is missing", "give target.model"),
    ],
)
def test_wrong_key_or_value_is_named(change, says, fix):
    with pytest.raises(UserError) as e:
        parse_recipe(GOOD | change, "r.yaml")
    assert says in e.value.what and fix in e.value.fix


def test_from_is_the_key_in_yaml(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("target: {model: m}\ncapture: {prompts: [p]}\ntrain: {from: old}\n")
    assert load_recipe(path).train.from_ == "old"


def test_overrides_lie_over_the_file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("target: {model: m}\ncapture: {prompts: [p]}\n")
    assert load_recipe(path, {"train.seed": 7}).train.seed == 7


@pytest.mark.parametrize("key", ["name.x", "target.model.x", "capture.prompts.x"])
def test_an_override_below_a_value_is_refused(tmp_path, key):
    path = tmp_path / "r.yaml"
    path.write_text("name: a\ntarget: {model: m}\ncapture: {prompts: [p]}\n")
    with pytest.raises(UserError, match="not a section") as e:
        load_recipe(path, {key: 1})
    assert "recipe --keys" in e.value.fix


def test_a_heading_with_nothing_below_it_takes_its_defaults(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("target: {model: m}\ncapture: {prompts: [p]}\nvocab:\n  # size: 100\ntrain:\n")
    assert load_recipe(path).vocab.min_coverage == 0.9 and load_recipe(path).vocab.size is None
    assert load_recipe(path, {"train.seed": 3}).train.seed == 3
    path.write_text("target:\ncapture: {prompts: [p]}\n")
    with pytest.raises(UserError, match="target is missing"):
        load_recipe(path)


@pytest.mark.parametrize("text", ["[1, 2", "- a\n", "just text"])
def test_broken_yaml(tmp_path, text):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(UserError):
        load_recipe(path)


def test_missing_recipe(tmp_path):
    with pytest.raises(UserError, match="no recipe at"):
        load_recipe(tmp_path / "no.yaml")
    with pytest.raises(UserError, match="is a folder, not a recipe"):
        load_recipe(tmp_path)


def test_packaged_recipes_are_valid():
    from importlib.resources import files

    import yaml

    for name in ("demo", "quick", "first", "gemma3"):
        text = (files("draftsmith") / "recipes" / f"{name}.yaml").read_text()
        assert parse_recipe(yaml.safe_load(text), name).name == name
    assert STAGES[0] == "capture" and STAGES[-1] == "report"
