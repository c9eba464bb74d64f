"""The draft vocab map: which target token each draft id stands for. numpy only, so that `check` can use it.

`d2t` holds offsets: target id = i + d2t[i] (vllm/model_executor/models/llama_eagle3.py, compute_logits); `t2d` says for
each target id whether it can be drafted. Draft ids follow target ids in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.errors import UserError
from draftsmith.record import atomic_write

FILE = "vocab.safetensors"

Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class VocabMap:
    """d2t: int64 [D] offsets. t2d: bool [V]."""

    d2t: Ids
    t2d: np.ndarray[Any, np.dtype[np.bool_]]

    @staticmethod
    def from_ids(ids: Iterable[int], vocab_size: int) -> VocabMap:
        """The map of a set of target ids. ValueError for an id outside the vocabulary or given twice."""
        chosen = np.array(sorted(ids), dtype=np.int64)
        if len(chosen) and (chosen[0] < 0 or chosen[-1] >= vocab_size or (np.diff(chosen) == 0).any()):
            raise ValueError(f"ids must be distinct and within 0..{vocab_size - 1}")
        t2d = np.zeros(vocab_size, dtype=bool)
        t2d[chosen] = True
        return VocabMap(chosen - np.arange(len(chosen)), t2d)

    @property
    def draft_size(self) -> int:
        return len(self.d2t)

    @property
    def vocab_size(self) -> int:
        return len(self.t2d)

    def draft_to_target(self) -> Ids:
        """int64 [D]: the target id of each draft id."""
        return self.d2t + np.arange(len(self.d2t), dtype=np.int64)

    def target_to_draft(self) -> Ids:
        """int64 [V]: the draft id of each target id, −1 where it cannot be drafted."""
        out = np.full(len(self.t2d), -1, dtype=np.int64)
        out[self.draft_to_target()] = np.arange(len(self.d2t), dtype=np.int64)
        return out

    def hash(self) -> str:
        """Hex sha256 of both tensors' sizes and bytes."""
        digest = sha256(f"{len(self.d2t)}/{len(self.t2d)}/".encode())
        digest.update(np.ascontiguousarray(self.d2t, dtype="<i8").tobytes())
        digest.update(np.packbits(np.asarray(self.t2d, dtype=bool)).tobytes())
        return digest.hexdigest()

    def faults(self) -> list[str]:
        """What is wrong with the map, in words; empty if it is sound."""
        out = []
        if self.d2t.dtype != np.int64:
            out.append(f"d2t is {self.d2t.dtype}, not int64")
        if self.t2d.dtype != np.bool_:
            out.append(f"t2d is {self.t2d.dtype}, not bool")
        ids = self.draft_to_target()
        if (np.diff(ids) <= 0).any():
            out.append("i + d2t[i] is not strictly increasing")
        if len(ids) and (ids.min() < 0 or ids.max() >= len(self.t2d)):
            out.append(f"i + d2t[i] leaves the vocabulary of {len(self.t2d):,}")
        elif not np.array_equal(np.flatnonzero(self.t2d), np.sort(ids)):
            out.append("t2d and d2t name different tokens")
        return out

    def save(self, folder: Path) -> Path:
        """Write `folder/vocab.safetensors` atomically."""
        from safetensors.numpy import save

        path = folder / FILE
        atomic_write(path, save({"d2t": np.ascontiguousarray(self.d2t), "t2d": np.ascontiguousarray(self.t2d)}))
        return path

    @staticmethod
    def load(folder: Path) -> VocabMap:
        """Read `folder/vocab.safetensors`. UserError if it is missing, broken, or no sound map."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = folder / FILE if folder.is_dir() else folder
        try:
            tensors = load_file(path)
            found = VocabMap(tensors["d2t"], tensors["t2d"])
        except FileNotFoundError:
            raise UserError(
                f"{path} is missing", "it says which tokens the drafter proposes", "run draftsmith vocab first"
            ) from None
        except (SafetensorError, KeyError, OSError) as e:
            raise UserError(f"{path} cannot be read: {e}", "", "run draftsmith vocab again") from None
        if faults := found.faults():
            raise UserError(
                f"{path}: {'; '.join(faults)}",
                "the engine would propose other tokens than were trained, without a word",
                "run draftsmith vocab again",
            )
        return found
