"""From a checkpoint back to the state of every block, one tensor at a time."""

from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from megatrain.checkpoint.contents import STATE_PURPOSES, Read, state_file, state_name
from megatrain.errors import UserError
from megatrain.layout import Purpose
from megatrain.masters import join_master
from megatrain.memory import BlockStore
from megatrain.models import BlockModel
from megatrain.models.stages import ExpertRange
from megatrain.models.weights import LoadReport, load_block_weights


def restore_state(store: BlockStore, model: BlockModel, folder: Path) -> None:
    """Residuals and moments into a store that has the weights of the same checkpoint.

    Args:
        store: where the blocks live changes nothing.
        model: its blocks; in how many parts experts are streamed changes nothing.
        folder: a checkpoint, verified.

    Raises:
        UserError: if it belongs to a model with other parameters, or to another selection.
    """
    for whole in range(len(model.whole.blocks)):
        path, expected = folder / state_file(whole), set[str]()
        for block in model.blocks_of(whole):
            with store.changing(block, STATE_PURPOSES) as state:
                targets = {
                    state_name(purpose, name): tensor
                    for purpose, tensors in state.items()
                    for name, tensor in tensors.items()
                }
                if targets:
                    _restore_block(targets, model.experts_of(block), path, folder)
                expected |= targets.keys()
        if expected or path.exists():
            _check_names(expected, path, folder)


def _restore_block(
    targets: dict[str, Tensor], experts: ExpertRange | None, path: Path, folder: Path
) -> None:
    """Copy whole tensors, or rows of them."""
    if not path.exists():
        raise _another(folder, f"no {path.name}")
    with safe_open(path, framework="pt") as file:
        stored = set(file.keys())
        for name, target in targets.items():
            if name not in stored:
                raise _another(folder, f"other tensors in {path.name}")
            source = file.get_slice(name)
            shape = tuple(source.get_shape())
            if experts is None and shape == tuple(target.shape):
                target.copy_(file.get_tensor(name))
            elif experts is not None and shape[1:] == target.shape[1:] and shape[0] >= experts.end:
                target.copy_(source[experts.first : experts.end])
            else:
                raise _another(folder, f"another shape of {name}")


def _check_names(expected: set[str], path: Path, folder: Path) -> None:
    with safe_open(path, framework="pt") as file:
        if set(file.keys()) != expected:
            raise _another(folder, f"other tensors in {path.name}")


def join_steps(model: BlockModel, steps: Sequence[int]) -> list[int]:
    """Adam's step counts as a checkpoint holds them: one of each block of whole layers.

    Where blocks of one layer differ (one of them was skipped), those of the blocks as they are.
    """
    counts = [
        {steps[block] for block in model.blocks_of(whole) if model.blocks[block].layout.trainable}
        for whole in range(len(model.whole.blocks))
    ]
    if any(len(each) > 1 for each in counts):
        return list(steps)
    return [max(each, default=0) for each in counts]


def cut_steps(model: BlockModel, steps: Sequence[int]) -> list[int]:
    """The step count of every block; see `join_steps`.

    Raises:
        UserError: if blocks of a layer differ, and its experts were in another number of parts.
    """
    if len(steps) == len(model.whole.blocks):
        return [steps[model.whole_of(block)] for block in range(len(model.blocks))]
    if len(steps) != len(model.blocks):
        raise UserError(
            asked="resume_from_checkpoint with another number of expert_parts",
            found="parts of a layer that were not updated equally often",
            change="resume with the expert_parts of training_state/config.yaml",
        )
    return list(steps)


def _another(folder: Path, found: str) -> UserError:
    return UserError(
        asked=f"resume_from_checkpoint: {folder}",
        found=f"{found}: it is of another model, or other parameters were trained",
        change="resume with the config in training_state/config.yaml",
    )


def masters_of(model: BlockModel, folder: Path) -> Read:
    """Reads the masters in a checkpoint, or the weights of a model directory, in block order.

    The function returned takes 0, 1, 2 ... and gives a whole layer's tensors by full name, fp32.
    """
    source = load_block_weights(model.whole, folder, LoadReport(), complete=True)

    def read(block: int) -> dict[str, Tensor]:
        index, tensors = next(source)
        assert index == block, "blocks are read in their order"
        path = folder / state_file(block)
        masters = {name: tensor.float() for name, tensor in tensors.items()}
        if not path.exists():
            return masters
        with safe_open(path, framework="pt") as file:
            stored = set(file.keys())
            for name, weight in masters.items():
                residual = state_name(Purpose.RESIDUAL, name)
                if residual in stored:
                    masters[name] = join_master(weight.bfloat16(), file.get_tensor(residual))
        return masters

    return read
