"""Tensors that reach a layer beside its hidden state and must be computed anew in every step.

Four kinds, each with a key that is unique within the model:

- `prologue/N`: computed before the first layer from parameters, such as gemma4's per-layer
  embeddings, zamba2's first hidden state or a learned position bias.
- `output/N`: the N-th item of what a layer returns, if the next layer takes it, such as zaya's
  router state or the token choice of a shared sparse-attention index.
- `ARGUMENT/NAME/N`: an entry that a layer writes into a container which later layers read, such as
  gemma4's shared keys and values.

- `experts/N`: what the first half of a layer gives to its experts and to its second half, where
  experts are streamed in parts (`models/parts.py`).

A block reads what the blocks before it have written, the latest of each key.  The gradients that
arrive at such a tensor are summed and go to the block that wrote it.
"""

from collections import UserDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CarriedTensor:
    """Stands in a layer call for a carried tensor."""

    key: str

    def resolve(self, carried: Mapping[str, Tensor]) -> Tensor:
        """The tensor itself."""
        return carried[self.key]


@dataclass(frozen=True, kw_only=True)
class CarriedContainer:
    """Stands in a layer call for a mapping from names to tuples of tensors."""

    cls: type[UserDict[str, tuple[Tensor, ...]]]
    argument: str

    def resolve(self, carried: Mapping[str, Tensor]) -> UserDict[str, tuple[Tensor, ...]]:
        """A container with the entries that earlier layers have written."""
        entries: dict[str, list[Tensor]] = {}
        for key, tensor in carried.items():
            if key.startswith(f"{self.argument}/"):
                entries.setdefault(key.split("/")[1], []).append(tensor)
        return self.cls({name: tuple(tensors) for name, tensors in entries.items()})

    def written(self, container: Any, carried: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The entries of a resolved container that a layer has put there since."""
        return {
            key: tensor
            for name, tensors in container.items()
            for position, tensor in enumerate(tensors)
            if carried.get(key := f"{self.argument}/{name}/{position}") is not tensor
        }


StandIn = CarriedTensor | CarriedContainer


def written_outputs(
    output: Any, keys: frozenset[str], carried: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The items of a layer's output that the next layer takes, unless they were only passed on."""
    if isinstance(output, Tensor):
        return {}
    return {
        key: item
        for position, item in enumerate(output)
        if (key := f"output/{position}") in keys
        and isinstance(item, Tensor)
        and carried.get(key) is not item
    }


class CarriedTensors:
    """What blocks have written for one micro-batch, and the sums of the gradients that came back.

    They stay on the device from the forward pass to the backward pass of the block that wrote
    them, as block inputs do.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, str], Tensor] = {}  # (producer, key), in forward order
        self._gradients: dict[tuple[int, str], Tensor] = {}

    def add(self, block: int, written: Mapping[str, Tensor], *, latest_only: bool = False) -> None:
        """Keep what a block has written in the forward pass.

        Args:
            latest_only: no backward follows, so that what stood under these keys is not needed.
        """
        if latest_only:
            self._tensors = {at: t for at, t in self._tensors.items() if at[1] not in written}
        self._tensors |= {(block, key): tensor for key, tensor in written.items()}

    def before(self, block: int, keys: Collection[str] | None = None) -> dict[str, Tensor]:
        """What a block reads: the latest of each key, or of `keys` only."""
        return {
            key: self._tensors[producer, key]
            for key, producer in self._producers(block)
            if keys is None or key in keys
        }

    def differentiable(
        self, block: int, lowest_producer: int, keys: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """Keys of what a block reads whose gradient is wanted.

        Those whose producer, or a block before it, is trained.
        """
        return tuple(
            key
            for key, producer in self._producers(block)
            if (keys is None or key in keys)
            and producer >= lowest_producer
            and self._tensors[producer, key].is_floating_point()
        )

    def add_gradients(self, block: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Add what came out of a block's backward to the sum of each tensor that it read."""
        producers = dict(self._producers(block))
        for key, gradient in gradients.items():
            if gradient is None:
                continue
            place = (producers[key], key)
            known = self._gradients.get(place)
            self._gradients[place] = gradient if known is None else known + gradient

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept, what several share counted once."""
        storages = (tensor.untyped_storage() for tensor in self._tensors.values())
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def take_gradients(self, block: int) -> dict[str, Tensor]:
        """Gradients by key of what a block wrote and later ones used; all of it is dropped."""
        written = [key for producer, key in self._tensors if producer == block]
        for key in written:
            del self._tensors[block, key]
        return {
            key: self._gradients.pop((block, key))
            for key in written
            if (block, key) in self._gradients
        }

    def _producers(self, block: int) -> list[tuple[str, int]]:
        latest = {key: producer for producer, key in self._tensors if producer < block}
        return list(latest.items())
