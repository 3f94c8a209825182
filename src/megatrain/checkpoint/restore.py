"""From a checkpoint back to the state of every block, one tensor at a time."""

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from megatrain.checkpoint.contents import STATE_PURPOSES, Read, state_file, state_name
from megatrain.errors import UserError
from megatrain.layout import Purpose
from megatrain.masters import join_master
from megatrain.memory import BlockStore
from megatrain.models import BlockModel
from megatrain.models.weights import LoadReport, load_block_weights


def restore_state(store: BlockStore, folder: Path) -> None:
    """Residuals and moments into a store that has the weights of the same checkpoint.

    Args:
        store: where the blocks live changes nothing.
        folder: a checkpoint, verified.

    Raises:
        UserError: if it belongs to a model with other parameters, or to another selection.
    """
    for block in range(len(store.layouts)):
        path = folder / state_file(block)
        with store.changing(block, STATE_PURPOSES) as state:
            targets = {
                state_name(purpose, name): tensor
                for purpose, tensors in state.items()
                for name, tensor in tensors.items()
            }
            if targets or path.exists():
                _restore_block(targets, path, folder)


def _restore_block(targets: dict[str, Tensor], path: Path, folder: Path) -> None:
    if not path.exists():
        raise _another(folder, f"no {path.name}")
    with safe_open(path, framework="pt") as file:
        if set(file.keys()) != set(targets):
            raise _another(folder, f"other tensors in {path.name}")
        for name, target in targets.items():
            if tuple(file.get_slice(name).get_shape()) != tuple(target.shape):
                raise _another(folder, f"another shape of {name}")
            target.copy_(file.get_tensor(name))


def _another(folder: Path, found: str) -> UserError:
    return UserError(
        asked=f"resume_from_checkpoint: {folder}",
        found=f"{found}: it is of another model, or other parameters were trained",
        change="resume with the config in training_state/config.yaml",
    )


def masters_of(model: BlockModel, folder: Path) -> Read:
    """Reads the masters in a checkpoint, or the weights of a model directory, in block order.

    The function returned takes 0, 1, 2 ... and gives a block's tensors by full name, fp32.
    """
    source = load_block_weights(model, folder, LoadReport(), complete=True)

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
