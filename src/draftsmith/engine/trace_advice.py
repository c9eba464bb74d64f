"""What to do about an error that a check of draftsmith knows: a table from words of the message to the check that
would have found it beforehand, and the remedy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import nearest


@dataclass(frozen=True)
class Advice:
    """words: all must be in the message (squeezed, as it was logged). file: end of the path of the place, "" = any.
    checks: ids of `draftsmith check`. fix may use {type}, {arch}: the target's model type or architecture, where the
    message carries one."""

    words: tuple[str, ...]
    checks: tuple[str, ...]
    fix: str
    file: str = ""


ADVICE: tuple[Advice, ...] = (
    Advice(
        ("Unexpected keyword argument", "SpeculativeConfig"),
        (),
        "this key of --speculative-config is not known to this release: take it out, or look up its name "
        "(fields of class SpeculativeConfig in vllm/config/speculative.py)",
    ),
    Advice(
        ("only supported for", "model_type"),
        ("gate.list", "gate.interface"),
        "a list of model types stops this target before its weights are read. {releases}`draftsmith remedy TARGET "
        "DRAFTER` says whether the runtime plugin suffices here: it widens the list where the class has the interface",
        "config/speculative.py",
    ),
    Advice(
        ("Eagle3 is only supported for Llama",),
        ("gate.list",),
        "vLLM before 0.10.1 takes Llama targets alone: install a later release (draftsmith releases TARGET)",
    ),
    Advice(
        ("does not support EAGLE3 interface",),
        ("gate.interface",),
        "the target's class lacks the EAGLE-3 interface in this release: `draftsmith releases TARGET` names one that has "
        "it; draftsmith serve gives it to most classes by its plugin, and --model-impl transformers serves it through a "
        "class that has it (draftsmith remedy TARGET DRAFTER)",
    ),
    Advice(
        ("Model architectures", "not supported for now"),
        ("form.architecture", "form.method"),
        'if the name begins with \'Eagle\' twice, pass "method": "eagle3"; else rename the drafter\'s architecture '
        "(draftsmith remedy TARGET DRAFTER writes a shadow folder), or install a release that registers it",
    ),
    Advice(
        ("Tried to load weights of size", "to a parameter of size"),
        ("form.fc", "form.sizes"),
        "a tensor's shape is not what the config gives: often fc, when num_aux_hidden_states or target_hidden_size is "
        "missing (draftsmith check names the tensor; draftsmith remedy writes a shadow folder with the key)",
    ),
    Advice(
        ("There is no module or parameter named",),
        ("form.names",),
        "the drafter holds a tensor this class does not know: draftsmith convert strips prefixes and verifier_* tensors",
    ),
    Advice(
        ("spec decode is not supported",),
        ("engine.faults",),
        "this CPU build has no speculation: vLLM 0.22 or later has EAGLE-3 on the CPU (draftsmith engine install)",
    ),
    Advice(
        ("num_speculative_tokens",),
        ("runner.tokens",),
        'the speculative config needs "num_speculative_tokens": 3 or so',
        "config/speculative.py",
    ),
    Advice(
        ("Synthetic acceptance not supported with CPU",),
        (),
        "rejection_sample_method synthetic needs a GPU",
    ),
    Advice(
        ("max_model_len", "is greater than the derived max_model_len"),
        ("pair.positions",),
        "lower --max-model-len to what config.json allows; raising it past the trained length gives garbage",
    ),
    Advice(
        ("KV cache is needed", "larger than the available KV cache memory"),
        ("pair.memory",),
        "lower --max-model-len, or give the cache more memory (--gpu-memory-utilization; on the CPU "
        "VLLM_CPU_KVCACHE_SPACE)",
    ),
    Advice(
        ("No available memory for the cache blocks",),
        ("pair.memory",),
        "raise --gpu-memory-utilization, or spread the model over more devices (--tensor-parallel-size)",
    ),
    Advice(
        ("Free memory on device", "is less than desired GPU memory utilization"),
        ("pair.memory",),
        "something else holds the device's memory: end it, or lower --gpu-memory-utilization",
    ),
    Advice(
        ("Killed",),
        ("pair.memory",),
        "the system ended the process, most often because the machine's memory ran out (dmesg says so): fewer or smaller "
        "processes, a smaller KV cache, or weights that are not copied (see draftsmith check --gpu-memory)",
    ),
    Advice(
        ("CUDA out of memory",),
        ("pair.memory",),
        "`draftsmith check --gpu-memory` forecasts weights and cache of target and drafter before a start",
    ),
    Advice(
        ("must be divisible by tensor parallel size",),
        ("pair.tensor_parallel",),
        "choose a --tensor-parallel-size that divides the number of heads",
    ),
    Advice(
        ("draft_tensor_parallel_size",),
        ("pair.tensor_parallel",),
        "draft_tensor_parallel_size must be 1 or the target's tensor parallel size",
    ),
    Advice(
        ("has a different vocab size",),
        ("pair.vocab",),
        "vocab_size in the drafter's config must be the target's; the draft vocabulary's size goes into draft_vocab_size",
    ),
    Advice(
        ("does not support eagle3 with pipeline parallelism",),
        ("pair.pipeline_parallel",),
        "serve with --pipeline-parallel-size 1 and more tensor parallelism",
    ),
    Advice(
        ("should belong to the same kv cache group",),
        (),
        "the drafter mixes full and sliding attention: export it with one kind of attention",
    ),
    Advice(
        ("missing 1 required positional argument: 'hidden_states'",),
        ("form.method",),
        'the drafter was taken for a draft model because of its folder\'s name: pass "method": "eagle3"',
    ),
    Advice(
        ("expected bool, got NoneType",),
        ("form.config",),
        "a null in the drafter's config.json where the library wants true or false: draftsmith remedy writes a shadow folder",
    ),
    Advice(
        ("Cannot find an appropriate cached snapshot folder",),
        ("form.files",),
        "the name is neither a folder here nor in the local hub cache, and the hub is switched off or out of reach: "
        "check the path's spelling",
    ),
    Advice(
        ("Repo id must",),
        ("form.files",),
        "the path does not exist on this machine, so it was taken for a hub name: check its spelling",
    ),
    Advice(
        ("should be of shape", "mat1 and mat2 shapes cannot be multiplied"),
        ("form.fc", "runner.aux_ids"),
        "the drafter's fc does not take as many aux states as the target gives",
    ),
    Advice(
        ("not supported for processing", "safetensors_rust"),
        ("form.files",),
        "a weight file is cut or damaged: fetch it again",
    ),
    Advice(
        ("incomplete metadata, file not fully covered",),
        ("form.files",),
        "a weight file is cut: fetch it again",
    ),
)


def advice_for(message: str, file: str = "") -> dict[str, Any] | None:
    """{"fix", "checks"} of the first row that fits, None where no check knows the fault. message: with what was around
    it."""
    squeezed = re.sub(r"\s+", " ", message)
    for row in ADVICE:
        if all(w in squeezed for w in row.words) and file.endswith(row.file):
            releases = _first_release(squeezed) if "{releases}" in row.fix else ""
            return {"fix": row.fix.replace("{releases}", releases), "checks": list(row.checks)}
    return None


def _first_release(message: str) -> str:
    """Which known release's list takes the model type that the message names."""
    found = re.search(r"model_type='([^']+)'", message)
    if found is None:
        return ""
    from draftsmith.engine.releases import table

    for release in table("vllm").releases:
        if release.model_types is None or any(word in found[1] for word in release.model_types):
            return (
                f"The first known release whose list takes {found[1]!r} is {release.version} (draftsmith releases TARGET "
                "tells the class's side). "
            )
    return ""


def flag_advice(message: str, known: frozenset[str]) -> dict[str, Any] | None:
    """The known flags most like those that argparse did not recognise."""
    found = re.search(r"unrecognized arguments: (.*)", message)
    if found is None:
        return None
    unknown = [w.split("=")[0] for w in found[1].split() if w.startswith("--")]
    said = []
    for word in unknown:
        near = nearest(word, sorted(known))
        said.append(f"{word} is no flag of this release" + (f"; did you mean {near[0]}?" if near else ""))
    return {"fix": "; ".join(said), "checks": []} if said else None
