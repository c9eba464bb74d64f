"""Rope against transformers' own functions, and its refusals."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.drafter.rope import Rope, rotate
from draftsmith.errors import UserError

KINDS = {
    "linear": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_amplitude_equal_transformers(kind):
    p = {"rope_type": kind, "rope_theta": 10000.0, **KINDS[kind]}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=512, rope_parameters=p)
    freq, amplitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    ours = Rope(p, 32)
    torch.testing.assert_close(ours.inv_freq * ours.position_scale, freq)
    assert ours.amplitude == pytest.approx(amplitude)


def test_rotation_depends_on_distance_alone():
    rope = Rope({"rope_theta": 10000.0}, 16)
    q, k = torch.randn(1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 16, dtype=torch.float64)

    def score(a, b, interleaved):
        turned = [rotate(x, *rope.angles(torch.tensor([p]), x.dtype), interleaved) for x, p in ((q, a), (k, b))]
        return (turned[0] * turned[1]).sum()

    for interleaved in (False, True):
        torch.testing.assert_close(score(7, 3, interleaved), score(44, 40, interleaved), rtol=1e-4, atol=1e-4)
        assert not torch.isclose(score(7, 3, interleaved), score(7, 4, interleaved))


def test_part_of_the_head_may_be_rotated():
    rope = Rope({"rope_theta": 10000.0, "partial_rotary_factor": 0.5}, 16)
    x = torch.randn(3, 2, 16)
    out = rotate(x, *rope.angles(torch.arange(3), x.dtype))
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert not torch.equal(out[1:, :, :8], x[1:, :, :8])


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "lama3"}, "did you mean 'llama3'"),
        ({"rope_type": "longrope"}, "known types"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
    ],
)
def test_what_cannot_be_trained_is_refused(rope, words):
    with pytest.raises(UserError) as e:
        Rope(rope, 16)
    assert words in str(e.value)
