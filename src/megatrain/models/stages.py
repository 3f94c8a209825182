"""What a block between embed and head computes, where layers are cut into several."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatrain.models.recorder import LayerCall

Params = Mapping[str, Tensor]


class Role(Protocol):
    """What a block between embed and head computes."""

    @property
    def additive(self) -> bool:
        """Whether it adds to its input without looking at it: backward does not need the input."""

    @property
    def reads(self) -> frozenset[str] | None:
        """Keys of the carried tensors that it reads; None: whatever there is."""

    def layer(
        self, tensors: Params, x_BTD: Tensor, call: LayerCall, carried: Params
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As `BlockModel.layer`; `tensors` are parameters *and* buffers by name in the layer."""


@dataclass(frozen=True, kw_only=True)
class ExpertRange:
    """Which of a layer's experts a block holds: rows of its fused parameters."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


FIRST_EXPERT = "first expert"
"""Of a part, as a tensor among its buffers: so that one program serves all parts of one size."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A block between embed and head, where layers are cut."""

    layer: int
    """Position in the container."""
    role: Role
    experts: ExpertRange | None = None
    """None: it holds whole parameters."""
    constants: dict[str, Tensor] = field(default_factory=dict)
    """What `role` takes beside parameters and buffers."""

    @classmethod
    def of_experts(cls, layer: int, role: Role, experts: ExpertRange) -> "Stage":
        """Of a part."""
        first = torch.tensor(experts.first)
        return cls(layer=layer, role=role, experts=experts, constants={FIRST_EXPERT: first})
