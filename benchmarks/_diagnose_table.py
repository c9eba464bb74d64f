"""The faults of diagnose_faults.py: each is put into a copy of a good drafter, its rows, its states or its bench. Sizes and
places are drawn from a seeded generator. One function, one fault.

A fault says which cause `diagnose` must name (ids of which one is right) and which words its text or evidence must hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from _diagnose_case import FAULTS, Case, Fault, fault
from torch import Tensor

from draftsmith.extract.states import States

LAYER = "midlayer."
IDS = "eagle_aux_hidden_state_layer_ids"


# --- aux layers


def _move_one(case: Case, sign: int) -> list[str]:
    places = [(i, d) for i in range(len(case.ids)) for d in (1, 2, 3)]
    case.rng.shuffle(places)
    for i, d in places:
        ids = [*case.ids]
        ids[i] += sign * d
        if all(0 <= k <= case.layers for k in ids) and ids == sorted(set(ids)):
            case.config[IDS] = ids
            return [str(case.ids)]
    raise AssertionError("no id can be moved")


@fault("aux.one")
def one_aux_id_low(case: Case) -> list[str]:
    return _move_one(case, -1)


@fault("aux.one")
def one_aux_id_high(case: Case) -> list[str]:
    return _move_one(case, 1)


@fault("aux.all")
def all_aux_ids_in_the_other_numbering(case: Case) -> list[str]:
    case.config[IDS] = [k - 1 for k in case.ids]
    return [str(case.ids)]


@fault("aux.all", "check.runner.aux_ids")
def nested_ids_that_count_outputs(case: Case) -> list[str]:
    del case.config[IDS]
    case.config["eagle_config"] = {IDS: [k - 1 for k in case.ids], "use_aux_hidden_state": True}
    return [str(case.ids)]


@fault("aux.order")
def streams_joined_in_another_order(case: Case) -> list[str]:
    blocks = case.tensors["fc.weight"].chunk(len(case.ids), dim=1)
    order = list(range(len(blocks)))
    while order == sorted(order):
        case.rng.shuffle(order)
    case.tensors["fc.weight"] = torch.cat([blocks[i] for i in order], dim=1).contiguous()
    return [str([order.index(i) for i in range(len(order))])]


# --- norms, rope


@fault("norms.switch")
def norm_before_residual_turned(case: Case) -> list[str]:
    case.config["norm_before_residual"] = not case.config["norm_before_residual"]
    return ["norm_before_residual"]


@fault("norms.switch")
def norm_output_turned(case: Case) -> list[str]:
    case.config["norm_output"] = not case.config["norm_output"]
    return ["norm_output"]


@fault("norms.input")
def norm_before_fc_untrained(case: Case) -> list[str]:
    case.config["norm_before_fc"] = True
    case.tensors["input_norm.weight"] = torch.ones(case.tensors["fc.weight"].shape[1]) * case.rng.uniform(0.8, 1.25)
    return ["norm_before_fc"]


@fault("norms.input")
def fc_norm_untrained(case: Case) -> list[str]:
    case.config["fc_norm"] = True
    for i in range(len(case.ids)):
        case.tensors[f"fc_norm.{i}.weight"] = torch.ones(case.config["target_hidden_size"]) * case.rng.uniform(
            0.8, 1.25
        )
    return ["fc_norm"]


@fault("norms.offset")
def norms_without_their_one(case: Case) -> list[str]:
    by = case.rng.choice([-1.0, 1.0])
    for name, t in case.tensors.items():
        if "norm" in name and t.dim() == 1:
            case.tensors[name] = t + by
    return ["every norm"]


def _set_rope(case: Case, rope: dict[str, Any]) -> None:
    case.config["rope_parameters"], case.config["rope_theta"] = rope, rope["rope_theta"]
    case.config.pop("rope_scaling", None)


@fault("rope")
def rope_theta_of_another_model(case: Case) -> list[str]:
    true = case.config["rope_theta"]
    _set_rope(case, {"rope_theta": case.rng.choice([1e2, 1e3, 1e7]), "rope_type": "default"})
    return [f"→ theta {true:g}"]


@fault("rope")
def rope_scaling_added_at_export(case: Case) -> list[str]:
    theta, factor = case.config["rope_theta"], case.rng.choice([4.0, 8.0, 32.0])
    kinds = [{"rope_type": "linear"}, {"rope_type": "yarn", "original_max_position_embeddings": 64}]
    _set_rope(case, {"rope_theta": theta, "factor": factor, **case.rng.choice(kinds)})
    return [f"→ theta {theta:g}"]


# --- the map


@fault("check.form.map", "check.form.inventory")
def map_missing(case: Case) -> list[str]:
    del case.tensors["d2t"], case.tensors["t2d"]
    return ["d2t"]


@fault("check.form.map_values")
def map_of_absolute_ids(case: Case) -> list[str]:
    case.tensors["d2t"] = case.map_ids()
    return []


@fault("map.shift")
def map_shifted(case: Case) -> list[str]:
    by = case.rng.choice([d for d in range(-16, 17) if d])
    ids = case.map_ids() + by
    # What would leave the vocabulary at its ends goes, with its row of the head.
    inside = (ids >= 0) & (ids < case.config["vocab_size"])
    case.tensors["lm_head.weight"] = case.tensors["lm_head.weight"][inside].contiguous()
    case.config["draft_vocab_size"] = int(inside.sum())
    case.set_map(ids[inside])
    return [f"target ids {-by:+d}"]


@fault("map.other")
def map_of_another_drafter(case: Case) -> list[str]:
    ids = torch.randperm(case.config["vocab_size"], generator=case.generator())[: len(case.tensors["d2t"])]
    case.set_map(ids.sort().values)
    return []


@fault("map.other")
def map_one_token_short(case: Case) -> list[str]:
    """From some place on every row of lm_head is told the next row's token."""
    ids = case.map_ids()
    at = case.rng.randrange(len(ids) // 16, len(ids) // 4)
    unused = torch.nonzero(~case.tensors["t2d"]).flatten()
    case.set_map(torch.cat([ids[:at], ids[at + 1 :], unused[-1:]]).sort().values)
    return []


# --- tables and heads


@fault("check.silence.embedding")
def untrained_embedding(case: Case) -> list[str]:
    case.tensors["embed_tokens.weight"] = torch.randn(case.table.shape, generator=case.generator()) * 0.02
    return ["embed_tokens"]


@fault("embedding")
def embedding_of_another_revision(case: Case) -> list[str]:
    noise = torch.randn(case.table.shape, generator=case.generator()) * case.table.std()
    case.tensors["embed_tokens.weight"] = case.table + noise * case.rng.uniform(0.8, 1.4)
    return ["embed_tokens"]


@fault("check.form.inventory", "check.form.lm_head")
def lm_head_missing(case: Case) -> list[str]:
    del case.tensors["lm_head.weight"]
    return ["lm_head"]


@fault("check.form.inventory", "check.form.fc")
def a_tensor_missing(case: Case) -> list[str]:
    name = case.rng.choice([n for n in case.tensors if n.startswith(LAYER) or n in ("fc.weight", "norm.weight")])
    del case.tensors[name]
    return [name.removeprefix(LAYER)]


@fault("head")
def lm_head_made_anew(case: Case) -> list[str]:
    head = case.tensors["lm_head.weight"]
    case.tensors["lm_head.weight"] = torch.randn(head.shape, generator=case.generator()) * head.float().std()
    return []


@fault("check.form.deep_values")
def a_matrix_never_written(case: Case) -> list[str]:
    name = case.rng.choice([n for n, t in case.tensors.items() if t.dim() == 2])
    case.tensors[name] = torch.zeros_like(case.tensors[name])
    return [name.removeprefix(LAYER)]


# --- a converter's slips


@fault("layout.halves")
def attention_halves_exchanged(case: Case) -> list[str]:
    H = case.config["hidden_size"]
    for p in "qkv":
        name = f"{LAYER}self_attn.{p}_proj.weight"
        t = case.tensors[name]
        case.tensors[name] = torch.cat([t[:, H:], t[:, :H]], 1).contiguous()
    return []


@fault("layout.mlp")
def gate_and_up_exchanged(case: Case) -> list[str]:
    gate, up = (f"{LAYER}mlp.{p}_proj.weight" for p in ("gate", "up"))
    case.tensors[gate], case.tensors[up] = case.tensors[up], case.tensors[gate]
    return []


@fault("layout.rope")
def heads_laid_out_for_pairs(case: Case) -> list[str]:
    d = case.config["head_dim"]
    for p in "qk":
        name = f"{LAYER}self_attn.{p}_proj.weight"
        heads = case.tensors[name].unflatten(0, (-1, d))
        pairs = torch.stack([heads[:, : d // 2], heads[:, d // 2 :]], dim=2)
        case.tensors[name] = pairs.flatten(1, 2).flatten(0, 1).contiguous()
    return ["pairs in the files"]


@fault("fuse.scale")
def scaling_of_aux_channels_lost(case: Case) -> list[str]:
    rms = torch.cat([s.aux.float().flatten(1) for s in case.states.values()]).square().mean(0).sqrt().clamp(min=1e-6)
    case.tensors["fc.weight"] = case.tensors["fc.weight"].float() * rms
    return []


# --- the training states


def _each(case: Case, change: Callable[[States], States]) -> None:
    case.states = {k: change(s) for k, s in case.states.items()}


@fault("data.states")
def final_norm_in_the_stored_state(case: Case) -> list[str]:
    norm = case.served["norm"]
    _each(case, lambda s: replace(s, final=norm(s.final)))
    return ["final norm applied"]


@fault("data.states")
def final_norm_twice(case: Case) -> list[str]:
    norm = case.served["norm"]
    _each(case, lambda s: replace(s, final=norm(norm(s.final))))
    return ["final norm applied twice"]


@fault("data.states")
def final_norm_missing(case: Case) -> list[str]:
    """A store that says it holds normed states, and holds them as they were before."""
    case.final_state = "post_norm"
    return [f"holds stream {case.layers}, not stream {case.layers}, final norm applied"]


@fault("data.states")
def one_stream_of_another_layer(case: Case) -> list[str]:
    b, by = case.rng.randrange(len(case.ids)), case.rng.choice([-1, 1, 2])
    held = case.ids[b] + by
    streams = case.served["streams"]

    def change(s: States) -> States:
        aux = s.aux.clone()
        aux[:, b] = streams(s)[held].to(aux.dtype)
        return replace(s, aux=aux)

    _each(case, change)
    return [f"aux block {b} holds stream {held}"]


@fault("data.states")
def streams_stored_in_another_order(case: Case) -> list[str]:
    order = list(range(len(case.ids)))
    while order == sorted(order):
        case.rng.shuffle(order)
    _each(case, lambda s: replace(s, aux=s.aux[:, order].contiguous()))
    return ["holds stream"]


@fault("data.states")
def states_one_position_off(case: Case) -> list[str]:
    by = case.rng.choice([-1, 1])
    _each(case, lambda s: replace(s, aux=s.aux.roll(by, 0)))
    return ["one position " + ("late" if by == 1 else "early")]


@fault("data.rotated")
def states_of_a_rotated_target(case: Case) -> list[str]:
    G = case.config["target_hidden_size"]
    turn, _ = torch.linalg.qr(torch.randn(G, G, generator=case.generator()))
    _each(case, lambda s: replace(s, aux=(s.aux.float() @ turn).to(s.aux.dtype)))
    return ["rotation"]


@fault("data.revision", needs="target")
def states_of_another_revision(case: Case) -> list[str]:
    share = case.rng.uniform(0.05, 0.15)
    gen = case.generator()
    case.served["spoil"] = lambda w: w + torch.randn(w.shape, generator=gen) * w.std() * share
    return []


@fault("data.revision", needs="target")
def states_of_a_quantised_target(case: Case) -> list[str]:
    group = case.rng.choice([32, 64])

    def four_bits(w: Tensor) -> Tensor:
        if w.shape[-1] % group:
            return w
        parts = w.unflatten(-1, (-1, group))
        scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
        return ((parts / scale).round().clamp(-8, 7) * scale).flatten(-2)

    case.served["spoil"] = four_bits
    return []


# --- the text


def _prompted(case: Case, change: Callable[[str], str]) -> None:
    """All rows with their prompts' text changed; answers as they were."""
    encode, decode = case.served["encode"], case.served["decode"]
    rows = []
    for row in case.served["rows"]:
        prompt = encode(change(decode(row.token_ids[: row.boundary])))
        rows.append(replace(row, token_ids=[*prompt, *row.token_ids[row.boundary :]], boundary=len(prompt)))
    case.rows = rows


@fault("data.template")
def rows_without_the_template(case: Case) -> list[str]:
    word = case.rng.choice(["User: ", "### Instruction:\n", ""])
    _prompted(case, lambda p: word + p.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0] + "\n")
    return ["begin otherwise"]


@fault("data.template")
def rows_with_another_system_prompt(case: Case) -> list[str]:
    said = case.rng.choice(["Answer briefly.", "You are a pirate.", "You are a helpful assistant"])
    served = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    _prompted(case, lambda p: p.replace(served, said))
    return ["begin otherwise"]


@fault("data.template")
def rows_in_another_thinking_mode(case: Case) -> list[str]:
    tail = case.rng.choice(["<think>\n\n</think>\n\n", "<think>\n"])
    _prompted(case, lambda p: p + tail)
    return ["end otherwise"]


@fault("data.template")
def rows_with_a_doubled_first_token(case: Case) -> list[str]:
    first = case.rng.choice(["<|im_start|>", "<|endoftext|>"])
    _prompted(case, lambda p: first + p)
    return ["begin otherwise"]


@fault("vocab.coverage")
def draft_vocab_too_small(case: Case) -> list[str]:
    """The drafter's own head, kept for a random half of its tokens."""
    D = len(case.tensors["d2t"])
    keep = torch.randperm(D, generator=case.generator())[: int(D * case.rng.uniform(0.3, 0.6))].sort().values
    ids = case.map_ids()[keep]
    case.tensors["lm_head.weight"] = case.tensors["lm_head.weight"][keep].contiguous()
    case.config["draft_vocab_size"] = len(keep)
    case.set_map(ids)
    return []


RUSSIAN = (
    "Москва является столицей России и крупнейшим городом страны. В городе живут более двенадцати миллионов человек, и он "
    "стоит на реке Москве. Здесь находятся правительство, многие университеты, театры и музеи.",
    "Чтобы сварить суп, возьмите воду, картофель, морковь и лук. Нарежьте овощи, положите их в кастрюлю и варите около "
    "двадцати минут. В конце добавьте соль, перец и немного зелени.",
    "Солнце светит днём, а луна видна ночью. Земля вращается вокруг солнца за один год, и поэтому на ней бывают весна, "
    "лето, осень и зима. Зимой дни короче, а летом длиннее.",
)


@fault("vocab.coverage")
def answers_in_a_language_that_the_draft_vocab_lacks(case: Case) -> list[str]:
    encode = case.served["encode"]
    rows = list(case.served["rows"])
    for i in case.rng.sample(range(len(rows)), k=int(len(rows) * case.rng.uniform(0.7, 0.9))):
        text = " ".join(case.rng.sample(RUSSIAN, k=3))
        rows[i] = replace(rows[i], token_ids=[*rows[i].token_ids[: rows[i].boundary], *encode(text)])
    case.rows = rows
    return ["CYRILLIC"]


# --- training


@fault("train.ttt", needs="fit")
def trained_on_with_one_draft_step(case: Case) -> list[str]:
    case.served["fit"] = {"K": 1, "rows": None, "steps": 120, "lr": 2e-3}
    return []


@fault("data.little", needs="fit")
def trained_on_with_a_few_rows(case: Case) -> list[str]:
    case.served["fit"] = {"K": 3, "rows": case.rng.choice([20, 28]), "steps": 90, "lr": 2e-3}
    return []


@fault("context.length")
def made_for_shorter_texts(case: Case) -> list[str]:
    """A drafter whose positions end before the answers do: in its config, and in the contract where there is one."""
    case.config["max_position_embeddings"] = case.rng.choice([64, 96, 128, 192])
    return [f"{case.config['max_position_embeddings']} tokens"]


# --- the engine


def _bench(case: Case, first: float, temperature: float = 0.0) -> dict[str, Any]:
    rates = [first, first * 0.35, first * 0.14]
    return {
        "acceptance_per_position": rates,
        "acceptance_length": 1 + sum(rates),
        "tokens_per_target_step": 1 + sum(rates),
        "settings": {"temperature": temperature},
    }


@fault("check.engine.faults")
def engine_release_with_a_known_fault(case: Case) -> list[str]:
    case.bench = _bench(case, case.rng.uniform(0.002, 0.02), temperature=case.rng.uniform(0.5, 1.0))
    return ["temperature"]


@fault("engine.differs")
def engine_accepts_less_than_replay(case: Case) -> list[str]:
    case.bench = _bench(case, case.good_first * case.rng.uniform(0.1, 0.5))
    return []


@fault("speed.cost")
def accepted_well_and_slower(case: Case) -> list[str]:
    """SmolLM2's own figures on a GPU: 1.53 tokens per step, and slower at every concurrency."""
    ratio = case.rng.uniform(0.55, 0.85)
    case.bench = _bench(case, case.good_first) | {"tokens_per_target_step": case.good_length}
    plain = {"32": 6783.0, "8": 3113.0, "1": 452.0}
    case.bench["tokens_per_second"] = {"none": plain, "drafter": {c: r * ratio for c, r in plain.items()}}
    return [f"{ratio:.2f}×"]


def deep_copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in tensors.items()}


__all__ = ["FAULTS", "Case", "Fault", "deep_copy"]
