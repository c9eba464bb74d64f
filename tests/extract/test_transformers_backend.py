"""Streams are those of transformers itself, batched or not; the final state gives the model's own logits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.extract.codecs import topk_of_logits
from draftsmith.extract.states import TopK
from draftsmith.extract.transformers_backend import TransformersStates

ROWS = [list(range(3, 40)), list(range(50, 60)), [5, 4, 3]]
BOUNDARIES = [10, 3, 1]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_streams_agree_with_transformers_in_a_padded_batch(
    tmp_path: Path, build_target: Callable[..., Path], kind: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = build_target(tmp_path / kind, kind)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made = TransformersStates(folder, [0, 2, 5, 6]).states(ROWS, BOUNDARIES)
    for ids, boundary, s in zip(ROWS, BOUNDARIES, made, strict=True):
        with torch.no_grad():
            out = plain(torch.tensor([ids]), output_hidden_states=True)
            normed = plain.model.norm(s.aux[:, 3].float())
        for a, k in enumerate((0, 2, 5)):
            torch.testing.assert_close(s.aux[:, a].float(), out.hidden_states[k][0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(normed, out.hidden_states[6][0], rtol=3e-2, atol=3e-2)
        assert s.final is not None and s.argmax is not None
        assert s.final_start == boundary - 1 and torch.equal(s.final, s.aux[boundary - 1 :, 3])
        assert torch.equal(s.argmax, out.logits[0, boundary - 1 :].argmax(-1))


def test_a_topk_teacher_is_the_models_distribution_on_the_draft_vocab(tiny_target: Path) -> None:
    draft_ids = torch.tensor([2, 5, 7, 11, 40, 95])
    model = TransformersStates(tiny_target, [1, 2, 3], draft_ids=draft_ids, topk=3)
    (s,) = model.states([ROWS[0]], [10])
    with torch.no_grad():
        logits = model.model(torch.tensor([ROWS[0]])).logits[0, 9:][:, draft_ids]
    want, teacher = topk_of_logits(logits, 3), s.teacher()
    assert isinstance(teacher, TopK) and s.final is None
    assert torch.equal(teacher.ids, want.ids)
    torch.testing.assert_close(teacher.logits, want.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(teacher.rest, want.rest, rtol=1e-3, atol=1e-3)
