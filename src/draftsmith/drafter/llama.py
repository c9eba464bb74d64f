"""Attention of the Llama form (vllm/model_executor/models/llama.py, LlamaAttention, with the input width 2H of
llama_eagle3.py). The drafter around it is model.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from draftsmith.drafter.attention import attend
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.rope import Rope, rotate

if TYPE_CHECKING:
    from draftsmith.drafter.model import Steps


class LlamaAttention(nn.Module):
    """Grouped-query attention; head_dim need not be H / heads; attention_bias puts a bias on all four projections."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, n, m, d = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        bias = config.attention_bias
        self.head_dim = d
        self.q_proj = nn.Linear(2 * H, n * d, bias=bias)
        self.k_proj = nn.Linear(2 * H, m * d, bias=bias)
        self.v_proj = nn.Linear(2 * H, m * d, bias=bias)
        self.o_proj = nn.Linear(n * d, H, bias=bias)
        self.rope = Rope(config.rope, d)
        self.scale = d**-0.5

    def forward(self, x: Tensor, position: Tensor, steps: Steps) -> Tensor:
        """x [T, 2H]; position int64 [T] → [T, H]; this step's keys and values are appended to `steps`."""
        cos, sin = self.rope.angles(position, x.dtype)
        q = rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), cos, sin)
        steps.keys.append(rotate(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), cos, sin))
        steps.values.append(self.v_proj(x).unflatten(-1, (-1, self.head_dim)))
        return self.o_proj(attend(q, steps.keys, steps.values, steps.spans, self.scale).flatten(1))
