"""SGLang from made-up sources: hooks, delegation, the meaning of layer ids per class, drafters, where ids are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_trees import write

from draftsmith.engine.reader import EngineFacts, read_engine
from draftsmith.engine.reader.sglang import captured, hook_of, id_reads

ALWAYS = """
from typing import Optional
class LlamaForCausalLM:
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        if not self.pp_group.is_last_rank:
            return
        if layer_ids is None:
            num_layers = self.config.num_hidden_layers
            self.model.layers_to_capture = [2, num_layers // 2, num_layers - 3]
        else:
            self.model.layers_to_capture = [val + 1 for val in layer_ids]
class Quiet:
    pass
EntryClass = [LlamaForCausalLM, Quiet]
"""
IF_FIRST_IS_ONE = """
class DeepseekForCausalLM:
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        if layer_ids and layer_ids[0] == 1:
            self.model.layers_to_capture = [val + 1 for val in layer_ids]
        else:
            self.model.layers_to_capture = list(layer_ids)
class HeirForCausalLM(DeepseekForCausalLM):
    pass
EntryClass = [DeepseekForCausalLM, HeirForCausalLM]
"""
UNLESS_LAST = """
class GptForCausalLM:
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        num_layers = self.config.num_hidden_layers
        if layer_ids and max(layer_ids) == num_layers:
            layers_to_capture = list(layer_ids)
        else:
            layers_to_capture = [val + 1 for val in layer_ids]
        self.model.set_eagle3_layers_to_capture(layers_to_capture)
EntryClass = GptForCausalLM
"""
WRAPPERS = """
from sglang.srt.models.plain import PlainForCausalLM
class KimiForConditionalGeneration:
    def __init__(self, config):
        from sglang.srt.models.deepseek import DeepseekForCausalLM
        self.language_model = DeepseekForCausalLM(config.text_config)
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        if not hasattr(self.language_model, "set_eagle3_layers_to_capture"):
            raise AttributeError("no")
        self.language_model.set_eagle3_layers_to_capture(layer_ids)
class EmptyForConditionalGeneration(KimiForConditionalGeneration):
    def __init__(self, config):
        self.language_model = PlainForCausalLM(config)
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        self.language_model.set_eagle3_layers_to_capture(layer_ids)
EntryClass = [KimiForConditionalGeneration, EmptyForConditionalGeneration]
"""
FILES = {
    "sglang/version.py": '__version__ = "0.5.9"\n',
    "sglang/srt/models/__init__.py": "",
    "sglang/srt/models/llama.py": ALWAYS,
    "sglang/srt/models/deepseek.py": IF_FIRST_IS_ONE,
    "sglang/srt/models/gpt.py": UNLESS_LAST,
    "sglang/srt/models/wrappers.py": WRAPPERS,
    "sglang/srt/models/plain.py": "class PlainForCausalLM:\n    pass\nEntryClass = [\n    PlainForCausalLM,  # QuotedForCausalLM\n]\n",
    "sglang/srt/models/transformers.py": "class TransformersForCausalLM:\n    pass\nEntryClass = TransformersForCausalLM\n",
    "sglang/srt/models/llama_eagle3.py": "class LlamaForCausalLMEagle3:\n    pass\nEntryClass = [LlamaForCausalLMEagle3]\n",
    "sglang/srt/model_executor/model_runner.py": (
        "class ModelRunner:\n    def start(self, draft_model_config):\n"
        "        eagle_config = getattr(draft_model_config.hf_config, 'eagle_config', None)\n"
        "        ids = eagle_config['eagle_aux_hidden_state_layer_ids']\n"
        "        self.model.set_eagle3_layers_to_capture(ids)\n"
    ),
}


@pytest.fixture
def facts(tmp_path: Path) -> EngineFacts:
    return read_engine(write(tmp_path, FILES))


def target(architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": "x"}


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", True),
        ("HeirForCausalLM", True),
        ("KimiForConditionalGeneration", True),
        ("EmptyForConditionalGeneration", False),
        ("PlainForCausalLM", False),
        ("QuotedForCausalLM", False),
        ("UnheardOfForCausalLM", False),
    ],
)
def test_who_has_the_hook(facts: EngineFacts, architecture: str, expected: bool) -> None:
    assert hook_of(facts, target(architecture)).supports is expected


def test_reasons_name_the_class_inside_and_the_fallback(facts: EngineFacts) -> None:
    assert (
        "hands set_eagle3_layers_to_capture to PlainForCausalLM"
        in hook_of(facts, target("EmptyForConditionalGeneration")).reason
    )
    assert "its fallback TransformersForCausalLM" in hook_of(facts, target("UnheardOfForCausalLM")).reason
    refusal = hook_of(facts, target("PlainForCausalLM"))
    assert refusal.evidence[-1].file == "sglang/srt/model_executor/model_runner.py"
    assert refusal.evidence[-1].line == 5


@pytest.mark.parametrize(
    ("architecture", "ids", "ours"),
    [
        ("LlamaForCausalLM", (1, 15, 28), (2, 16, 29)),
        ("LlamaForCausalLM", None, (2, 16, 29)),
        ("DeepseekForCausalLM", (1, 15, 28), (2, 16, 29)),
        ("DeepseekForCausalLM", (2, 16, 29), (2, 16, 29)),
        ("HeirForCausalLM", (2, 16, 29), (2, 16, 29)),
        ("KimiForConditionalGeneration", (2, 16, 29), (2, 16, 29)),
        ("GptForCausalLM", (24, 30, 32), (24, 30, 32)),
        ("GptForCausalLM", (1, 15, 28), (2, 16, 29)),
        ("PlainForCausalLM", (1, 15, 28), None),
    ],
)
def test_which_layers_are_really_captured(
    facts: EngineFacts, architecture: str, ids: tuple[int, ...] | None, ours: tuple[int, ...] | None
) -> None:
    assert captured(facts, target(architecture), ids, 32) == ours


def test_drafters_and_where_ids_are_read(facts: EngineFacts) -> None:
    assert list(facts.drafters) == ["LlamaForCausalLMEagle3"]
    assert [r.spelled for r in id_reads(facts).reads] == ["eagle_config.eagle_aux_hidden_state_layer_ids"]
    found = facts.supports("GptForCausalLM")
    assert found is not None
    assert found.supports
    assert facts.supports("UnheardOfForCausalLM") is None
