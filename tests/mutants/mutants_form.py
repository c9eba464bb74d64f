"""Mutants of the drafter's form: files, config, method, names, shapes, draft vocabulary. One function, one fault."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tiny_pair as tp
from mutant_case import Case, P, drop, mutant, offsets, rename
from tiny_pair import BF16, as_f32, bf16

# --- files


@mutant
def weights_cut(case: Case) -> None:
    def cut(target: Path, drafter: Path) -> None:
        path = drafter / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])

    case.after.append(cut)


@mutant
def weights_are_a_pointer(case: Case) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    case.after.append(lambda t, d: (d / "model.safetensors").write_text(text) and None)


@mutant
def shard_missing(case: Case) -> None:
    table = dict.fromkeys(case.t, "model-00001-of-00002.safetensors") | {
        "fc.weight": "model-00002-of-00002.safetensors"
    }

    def split(target: Path, drafter: Path) -> None:
        (drafter / "model.safetensors").rename(drafter / "model-00001-of-00002.safetensors")
        (drafter / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))

    case.after.append(split)


@mutant
def no_weights(case: Case) -> None:
    case.after.append(lambda t, d: (d / "model.safetensors").unlink())


# --- config


@mutant
def use_cache_null(case: Case) -> None:
    case.c["use_cache"] = None


@mutant
def attention_bias_null(case: Case) -> None:
    case.c["attention_bias"] = None


@mutant
def num_hidden_layers_absent(case: Case) -> None:
    del case.c["num_hidden_layers"]


@mutant
def heads_do_not_divide(case: Case) -> None:
    case.c["num_key_value_heads"] = 3


@mutant
def rope_per_layer_type(case: Case) -> None:
    case.c["rope_parameters"] = {
        "full_attention": {"rope_theta": 500000.0, "rope_type": "yarn", "factor": 64.0},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    case.contract = None


@mutant
def mrope_on_text_target(case: Case) -> None:
    case.c["rope_scaling"] = {"type": "mrope", "mrope_section": [4, 6, 6]}


@mutant
def tied(case: Case) -> None:
    case.c["tie_word_embeddings"] = True


@mutant
def quantised_without_config(case: Case) -> None:
    case.t["fc.weight"] = np.ones(case.t["fc.weight"].shape, dtype="|u1")


@mutant
def quantisation_of_the_target_copied(case: Case) -> None:
    case.c["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@mutant
def float64_weights(case: Case) -> None:
    case.t["fc.weight"] = as_f32(case.t["fc.weight"]).astype("<f8")


@mutant
def saved_as_float32(case: Case) -> None:
    case.pair.drafter = {n: as_f32(x) if isinstance(x, BF16) else x for n, x in case.t.items()}


# --- method and architecture


@mutant
def folder_named_final(case: Case) -> None:
    case.folder = "final"


@mutant
def folder_named_eagle_dash(case: Case) -> None:
    case.folder = "qwen-eagle-v3"


@mutant
def method_eagle(case: Case) -> None:
    case.options["method"] = "eagle"


@mutant
def method_draft_model(case: Case) -> None:
    case.options["method"] = "draft_model"
    case.folder = "final"


@mutant
def method_draft_model_by_name(case: Case) -> None:
    """The folder's name wins over the method that is given."""
    case.options["method"] = "draft_model"


@mutant
def architecture_unregistered(case: Case) -> None:
    case.c["architectures"] = ["MiniCPMForCausalLMEagle3"]


@mutant
def architecture_absent(case: Case) -> None:
    del case.c["architectures"]


@mutant
def architecture_deepseek_eagle3(case: Case) -> None:
    case.c["architectures"] = ["Eagle3Phi3ForCausalLM"]


@mutant
def eagle1_head(case: Case) -> None:
    drop(case, P + "hidden_norm.weight", "d2t", "t2d")
    case.t["fc.weight"] = bf16(as_f32(case.t["fc.weight"])[:, : 2 * tp.HIDDEN])
    for n in ("q_proj", "k_proj", "v_proj"):
        case.t[f"{P}self_attn.{n}.weight"] = bf16(as_f32(case.t[f"{P}self_attn.{n}.weight"])[:, : tp.HIDDEN])
    case.contract = None


@mutant
def activation_of_another_kind(case: Case) -> None:
    case.c["hidden_act"] = "gelu"


@mutant
def model_type_of_nobody(case: Case) -> None:
    case.c["model_type"] = "eagle3_llama"


@mutant
def model_type_absent(case: Case) -> None:
    del case.c["model_type"]


# --- names and inventory


def _missing(name: str, *tensors: str) -> None:
    def run(case: Case) -> None:
        drop(case, *tensors)

    run.__name__ = name
    mutant(run)


_missing("missing_fc", "fc.weight")
_missing("missing_hidden_norm", P + "hidden_norm.weight")
_missing("missing_input_layernorm", P + "input_layernorm.weight")
_missing("missing_final_norm", "norm.weight")
_missing("missing_k_proj", P + "self_attn.k_proj.weight")
_missing("missing_down_proj", P + "mlp.down_proj.weight")
_missing("missing_lm_head", "lm_head.weight")
_missing("missing_d2t", "d2t", "t2d")


@mutant
def layer_rename_lost(case: Case) -> None:
    """A converter that forgot midlayer. → layers.0.: the whole layer stays random (speculators#1114)."""
    rename(case, lambda n: n.replace(P, "layers.1."))


@mutant
def layer_in_two_spellings(case: Case) -> None:
    """A merge of two checkpoints: midlayer.* beside layers.0.*."""
    case.t["midlayer.hidden_norm.weight"] = bf16(np.full(tp.HIDDEN, 3.0))


@mutant
def mlp_bias_without_tensors(case: Case) -> None:
    case.c["mlp_bias"] = True


@mutant
def prefix_model(case: Case) -> None:
    rename(case, lambda n: n if n in ("d2t", "t2d", "lm_head.weight") else "model." + n)


@mutant
def prefix_draft_model(case: Case) -> None:
    rename(case, lambda n: "draft_model." + n)


@mutant
def prefix_orig_mod(case: Case) -> None:
    rename(case, lambda n: "_orig_mod." + n)


@mutant
def verifier_norm_left(case: Case) -> None:
    case.t["verifier_norm.weight"] = bf16(np.ones(tp.HIDDEN))


@mutant
def optimizer_state_left(case: Case) -> None:
    case.t["optimizer.exp_avg"] = bf16(np.zeros(tp.HIDDEN))


# --- shapes


@mutant
def head_dim_lost(case: Case) -> None:
    """Two heads of 32 on a hidden size of 128: without head_dim the library computes 64 (speculators#134)."""
    case.c["num_attention_heads"] = 2
    case.t[P + "self_attn.q_proj.weight"] = bf16(as_f32(case.t[P + "self_attn.q_proj.weight"])[:64])
    case.t[P + "self_attn.o_proj.weight"] = bf16(as_f32(case.t[P + "self_attn.o_proj.weight"])[:, :64])
    del case.c["head_dim"]
    case.contract = None


@mutant
def intermediate_size_wrong(case: Case) -> None:
    case.c["intermediate_size"] = 512
    case.contract = None


@mutant
def qkv_read_the_state_only(case: Case) -> None:
    for n in ("q_proj", "k_proj", "v_proj"):
        case.t[f"{P}self_attn.{n}.weight"] = bf16(as_f32(case.t[f"{P}self_attn.{n}.weight"])[:, tp.HIDDEN :])


@mutant
def four_layers_count_absent(case: Case) -> None:
    """Four ids at top level, no num_aux_hidden_states: fc is built for three (vllm#54526)."""
    case.t["fc.weight"] = bf16(np.concatenate([as_f32(case.t["fc.weight"]), np.zeros((tp.HIDDEN, tp.HIDDEN))], axis=1))
    case.c["eagle_aux_hidden_state_layer_ids"] = [2, 4, 6, 7]
    del case.c["num_aux_hidden_states"]
    assert case.contract is not None
    case.contract["aux_layer_ids"] = [2, 4, 6, 7]


def _wider(case: Case, hidden: int) -> None:
    """The drafter's own width: everything but fc's input and the target."""
    rng = np.random.default_rng(1)
    old = tp.HIDDEN
    for n, x in case.t.items():
        if n in ("d2t", "t2d"):
            continue
        shape = [hidden * (s // old) if s in (old, 2 * old) and not (n == "fc.weight" and i == 1) else s
                 for i, s in enumerate(x.shape)]  # fmt: skip
        if n.endswith("norm.weight"):
            case.t[n] = bf16(1 + 0.02 * rng.standard_normal(shape))
        elif "q_proj" in n:
            case.t[n] = bf16(rng.standard_normal((old, 2 * hidden)) * 0.01)
        elif "o_proj" in n:
            case.t[n] = bf16(rng.standard_normal((hidden, old)) * 0.01)
        elif "k_proj" in n or "v_proj" in n:
            case.t[n] = bf16(rng.standard_normal((64, 2 * hidden)) * 0.01)
        elif "gate" in n or "up_proj" in n:
            case.t[n] = bf16(rng.standard_normal((tp.MLP, hidden)) * 0.01)
        elif "down" in n:
            case.t[n] = bf16(rng.standard_normal((hidden, tp.MLP)) * 0.01)
        else:
            case.t[n] = bf16(rng.standard_normal(shape) * 0.01)
    case.c["hidden_size"] = hidden
    case.contract = None


@mutant
def wider_without_target_hidden_size(case: Case) -> None:
    _wider(case, 192)
    case.t["embed_tokens.weight"] = bf16(np.random.default_rng(2).standard_normal((tp.VOCAB, 192)))
    del case.c["target_hidden_size"]


@mutant
def wider_without_embedding(case: Case) -> None:
    _wider(case, 192)


@mutant
def made_for_a_wider_target(case: Case) -> None:
    case.c["target_hidden_size"] = 256
    case.t["fc.weight"] = bf16(np.concatenate([as_f32(case.t["fc.weight"])] * 2, axis=1))


@mutant
def embedding_of_another_vocab(case: Case) -> None:
    case.t["embed_tokens.weight"] = bf16(np.random.default_rng(3).standard_normal((tp.VOCAB - 12, tp.HIDDEN)))


# --- draft vocabulary


@mutant
def d2t_int32(case: Case) -> None:
    case.t["d2t"] = case.t["d2t"].astype("<i4")


@mutant
def d2t_float32(case: Case) -> None:
    case.t["d2t"] = case.t["d2t"].astype("<f4")


@mutant
def d2t_short(case: Case) -> None:
    case.t["d2t"] = case.t["d2t"][:-4].copy()


def _ids(case: Case) -> np.ndarray:
    return case.t["d2t"] + np.arange(len(case.t["d2t"]))


@mutant
def d2t_absolute(case: Case) -> None:
    case.t["d2t"] = _ids(case).astype("<i8")


@mutant
def d2t_absolute_and_inside(case: Case) -> None:
    """Absolute ids that stay inside the vocabulary when read as offsets (verl-SpeCo#67)."""
    ids = np.arange(0, 4 * tp.DRAFT_VOCAB, 4)
    case.t["d2t"] = ids.astype("<i8")
    case.t["t2d"] = np.isin(np.arange(tp.VOCAB), ids)


@mutant
def d2t_arange(case: Case) -> None:
    """The default of one trainer: draft i becomes 2i."""
    case.t["d2t"] = np.arange(tp.DRAFT_VOCAB, dtype="<i8")
    case.t["t2d"] = np.isin(np.arange(tp.VOCAB), np.arange(tp.DRAFT_VOCAB))


@mutant
def d2t_shuffled(case: Case) -> None:
    ids = _ids(case)
    ids[[3, 40]] = ids[[40, 3]]
    case.t["d2t"] = offsets(ids)


@mutant
def d2t_names_a_token_twice(case: Case) -> None:
    ids = _ids(case)
    ids[10] = ids[9]
    case.t["d2t"] = offsets(ids)


@mutant
def d2t_leaves_the_vocabulary(case: Case) -> None:
    ids = _ids(case)
    ids[-1] = tp.VOCAB + 40
    case.t["d2t"] = offsets(ids)


@mutant
def d2t_negative(case: Case) -> None:
    ids = _ids(case)
    ids[0] = -5
    case.t["d2t"] = offsets(ids)


@mutant
def t2d_of_another_map(case: Case) -> None:
    case.t["t2d"] = np.isin(np.arange(tp.VOCAB), np.arange(100, 100 + tp.DRAFT_VOCAB))
    case.contract = None


@mutant
def t2d_marks_too_few(case: Case) -> None:
    mask = case.t["t2d"].copy()
    mask[np.flatnonzero(mask)[-3:]] = False
    case.t["t2d"] = mask


@mutant
def draft_vocab_larger(case: Case) -> None:
    case.c["draft_vocab_size"] = 600


@mutant
def draft_vocab_absent(case: Case) -> None:
    del case.c["draft_vocab_size"]


@mutant
def draft_vocab_zero(case: Case) -> None:
    case.c["draft_vocab_size"] = 0


@mutant
def map_of_the_whole_vocabulary(case: Case) -> None:
    """A d2t of zeros beside a full head (the engine has no parameter for it)."""
    case.c["draft_vocab_size"] = tp.VOCAB
    head = np.zeros((tp.VOCAB, tp.HIDDEN), "f4")
    head[_ids(case)] = as_f32(case.t["lm_head.weight"])
    case.t["lm_head.weight"] = bf16(head)
    case.t["d2t"] = np.zeros(tp.VOCAB, dtype="<i8")
    case.t["t2d"] = np.ones(tp.VOCAB, dtype="?")
    case.contract = None


@mutant
def vocab_of_500(case: Case) -> None:
    case.c["vocab_size"] = 500


@mutant
def vocab_of_600(case: Case) -> None:
    case.c["vocab_size"] = 600


@mutant
def draft_size_in_vocab_size(case: Case) -> None:
    case.c["vocab_size"] = tp.DRAFT_VOCAB
    del case.c["draft_vocab_size"]


@mutant
def eos_cannot_be_drafted(case: Case) -> None:
    ids = _ids(case)
    case.pair.target_config["eos_token_id"] = next(i for i in range(tp.VOCAB) if i not in set(ids.tolist()))
    case.contract = None


@mutant
def map_of_another_run(case: Case) -> None:
    rng = np.random.default_rng(5)
    keep = {2}
    ids = np.sort(np.array([2, *[i for i in rng.permutation(tp.VOCAB) if i not in keep][: tp.DRAFT_VOCAB - 1]]))
    case.t["d2t"] = offsets(ids)
    case.t["t2d"] = np.isin(np.arange(tp.VOCAB), ids)


@mutant
def answers_not_covered(case: Case) -> None:
    have = set(_ids(case).tolist())
    outside = [i for i in range(tp.VOCAB) if i not in have]
    case.rows = [[1, 2, 3, *outside[:40], *sorted(have)[:40]]]
