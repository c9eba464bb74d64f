"""The train stage: states and draft vocab in, the best native checkpoint out (train/best)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.contract import Contract, DrafterSizes, require_agreement
from draftsmith.errors import UserError
from draftsmith.record import content_hash, folder_hash
from draftsmith.stage import Run, Stage

if TYPE_CHECKING:
    import torch

    from draftsmith.drafter.config import DrafterConfig
    from draftsmith.drafter.model import Drafter
    from draftsmith.train.objective import TargetHead


def _inputs(run: Run) -> dict[str, str]:
    found = {"extract": run.output_hash("extract"), "vocab": run.output_hash("vocab")}
    if run.recipe.train.from_:
        found["from"] = folder_hash(Path(run.recipe.train.from_).expanduser())
    if run.recipe.train.select == "engine":
        from draftsmith.bench.stage import engine_label

        found["engine"] = content_hash(engine_label(run.recipe))
    return found


def settle_contract(run: Run, draft_vocab_size: int, map_hash: str) -> Contract:
    """The states' contract with the draft vocab; UserError where states and vocab are not of one run."""
    states = Contract.load(run.stage_dir("extract"))
    require_agreement(states, Contract.load(run.stage_dir("vocab")), "the states", "the draft vocab")
    if states.final_state != "pre_norm":
        raise UserError(
            f"the states' final state is {states.final_state!r}",
            "the teacher is made from the state before the final norm; norming it twice would teach other tokens",
            "extract again",
        )
    return states.with_(draft_vocab_size=draft_vocab_size, vocab_map_hash=map_hash)


def finish_contract(contract: Contract, config: DrafterConfig, trained_length: int, ttt_steps: int) -> Contract:
    """The contract that goes with the checkpoint."""
    sizes = DrafterSizes(
        form=config.form,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
    )
    return contract.with_(
        norms=config.norms.model_dump(),
        rope=config.rope,
        sizes=sizes.model_dump(),
        trained_length=trained_length,
        ttt_steps=ttt_steps,
    )


def pick_device(section: Any) -> tuple[torch.device, torch.dtype]:
    """A GPU where there is one; bfloat16 there, float32 on a CPU, unless the recipe says otherwise."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    name = section.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    return device, getattr(torch, name)


def rounds_products(section: Any, device: torch.device) -> bool:
    """Whether training steps multiply in bfloat16 though everything is float32: on a CPU that can, unless the recipe says
    float32."""
    from draftsmith.train.precision import has_bf16_products

    return device.type == "cpu" and section.dtype is None and has_bf16_products()


def start_model(run: Run, contract: Contract, target: Path, vocab: Any) -> tuple[Drafter, TargetHead]:
    """The drafter with its first weights (float32, on the CPU, for unscaled states) and the teacher's head."""
    import torch

    from draftsmith.drafter.model import Drafter
    from draftsmith.target.config import load_config
    from draftsmith.target.weights import read_embedding
    from draftsmith.train.init import drafter_config, first_weights, target_head

    section, ui = run.recipe.train, run.ui
    head = target_head(target, vocab.draft_to_target().tolist())
    embedding = read_embedding(target)
    d2t, t2d = torch.as_tensor(vocab.d2t), torch.as_tensor(vocab.t2d)
    if section.from_:
        from draftsmith.train.start import drafter_from, read_start

        found = read_start(Path(section.from_).expanduser(), contract, run.recipe.drafter)
        model, notes = drafter_from(found, d2t, t2d, head, embedding)
        for note in notes:
            ui.note(f"from {section.from_}: {note}")
        return model, head
    model = Drafter(drafter_config(run.recipe.drafter, load_config(target), contract))
    model.set_vocab(d2t, t2d)
    if model.embed_tokens is None:
        model.attach_embedding(embedding.float())
    taken = first_weights(model, target, head, section.init, section.seed, embedding)
    if taken:
        ui.note(f"from the target: {', '.join(taken)}")
    return model, head


def open_source(run: Run, folder: Path) -> AbstractContextManager[Any]:
    """Stored or live states, or a stream."""
    if run.recipe.train.stream == "off":
        from draftsmith.extract.source import open_states

        return nullcontext(open_states(run))
    from draftsmith.extract.streamed import open_stream

    run.output_hash("extract")
    return open_stream(run, folder)


def _work(run: Run, folder: Path) -> dict[str, Any]:
    return select(run, folder, train_on(run, folder))


def select(run: Run, folder: Path, figures: dict[str, Any]) -> dict[str, Any]:
    """With `train.select: engine` the engine's choice among the kept checkpoints becomes `best`; the trainer's memory is
    free by then. One process does this, rank 0."""
    if run.recipe.train.select == "offline":
        return figures
    import gc

    import torch

    from draftsmith.bench.choose import choose_by_engine

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return figures | choose_by_engine(run, folder) | {"output_hash": folder_hash(folder / "best")}


def train_on(run: Run, folder: Path) -> dict[str, Any]:
    """The training itself; with a process group up, the part of one rank (rank 0 writes)."""
    with open_source(run, folder) as source:
        return _train_from(run, folder, source)


def _train_from(run: Run, folder: Path, source: Any) -> dict[str, Any]:
    from draftsmith.capture.rows import iter_rows
    from draftsmith.target.resolve import resolve_target
    from draftsmith.train.candidates import KeepingTraining
    from draftsmith.train.core import build
    from draftsmith.train.data import channel_rms, first_tokens, require_answers, split_rows
    from draftsmith.train.loop import HELD_OUT_TOKENS, Training
    from draftsmith.vocab.map import VocabMap

    section, ui = run.recipe.train, run.ui
    vocab = VocabMap.load(run.stage_dir("vocab"))
    contract = settle_contract(run, len(vocab.d2t), vocab.hash())
    prompts = {r.row_id: r.prompt_id for r in iter_rows(run.stage_dir("capture"))}
    split = split_rows(source.index, section.held_out_rows, lambda row_id: prompts.get(row_id, row_id))
    require_answers(split.train)
    if section.select == "engine":
        from draftsmith.bench.choose import held_out_prompts

        held_out_prompts(run, {e.row_id for e in split.held_out})  # before the training, not after it
    ui.note(f"{len(split.train)} rows to train on, {len(split.held_out)} held out")
    streamed = section.stream != "off"
    if streamed:
        kept = first_tokens(split.held_out, HELD_OUT_TOKENS)
        source.keep([e.row_id for e in kept])
        split = replace(split, held_out=[e for e in kept if e.row_id in source.kept_ids])
    target = resolve_target(run.recipe.target)
    model, head = start_model(run, contract, target, vocab)
    config = model.config
    rms = None
    if not (config.norms.norm_before_fc or config.norms.fc_norm):
        # a stream takes the scale from the rows that it has made already; the held-out ones are of the same kind
        rms = channel_rms(source, split.held_out if streamed else split.train)
        if section.from_:
            model.fc.weight.data.mul_(rms)
    device, dtype = pick_device(section)
    model = model.to(device, dtype)
    core = build(model, head.to(device, dtype), section)
    longest = min(max(e.tokens for e in split.train), section.batch_tokens)
    kind = KeepingTraining if section.select == "engine" else Training
    training = kind(
        core=core,
        source=source,
        split=split,
        section=section,
        contract=finish_contract(contract, config, longest, section.ttt_steps),
        folder=folder,
        ui=ui,
        rms=rms,
        device=device,
        dtype=dtype,
        bf16_products=rounds_products(section, device),
        measure_start=bool(section.from_),
    )
    figures = training.run()
    if streamed:
        f = source.figures
        figures["stream"] = {
            "packs": f.packs,
            "peak_bytes": f.peak,
            "trainer_waited_seconds": round(f.starved, 1),
            "engines_waited_seconds": round(f.blocked, 1),
        }
    return figures | {
        "rows": len(split.train),
        "held_out_rows": len(split.held_out),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        **({"products": "bfloat16"} if training.bf16_products else {}),
        "output_hash": folder_hash(folder / "best"),
    }


STAGE = Stage("train", ("drafter", "train"), _inputs, _work, apart=("train.context_parallel",))
