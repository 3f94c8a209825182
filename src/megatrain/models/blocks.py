"""A causal LM as embed, decoder layers and head, each a pure function of its parameters.

Shape legend: B rows, T tokens, D hidden size, N tokens of a chunk, V vocabulary.

Promise: every function computes what Hugging Face's own forward computes, because it *is* that
forward: the prologue stops at the last recorder, the epilogue starts there.  Parameters are
arguments and are never stored; buffers are the model's own.
"""

from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.layout import BlockLayout
from megatrain.models.build import COMPUTE_DTYPES, rope_types, text_config
from megatrain.models.carried import (
    CarriedContainer,
    CarriedTensor,
    StandIn,
    written_outputs,
)
from megatrain.models.packing import Packing, packed_inputs
from megatrain.models.recorder import (
    Chain,
    LayerCall,
    PrologueDone,
    as_layer_output,
    first_tensor,
    recorders_in,
)
from megatrain.models.stages import ExpertRange, Role, Stage

__all__ = ["Block", "BlockKind", "BlockModel", "LayerCall", "Role"]

Params = Mapping[str, Tensor]


class BlockKind(StrEnum):
    """What part of the model a block is."""

    EMBED = "embed"
    LAYER = "layer"
    HEAD = "head"
    UNUSED = "unused"
    """Parameters that no forward reaches: stored and saved, never streamed or trained."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One unit of streaming: the parameters that are fetched and updated together."""

    index: int
    name: str
    kind: BlockKind
    layout: BlockLayout
    """Names are full names in the model's state dict."""


@dataclass(kw_only=True)
class BlockModel:
    """A Hugging Face model split into blocks.

    `blocks` are embed, the layers in forward order, head and, if there are any, unused ones.  Where
    experts are streamed in parts, several blocks make a layer (`stages`).
    """

    hf_model: Any
    """The transformers model; parameters on meta, buffers real."""
    container: nn.ModuleList
    container_name: str
    blocks: tuple[Block, ...]
    compute_dtype: str
    tied: dict[str, str]
    """Alias name -> owner name; only owners stand in layouts."""
    shared: tuple[str, ...]
    """Parameters of embed that the head uses too (tied embeddings)."""
    layer_outputs: tuple[tuple[Any, ...] | None, ...]
    """Per layer: None if it returns a tensor, else the items that follow the hidden state."""
    carried: tuple[dict[int, str], ...]
    """Per layer: position of a leaf in its call -> key of the carried tensor that it is."""
    random: bool
    """Whether anything random (dropout, jitter) happens in training mode."""
    packing: Packing | None = None
    """How it is told of several samples in a row; None unless that is proved."""
    stages: tuple[Stage, ...] = ()
    """Of the blocks between embed and head, if layers are cut; empty: each is a layer."""
    uncut: "BlockModel | None" = None
    """The same with whole layers, if layers are cut here: what is on a disk is of these."""
    generation_config: str | None = None
    """The text of the source's `generation_config.json`, which goes where the model goes."""

    @property
    def config(self) -> Any:
        return self.hf_model.config

    @property
    def vocab_size(self) -> int:
        size: int = text_config(self.config).vocab_size
        return size

    @property
    def hidden_size(self) -> int:
        """D."""
        return int(text_config(self.config).hidden_size)

    @property
    def max_positions(self) -> int | None:
        """Tokens of a row that the model was made for, if its config says."""
        positions: int | None = getattr(text_config(self.config), "max_position_embeddings", None)
        return positions

    @property
    def learned_positions(self) -> int | None:
        """Tokens of a row behind which there is no position; None where they are computed.

        With longrope, those up to which a position means the same whatever the micro-batch is: a
        longer row, or padding, would change the angles of every row beside it.
        """
        if "longrope" in rope_types(text_config(self.config)):
            return self._longrope_positions
        rotary = getattr(text_config(self.config), "rope_parameters", None)
        return None if rotary else self.max_positions

    @property
    def _longrope_positions(self) -> int | None:
        config = text_config(self.config)
        original: int | None = config.rope_parameters.get("original_max_position_embeddings")
        if original is None:
            original = getattr(config, "original_max_position_embeddings", None)
        return original or self.max_positions

    @property
    def num_layers(self) -> int:
        return len(self.container)

    @property
    def num_stages(self) -> int:
        """Blocks between embed and head."""
        return len(self.stages) or self.num_layers

    @property
    def whole(self) -> "BlockModel":
        """The model with whole layers: itself, unless some are cut."""
        return self.uncut or self

    @property
    def additive(self) -> frozenset[int]:
        """Blocks that add to their input without looking at it."""
        return frozenset(n for n, stage in enumerate(self.stages, start=1) if stage.role.additive)

    def layer_of(self, stage: int) -> int:
        """The layer that a block between embed and head belongs to; both 0-based."""
        return self.stages[stage].layer if self.stages else stage

    def reads(self, stage: int) -> frozenset[str] | None:
        """Keys of the carried tensors that it reads; None: whatever there is."""
        return self.stages[stage].role.reads if self.stages else None

    def blocks_of(self, whole: int) -> range:
        """The blocks that make one block of the uncut model."""
        if not self.stages or whole == 0:
            return range(whole, whole + 1)
        beyond = whole - 1 - self.num_layers
        if beyond >= 0:
            return range(self.num_stages + 1 + beyond, self.num_stages + 2 + beyond)
        mine = [n for n, stage in enumerate(self.stages, start=1) if stage.layer == whole - 1]
        return range(mine[0], mine[-1] + 1)

    def whole_of(self, block: int) -> int:
        """The block of the uncut model that a block is part of."""
        if not self.stages or block == 0:
            return block
        beyond = block - 1 - self.num_stages
        return self.num_layers + 1 + beyond if beyond >= 0 else self.stages[block - 1].layer + 1

    def cut(self, block: int, tensors: Params) -> dict[str, Tensor]:
        """A block's share of whole parameters by full name; views."""
        experts = self.experts_of(block)
        rows = slice(None) if experts is None else slice(experts.first, experts.end)
        layout = self.blocks[block].layout
        return {
            p.name: tensors[p.name][rows] if experts else tensors[p.name] for p in layout.params
        }

    def experts_of(self, block: int) -> ExpertRange | None:
        """Which rows of its parameters a block holds; None: all."""
        inside = self.stages and 0 < block <= self.num_stages
        return self.stages[block - 1].experts if inside else None

    @property
    def embed(self) -> Block:
        return self.blocks[0]

    @property
    def head(self) -> Block:
        return self.blocks[self.num_stages + 1]

    @property
    def unused(self) -> tuple[Block, ...]:
        """Parameters that no logit depends on; the forward may touch them all the same."""
        return self.blocks[self.num_stages + 2 :]

    @property
    def num_params(self) -> int:
        """Parameters, tied ones counted once."""
        return sum(block.layout.num_params for block in self.blocks)

    def move_buffers(self, device: torch.device) -> None:
        """Move every buffer to the compute device."""
        for module in self.hf_model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        for stage in self.stages:
            stage.constants.update({n: each.to(device) for n, each in stage.constants.items()})

    def train(self, mode: bool) -> None:
        """Switch dropout and the like on or off."""
        self.hf_model.train(mode)

    def prologue(
        self, params: Params, ids_BT: Tensor, positions_BT: Tensor | None = None
    ) -> tuple[Tensor, list[LayerCall], dict[str, Tensor]]:
        """Everything before the first layer.

        Args:
            params: the embed block's parameters by full name, on the compute device.
            ids_BT: token ids, padded on the right.  No padding mask is needed: attention and
                recurrence are causal, so a token never sees the padding behind it.
            positions_BT: of each token in its sample, if rows are packed.

        Returns:
            The first layer's hidden state (B, T, D), the arguments of every layer, and the
            carried tensors that the layers take from here, by key.
        """
        inputs = {"input_ids": ids_BT, "use_cache": False}
        if positions_BT is not None:
            assert self.packing is not None
            dtype = COMPUTE_DTYPES[self.compute_dtype]
            inputs |= packed_inputs(self.packing, self.config, positions_BT, dtype)
        chain, calls, first = Chain(), [], []
        written: dict[str, Tensor] = {}

        def on_call(index: int, hidden: Tensor, call: LayerCall) -> Any:
            chain.check(index, hidden)
            if index == 0:
                first.append(hidden)
            calls.append(self._with_stand_ins(index, call, written))
            if index == self.num_layers - 1:
                raise PrologueDone
            return as_layer_output(self.layer_outputs[index], chain.hand_out(hidden))

        with recorders_in(self.container, on_call):
            try:
                functional_call(self.hf_model, dict(params), (), inputs)
            except PrologueDone:
                pass
        assert len(calls) == self.num_layers, f"{len(calls)} of {self.num_layers} layers called"
        return first[0], calls, written

    def embedding(
        self, tensors: Params, ids_BT: Tensor, call: Any = None, carried: Params | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`prologue` in the form of a layer: the hidden state, and the carried tensors.

        Args:
            tensors: parameters.
            ids_BT: token ids.
            call: positions of packed rows, or None.
            carried: what a layer would be given.
        """
        del carried
        y_BTD, _, written = self.prologue(tensors, ids_BT, call)
        return y_BTD, written

    def _with_stand_ins(self, index: int, call: LayerCall, written: dict[str, Tensor]) -> LayerCall:
        """The call without what is computed anew in every step; the prologue's part is kept."""
        keys = self.carried[index]
        stand_ins: dict[int, StandIn] = {}
        for position, leaf in enumerate(call.leaves):
            if position in keys:
                stand_ins[position] = CarriedTensor(key=keys[position])
                if keys[position].startswith("prologue/"):
                    written[keys[position]] = leaf
            elif isinstance(leaf, UserDict):
                name = next(key for key, value in call.kwargs.items() if value is leaf)
                stand_ins[position] = CarriedContainer(cls=type(leaf), argument=name)
        return call.replace_leaves(stand_ins) if stand_ins else call

    def layer(
        self,
        index: int,
        params: Params,
        x_BTD: Tensor,
        call: LayerCall,
        carried: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One decoder layer, or a stage of one.

        Args:
            index: of the block between embed and head, 0-based.
            params: the layer's parameters by full name, or by their name in the layer.
            x_BTD: its input.
            call: what `prologue` recorded for it.
            carried: what the blocks before it have written, the latest of each key.

        Returns:
            Its output, and the carried tensors that it writes.
        """
        prefix = self.layer_prefix(index)
        local = {name.removeprefix(prefix): tensor for name, tensor in params.items()}
        if self.stages:
            local |= self.buffers(index)
            return self.stages[index].role.layer(local, x_BTD, call, carried)
        return run_layer(self.container[index], local, x_BTD, call, carried, self.carried_keys)

    def buffers(self, index: int) -> dict[str, Tensor]:
        """Buffers, and constants of a stage, by their name in the layer."""
        buffers = dict(self.container[self.layer_of(index)].named_buffers())
        return buffers | self.stages[index].constants if self.stages else buffers

    def layer_prefix(self, index: int) -> str:
        """What the names of a layer's parameters begin with."""
        return f"{self.container_name}.{self.layer_of(index)}."

    @cached_property
    def carried_keys(self) -> frozenset[str]:
        return frozenset(key for keys in self.carried for key in keys.values())

    def epilogue(self, params: Params, hidden_ND: Tensor) -> Tensor:
        """Everything behind the last layer, for one chunk of tokens.

        Args:
            params: the head block's parameters and the shared ones, by full name.
            hidden_ND: the last layer's output for N tokens, in any order.

        Returns:
            logits (N, V) in the compute dtype.
        """
        device = hidden_ND.device
        stand_ins = {
            placed.name: torch.zeros((), dtype=COMPUTE_DTYPES[segment.dtype], device=device).expand(
                placed.shape
            )
            for block in (self.embed, *self.unused)
            for segment in block.layout.segments
            for placed in segment.params
            if placed.name not in params
        }
        hidden_1ND = hidden_ND.unsqueeze(0)

        def on_call(index: int, hidden: Tensor, call: LayerCall) -> Any:
            last = index == self.num_layers - 1
            return as_layer_output(self.layer_outputs[index], hidden_1ND if last else hidden)

        ids_1N = torch.zeros(hidden_1ND.shape[:2], dtype=torch.long, device=device)
        with recorders_in(self.container, on_call):
            output = functional_call(
                self.hf_model,
                {**stand_ins, **params},
                (),
                {"input_ids": ids_1N, "use_cache": False},
            )
        logits_NV: Tensor = output.logits[0]
        return logits_NV


def run_layer(
    module: nn.Module,
    tensors: Params,
    x_BTD: Tensor,
    call: LayerCall,
    carried: Mapping[str, Tensor],
    carried_keys: frozenset[str],
) -> tuple[Tensor, dict[str, Tensor]]:
    """One layer as a pure function; see `BlockModel.layer`.

    Args:
        module: whose forward is run.
        tensors: its parameters, and buffers that are not to be its own, by name in the layer.
        x_BTD: its input.
        call: what the prologue recorded for it.
        carried: what the blocks before it have written.
        carried_keys: keys under which items of an output are carried.
    """
    resolved = {leaf: leaf.resolve(carried) for leaf in call.leaves if isinstance(leaf, StandIn)}
    args, kwargs = call.bind(x_BTD, resolved)
    output = functional_call(module, dict(tensors), args, kwargs)
    written = written_outputs(output, carried_keys, carried)
    for leaf, value in resolved.items():
        if isinstance(leaf, CarriedContainer):
            written |= leaf.written(value, carried)
    return first_tensor(output), written
