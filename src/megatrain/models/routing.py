"""What the router of a layer with experts does, looked at beside training.

The layer's own forward is run once more, up to the call of its experts and no further: nothing that
training computes is touched.  Which experts a token is sent to is what the experts' module is
called with, in every family.  Logits are what transformers itself records of the family
(`can_record_outputs`, as for `output_router_logits`); where it records none, there is no entropy.

Shape legend: B rows, T tokens, F = B x T, E experts, K experts of a token.
"""

import copy
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from megatrain.models.blocks import BlockModel, run_layer
from megatrain.models.parts import find_experts
from megatrain.models.recorder import LayerCall
from megatrain.models.templates import layer_templates

RECORDED = "router_logits"
NEARLY_ONE = 0.01
"""How far from 1 the sum of probabilities in bfloat16 may be."""


class ExpertsReached(Exception):  # noqa: N818  (a signal, not an error)
    """The router is done; the rest of the layer is not wanted."""


class _Experts(nn.Module):
    """Takes the experts' place: notes what they are given and goes no further."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self._signature = inspect.signature(experts.forward)
        self.given: tuple[Any, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> None:
        self.given = tuple(self._signature.bind(*args, **kwargs).arguments.values())
        raise ExpertsReached


class Router:
    """Looks at the router of one layer, or of every layer that behaves alike.

    Args:
        layer: it is copied.
        carried_keys: see `run_layer`.
        name: of its experts in the layer.
        recorders: transformers' notes of where router logits are.
    """

    def __init__(
        self,
        layer: nn.Module,
        carried_keys: frozenset[str],
        name: str,
        recorders: list[OutputRecorder],
    ) -> None:
        self._module = copy.deepcopy(layer).train()
        self._carried_keys = carried_keys
        experts = self._module.get_submodule(name)
        self.num_experts = int(experts.num_experts)  # type: ignore[arg-type]
        self._experts = _Experts(experts)
        self._module.set_submodule(name, self._experts)
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        self._names = {name for name, _ in named}
        self._logits: list[Tensor] = []
        for recorder in recorders:
            for where, module in self._module.named_modules():
                if _is_recorded(recorder, where, module):
                    module.register_forward_hook(partial(self._note, recorder.index))

    def _note(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        self._logits.append(output[index] if isinstance(output, tuple) else output)

    @torch.no_grad()
    def __call__(
        self,
        tensors: Mapping[str, Tensor],
        x_BTD: Tensor,
        call: LayerCall,
        carried: Mapping[str, Tensor],
        lengths_B: Tensor,
    ) -> Tensor:
        """Counts of one micro-batch, padding left out.

        Args:
            tensors: parameters and buffers by their name in the layer; those of the experts, and
                what follows them, need not be there.
            x_BTD: the layer's input.
            call: what the prologue recorded for it.
            carried: what the blocks before it have written.
            lengths_B: tokens of each row.

        Returns:
            (E + 2,) fp32: tokens sent to each expert (zeros if that cannot be told), the sum over
            tokens of the router's entropy as a share of the largest one (NaN if it cannot be
            told), and the number of tokens.
        """
        self._logits = []
        self._experts.given = ()
        own = {name: tensor for name, tensor in tensors.items() if name in self._names}
        try:
            run_layer(self._module, own, x_BTD, call, carried, self._carried_keys)
        except ExpertsReached:
            pass
        given, logits = self._experts.given, self._logits
        self._logits, self._experts.given = [], ()
        positions_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        real_F = (positions_T < lengths_B[:, None]).flatten()
        entropy = _entropy_sum(logits[0] if len(logits) == 1 else None, real_F)
        return torch.cat([self._counts(given, real_F), entropy, real_F.float().sum()[None]])

    def _counts(self, given: tuple[Any, ...], real_F: Tensor) -> Tensor:
        """(E,) tokens sent to each expert; fp32 is exact up to 2 ** 24 of them."""
        counts_E = torch.zeros(self.num_experts, device=real_F.device)
        if len(given) < 2 or not _fits(given[1], real_F) or given[1].is_floating_point():
            return counts_E
        chosen_FK = given[1].reshape(len(real_F), -1)
        # Some routers have a place for tokens that no expert gets.
        counted = real_F[:, None] & (chosen_FK >= 0) & (chosen_FK < self.num_experts)
        chosen = chosen_FK.clamp(0, self.num_experts - 1).flatten().long()
        return counts_E.index_add(0, chosen, counted.float().flatten())


def _fits(value: Any, real_F: Tensor) -> bool:
    """Whether it is something of each token."""
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[:-1].numel() == len(real_F)


def _entropy_sum(logits: Tensor | None, real_F: Tensor) -> Tensor:
    """(1,) sum over tokens of entropy / ln(E)."""
    if logits is None or not _fits(logits, real_F) or logits.shape[-1] < 2:
        return torch.full((1,), math.nan, device=real_F.device)
    logits_FE = logits.reshape(len(real_F), -1).float()
    # gemma4 records probabilities under the name of logits.
    off_one_F = (logits_FE.sum(dim=-1) - 1.0).abs()
    are_probabilities = (logits_FE >= 0).all() & (off_one_F < NEARLY_ONE).all()
    p_FE = torch.where(are_probabilities, logits_FE, logits_FE.softmax(dim=-1))
    entropy_F = torch.special.entr(p_FE).sum(dim=-1) / math.log(p_FE.shape[-1])
    return torch.where(real_F, entropy_F, 0.0).sum()[None]


def _is_recorded(recorder: OutputRecorder, name: str, module: nn.Module) -> bool:
    """Whether transformers would record this module's output."""
    if recorder.target_class is None or not isinstance(module, recorder.target_class):
        return False
    where = recorder.layer_name
    return where is None or f".{where.strip('.')}." in f".{name}."


def _recorders(model: nn.Module) -> Iterator[OutputRecorder]:
    """Those of router logits, of a model and the models in it."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            found = module.can_record_outputs.get(RECORDED, [])
            yield from (
                each
                for each in (found if isinstance(found, list) else [found])
                if isinstance(each, OutputRecorder)
            )


@dataclass(frozen=True, kw_only=True)
class LayerRouter:
    """Of one layer."""

    own: Router
    shared: Router
    """The same for all layers that behave alike; it fails where a layer asks for its index."""


def routers_of(model: BlockModel) -> dict[int, LayerRouter]:
    """By block, for every layer of fused experts; of a cut layer, the block that has the router."""
    # One note may be reached by several models, and is to be followed once.
    recorders = list({repr(each): each for each in _recorders(model.hf_model)}.values())
    known: dict[int, Router] = {}
    routers: dict[int, LayerRouter] = {}
    for layer, template in enumerate(layer_templates(model.whole)):
        module = model.container[layer]
        found = find_experts(module)
        if found is None:
            continue
        more = model.carried_keys, found[0], recorders
        if template.number not in known:
            known[template.number] = Router(template.module, *more)
        block = model.blocks_of(layer + 1)[0]
        routers[block] = LayerRouter(own=Router(module, *more), shared=known[template.number])
    return routers
