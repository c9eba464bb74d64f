"""The `speculators` package's side of test_with_speculators.py: writes a drafter of its own, or reads one, and says what it
computes. Run with the package on the path.

    python speculators_side.py write TARGET INPUTS FOLDER={"norm_before_residual": true, …} …
    python speculators_side.py read TARGET INPUTS FOLDER …

INPUTS: a safetensors file with aux [T, 3·G] and ids int64 [T] (row t: aux states of position t and token t + 1) and
draft_ids [D]. Written beside each FOLDER as FOLDER.logits: "step0" … "step2" [T, D], of each draft step.
"""

import json
import sys

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import AutoConfig

STEPS = 3


def make(target, inputs, switches):
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers = 1
    D = inputs["draft_ids"].numel()
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[inputs["draft_ids"]] = True
    model = Eagle3DraftModel.from_training_args(
        config, t2d=t2d, d2t=inputs["draft_ids"] - torch.arange(D), draft_vocab_size=D, ttt_steps=STEPS,
        verifier_name_or_path=target, target_layer_ids=[2, 4, 5], **switches,
    )  # fmt: skip
    torch.manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith(("fc", "layers", "norm", "input_norm", "lm_head")):
                p.copy_(torch.rand_like(p) + 0.5 if "norm" in name else torch.randn_like(p) * 0.1)
    return model


def logits_of(model, inputs):
    said = []
    model.lm_head.register_forward_hook(lambda module, args, out: said.append(out[0].detach().float().contiguous()))
    docs = torch.zeros(1, len(inputs["ids"]), dtype=torch.long)
    with torch.no_grad():
        model.eval().float()(inputs["aux"][None], inputs["ids"][None], docs, ttt_steps=STEPS)
    return {f"step{i}": x for i, x in enumerate(said)}


def main():
    kind, target, path, *jobs = sys.argv[1:]
    inputs = load_file(path)
    for job in jobs:
        folder, _, switches = job.partition("=")
        if kind == "write":
            model = make(target, inputs, json.loads(switches))
            model.save_pretrained(folder)
        else:
            model = Eagle3DraftModel.from_pretrained(folder)
            model.load_verifier_weights()
        save_file(logits_of(model, inputs), f"{folder}.logits")


main()
