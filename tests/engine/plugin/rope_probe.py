"""Runs under an engine's interpreter: the default rope on a query [tokens, heads, size] cut out of a wider one, as latent
attention hands it over, by the CPU's form and by the native form. No arguments, no model.

Prints `RESULT {"latent": largest difference, "flat": largest difference}`.
"""

from __future__ import annotations

import json


def main() -> None:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    torch.manual_seed(0)
    found = {}
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(64, max_position=128, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
                        is_neox_style=False)  # fmt: skip
        positions = torch.arange(11)
        wide, one = torch.randn(11, 4, 192), torch.randn(11, 1, 64)
        for name, query, key in (("latent", wide[..., 128:], one), ("flat", torch.randn(11, 256), torch.randn(11, 64))):
            native = rope.forward_native(positions, query.clone(), key.clone())
            here = rope.forward_cpu(positions, query, key)  # in place, on the slice, as the layer does
            found[name] = max(float((a - b).abs().max()) for a, b in zip(native, here, strict=True))
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
