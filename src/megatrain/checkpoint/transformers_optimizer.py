"""The optimizer of a checkpoint that transformers' Trainer wrote: `optimizer.pt` to moments.

Trainer's AdamW has two groups, decayed parameters first, each in the order of the model's
parameters; its state is a list by that order.  Moments in bfloat16 are widened.
"""

import json
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.manifest import MANIFEST, TrainingState
from megatrain.errors import UserError
from megatrain.layout import Purpose
from megatrain.memory import BlockStore
from megatrain.models import BlockModel

OPTIMIZER = "optimizer.pt"
MOMENTS = (Purpose.EXP_AVG, Purpose.EXP_AVG_SQ)


def is_of_transformers(folder: Path) -> bool:
    """Whether transformers' Trainer wrote it."""
    files = (OPTIMIZER, "trainer_state.json")
    return all((folder / name).is_file() for name in files) and not (folder / MANIFEST).exists()


def read_trainer_state(folder: Path) -> TrainingState:
    """Its numbers; what Trainer does not write is empty."""
    found = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    known: dict[str, Any] = {"best_metric": None, "best_global_step": None, "log_history": []}
    return TrainingState(
        step=found["global_step"],
        skipped_steps=0,
        tokens_seen=found.get("num_input_tokens_seen", 0),
        adam_steps=[],
        compute_dtype="",
        num_rows=0,
        rows_per_step=0,
        data_digest="",
        config={},
        trainer_state=known | {"global_step": found["global_step"]},
        versions={},
    )


def restore_optimizer(store: BlockStore, model: BlockModel, folder: Path) -> None:
    """Moments and Adam's step counts into a store that has the weights.

    Raises:
        UserError: if it is no AdamW, or one of other parameters.
    """
    saved = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
    names = _in_order_of_trainer(model)
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    if len(indices) != len(names):
        found = f"the state of {len(indices)} parameters, and {len(names)} are trained here"
        raise _unfit(folder, found)
    state = dict(zip(names, (saved["state"].get(index, {}) for index in indices), strict=True))
    for block in range(len(store.layouts)):
        steps, experts = set(), model.experts_of(block)
        with store.changing(block, MOMENTS) as moments:
            for purpose, targets in moments.items():
                for name, target in targets.items():
                    of_param: dict[str, Any] = state[name]
                    tensor = of_param.get(purpose.value)
                    if tensor is not None and experts is not None:
                        tensor = tensor[experts.first : experts.end]
                    if tensor is None or tensor.shape != target.shape:
                        found = f"no {purpose.value} of the shape of {name}"
                        raise _unfit(folder, found)
                    target.copy_(tensor)
                    steps.add(int(of_param["step"]))
        if len(steps) > 1:
            raise _unfit(folder, f"step counts {sorted(steps)} in one block")
        store.adam_steps[block] = max(steps, default=0)


def _in_order_of_trainer(model: BlockModel) -> list[str]:
    """Trained parameters, those with weight decay first."""
    decayed = {
        param.name: segment.decayed
        for block in model.whole.blocks
        for segment in block.layout.segments
        if segment.trainable
        for param in segment.params
    }
    names = [name for name, _ in model.hf_model.named_parameters() if name in decayed]
    return sorted(names, key=lambda name: not decayed[name])


def _unfit(folder: Path, found: str) -> UserError:
    return UserError(
        asked=f"resume_from_checkpoint: {folder}, as transformers' Trainer wrote it",
        found=found,
        change="train the same parameters with AdamW, or start a new run from its model"
        f" (model_name_or_path: {folder})",
    )
