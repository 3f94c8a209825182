"""Layers whose experts are streamed in parts: one layer becomes a chain of blocks.

    before     norms, attention, router, shared experts: all that the experts' output does not reach
    part       some of the experts each; adds what they give to the sum, in fp32, in order
    after      everything behind the experts

Which operations are before and after is read off the layer's own forward (`models/halves.py`); a
part is transformers' own experts module with fewer experts, to which the others are what they are
in its expert parallelism: on another device.  What passes between blocks beside the sum is
*carried*.  A part never looks at the sum that it is given, so that needs no memory until backward.

Promise: gradients differ from those of the whole layer by the order of summation only.
Price: what is carried stays on the device from forward to backward, some 4 times the layer's input.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.errors import UserError
from megatrain.layout import BlockLayout, ParamSpec
from megatrain.models.blocks import Block, BlockKind, BlockModel
from megatrain.models.build import COMPUTE_DTYPES, DISPATCHED
from megatrain.models.halves import (
    OUTPUT,
    ExpertsStandIn,
    Form,
    Halves,
    UncuttableError,
    X,
    leaf_name,
    trace_halves,
)
from megatrain.models.passes import Written
from megatrain.models.probe import stand_in_params
from megatrain.models.recorder import LayerCall
from megatrain.models.stages import FIRST_EXPERT, ExpertRange, Stage
from megatrain.models.templates import LayerTemplate, layer_templates

IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
"""Of transformers' experts: those that leave out experts of another device.

Its eager loops do so for some models and versions only."""
ROWS = "experts/rows"
"""Carried: a tensor (B, T, 0), for its shape."""
PROBE_TOKENS = 4
FEWEST = 2
"""Experts of a part: of a single one transformers computes all tokens, those of other parts too, as
it counts with `torch.histc(min=0, max=0)`, which takes the range of the data instead."""
CHANGE = "leave expert_parts out, or report this model type so that it can be added"

Tensors = Mapping[str, Tensor]


def carried_key(position: int) -> str:
    """Of the N-th tensor that the first half gives: 0 to 2 are the experts' arguments."""
    return f"experts/{position}"


def find_experts(layer: nn.Module) -> tuple[str, nn.Module] | None:
    """The fused experts in a layer, by name: parameters (experts, ...) that can be parted."""
    for name, module in layer.named_modules():
        count = getattr(module, "num_experts", None)
        fused = list(module.parameters(recurse=False))
        if DISPATCHED in module.__dict__ and fused and count:
            whole = len(fused) == len(list(module.parameters()))
            return (name, module) if whole and all(len(p) == count for p in fused) else None
    return None


def num_experts(model: BlockModel) -> int:
    """The most that a layer has, of those that can be parted; 0 if no layer has any."""
    found = (find_experts(layer) for layer in model.container.children())
    return max((int(each[1].num_experts) for each in found if each), default=0)  # type: ignore[arg-type]


def most_parts(model: BlockModel) -> int:
    """Blocks that the experts of a layer are in, at most; 0 where layers are whole."""
    of_layers = [stage.layer for stage in model.stages if stage.experts is not None]
    return max(map(of_layers.count, of_layers), default=0)


def carried_inputs(model: BlockModel) -> int:
    """Tensors of the size of a layer's input that blocks hand to later ones, of all layers."""
    # What the second half reads, but for the rows, and the experts' input.
    return sum(len(stage.role.reads) for stage in model.stages if isinstance(stage.role, After))


def parts_in_words(model: BlockModel) -> str:
    """How experts are streamed; empty where layers are whole."""
    parts = most_parts(model)
    return f"the experts of a layer are streamed in {parts} parts" if parts else ""


class LayerCut:
    """A layer in halves, for every layer that behaves alike.

    Args:
        template: of the layer; it is copied.
        dtypes: of its parameters by name in the layer.
    """

    def __init__(self, template: LayerTemplate, dtypes: Mapping[str, torch.dtype]) -> None:
        self._layer, self._dtypes = copy.deepcopy(template.module), dtypes
        found = find_experts(self._layer)
        assert found is not None
        self.name, self.experts = found
        parent, _, leaf = self.name.rpartition(".")
        self._stand_in = ExpertsStandIn(self.experts)
        self._layer.get_submodule(parent)._modules[leaf] = self._stand_in
        self._halves: dict[Form, Halves] = {}

    def halves(self, like: Tensor, width: int, call: LayerCall) -> Halves:
        """For an input (B, T, D) of `like`'s rows, dtype and device."""
        form = Form.of(like, width, call)
        if form not in self._halves:
            self._halves[form] = trace_halves(
                self._layer, self._stand_in, self._dtypes, form, call, carried_key
            )
        return self._halves[form]

    def part(self, count: int) -> nn.Module:
        """The experts' module with fewer experts; parameters on meta."""
        part = copy.deepcopy(self.experts)
        part.num_experts = count  # type: ignore[assignment]
        part._is_expert_parallel = True  # type: ignore[assignment]
        for name, param in part._parameters.items():
            if param is not None:
                part._parameters[name] = nn.Parameter(param[:count].detach())
        return part


def _leaves(call: LayerCall) -> dict[str, Tensor]:
    return {leaf_name(p): t for p, t in enumerate(call.leaves) if isinstance(t, Tensor)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Before:
    """The first half; gives a sum of nothing, and carries what the rest needs."""

    cut: LayerCut
    additive = False

    def layer(self, tensors: Tensors, x_BTD: Tensor, call: LayerCall, carried: Tensors) -> Written:
        """As `BlockModel.layer`."""
        del carried
        half = self.cut.halves(x_BTD, x_BTD.shape[-1], call).before
        found = half({**tensors, **_leaves(call), X: x_BTD})
        written = {carried_key(position): each for position, each in enumerate(found)}
        written[ROWS] = x_BTD.detach().new_empty((*x_BTD.shape[:2], 0))
        return torch.zeros_like(found[0], dtype=torch.float32), written

    @property
    def reads(self) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Some of the experts; adds to the sum, the last one gives it in the experts' dtype."""

    experts: nn.Module
    name: str
    """Of the experts in the layer."""
    count: int
    last: bool
    additive = True
    reads = frozenset(carried_key(position) for position in range(3))

    def layer(self, tensors: Tensors, x_BTD: Tensor, call: LayerCall, carried: Tensors) -> Written:
        """As `BlockModel.layer`; `x_BTD` is the sum so far, in the form of the experts' input."""
        del call
        hidden, index, weights = (carried[carried_key(position)] for position in range(3))
        local = index - tensors[FIRST_EXPERT]
        elsewhere = (local < 0) | (local >= self.count)
        params = {name: tensors[f"{self.name}.{name}"] for name in self.experts._parameters}
        output = functional_call(
            self.experts,
            params,
            (
                hidden,
                local.masked_fill(elsewhere, self.count),
                weights.masked_fill(elsewhere, 0.0),
            ),
        )
        total = x_BTD + output.float()
        return total.to(output.dtype) if self.last else total, {}


@dataclass(frozen=True, kw_only=True, eq=False)
class After:
    """The second half."""

    cut: LayerCut
    width: int
    """D."""
    reads: frozenset[str]
    additive = False

    def layer(self, tensors: Tensors, x_BTD: Tensor, call: LayerCall, carried: Tensors) -> Written:
        """As `BlockModel.layer`; `x_BTD` is the sum of all experts' output."""
        half = self.cut.halves(carried[ROWS], self.width, call).after
        (y_BTD,) = half({**tensors, **_leaves(call), **carried, OUTPUT: x_BTD.reshape(-1)})
        return y_BTD, {}


def in_parts(model: BlockModel, parts: int) -> BlockModel:
    """The model with every layer of fused experts as a chain of blocks.

    Args:
        model: its blocks are whole layers.
        parts: blocks of experts of a layer, at most; they have `FEWEST` experts or more.

    Raises:
        UserError: if no layer has experts that can be parted, or one cannot be cut.
    """
    try:
        return _Parting(model, parts).result()
    except (UncuttableError, RuntimeError, NotImplementedError) as error:
        raise _refuse(model, parts, " ".join(str(error).split())[:300]) from error


def _refuse(model: BlockModel, parts: int, found: str) -> UserError:
    kind = model.config.model_type
    return UserError(
        asked=f"expert_parts: {parts} of model type '{kind}'", found=found, change=CHANGE
    )


class _Parting:
    def __init__(self, model: BlockModel, parts: int) -> None:
        self.model, self.parts = model, parts
        self.blocks: list[Block] = [model.embed]
        self.stages: list[Stage] = []
        self._cuts: dict[int, LayerCut] = {}
        self._roles: dict[Any, Any] = {}

    def result(self) -> BlockModel:
        model, implementation = self.model, self.model.config._experts_implementation
        if model.random:
            raise UncuttableError("dropout or other randomness in its layers")
        if model.carried_keys:
            raise UncuttableError("layers that hand tensors to later layers")
        if not num_experts(model):
            raise UncuttableError("no layer with fused experts that transformers can part")
        if implementation not in (None, *IMPLEMENTATIONS):
            raise UncuttableError(f"experts_implementation {implementation}")
        with torch.no_grad():
            stand_ins = stand_in_params(model.hf_model)
            embed = {p.name: stand_ins[p.name] for p in model.embed.layout.params}
            ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.long)
            x_BTD, calls, _ = model.prologue(embed, ids)
        for index, (template, call) in enumerate(zip(layer_templates(model), calls, strict=True)):
            self._add_layer(index, template, x_BTD, call)
        rest = model.blocks[model.num_layers + 1 :]
        self.blocks += [replace(b, index=len(self.blocks) + n) for n, b in enumerate(rest)]
        return replace(model, blocks=tuple(self.blocks), stages=tuple(self.stages), uncut=model)

    def _add_layer(
        self, index: int, template: LayerTemplate, x_BTD: Tensor, call: LayerCall
    ) -> None:
        whole = self.model.blocks[index + 1]
        found = find_experts(self.model.container[index])
        specs = specs_of(whole.layout)
        if found is None:
            self._add(whole.name, Stage(layer=index, role=template), specs)
            return
        name, experts = found
        prefix = self.model.layer_prefix(index)
        if template.number not in self._cuts:
            dtypes = {s.name.removeprefix(prefix): COMPUTE_DTYPES[s.dtype] for s in specs}
            self._cuts[template.number] = LayerCut(template, dtypes)
        cut = self._cuts[template.number]
        halves = cut.halves(x_BTD, x_BTD.shape[-1], call)
        fused = [s for s in specs if s.name.startswith(f"{prefix}{name}.")]
        others = {s.name.removeprefix(prefix): s for s in specs if s not in fused}
        behind = halves.names(halves.after, others)
        both = behind & halves.names(halves.before, others)
        if both:
            raise UncuttableError(f"{min(both)} is used before and behind the experts")
        number = template.number
        before = self._role((number, "before"), lambda: Before(cut=cut))
        reads = {carried_key(position) for position in range(halves.num_crossing)}
        reads = (reads & set(halves.after.inputs)) | {ROWS}
        after = self._role(
            (number, "after"),
            lambda: After(cut=cut, width=x_BTD.shape[-1], reads=frozenset(reads)),
        )
        first = [s for n, s in others.items() if n not in behind]
        self._add(f"{whole.name}.before", Stage(layer=index, role=before), first)
        total = int(experts.num_experts)  # type: ignore[arg-type]
        parts = max(1, min(self.parts, total // FEWEST))
        for part in range(parts):
            experts_range = ExpertRange(
                first=total * part // parts, end=total * (part + 1) // parts
            )
            count, last = len(experts_range), part == parts - 1
            role = self._role(
                (number, count, last),
                lambda n=count, is_last=last: Part(
                    experts=cut.part(n), name=cut.name, count=n, last=is_last
                ),
            )
            self._add(
                f"{whole.name}.experts[{experts_range.first}:{experts_range.end}]",
                Stage.of_experts(index, role, experts_range),
                [replace(s, shape=(count, *s.shape[1:])) for s in fused],
            )
        behind_specs = [s for n, s in others.items() if n in behind]
        self._add(f"{whole.name}.after", Stage(layer=index, role=after), behind_specs)

    def _role(self, key: Any, make: Any) -> Any:
        if key not in self._roles:
            self._roles[key] = make()
        return self._roles[key]

    def _add(self, name: str, stage: Stage, specs: Sequence[ParamSpec]) -> None:
        layout = BlockLayout.build(specs)
        block = Block(index=len(self.blocks), name=name, kind=BlockKind.LAYER, layout=layout)
        self.blocks.append(block)
        self.stages.append(stage)


def specs_of(layout: BlockLayout) -> list[ParamSpec]:
    """What a layout was built from, segment by segment."""
    return [
        ParamSpec(
            name=param.name,
            shape=param.shape,
            dtype=segment.dtype,
            trainable=segment.trainable,
            decayed=segment.decayed,
        )
        for segment in layout.segments
        for param in segment.params
    ]


def cut_blocks(
    model: BlockModel, source: Iterator[tuple[int, dict[str, Tensor]]]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Blocks of the uncut model as those of `model`; one whole layer is in memory at a time."""
    if model.uncut is None:
        yield from source
        return
    for whole, tensors in source:
        for block in model.blocks_of(whole):
            yield block, model.cut(block, tensors)


def join_blocks(model: BlockModel, read: Callable[[int], Tensors], whole: int) -> dict[str, Tensor]:
    """One block of the uncut model, from those that make it.

    What is cut is copied to the host, a part at a time; what `read` leaves out is left out.

    Args:
        model: the blocks.
        read: one of them, by full name.
        whole: which block of the uncut model.
    """
    shapes = {param.name: param.shape for param in model.whole.blocks[whole].layout.params}
    joined: dict[str, Tensor] = {}
    for block in model.blocks_of(whole):
        experts = model.experts_of(block)
        for name, tensor in read(block).items():
            if experts is None:
                joined[name] = tensor
                continue
            if name not in joined:
                joined[name] = torch.empty(shapes[name], dtype=tensor.dtype)
            joined[name][experts.first : experts.end] = tensor
    return {name: joined[name] for name in shapes if name in joined}
