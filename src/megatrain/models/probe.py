"""One forward on a few tokens that finds out how a model hands tensors to its layers.

Parameters are zeros that take no memory.  Only the first two layers of each class are really run,
for the form of what they return.  What can be seen here to be impossible is refused by name; what
cannot be seen (a layer that keeps something to itself for the next one) is left to the proof.
"""

from collections import UserDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from megatrain.errors import UserError
from megatrain.models.build import misconfigured, text_config
from megatrain.models.recorder import (
    BetweenLayersError,
    Chain,
    LayerCall,
    as_layer_output,
    first_tensor,
    recorders_in,
)

PLAIN_TYPES = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.device, UserDict)
PROBE_TOKENS = 4
RUNS_OF_A_CLASS = 2


def refuse(model: PreTrainedModel, reason: str) -> UserError:
    """The error for a model that blocks cannot train exactly."""
    return UserError(
        asked=f"train model type '{model.config.model_type}' ({type(model).__name__}) by blocks",
        found=reason,
        change="choose another architecture, or report this model type so that it can be added",
    )


def stand_in_params(module: nn.Module, requires_grad: bool = False) -> dict[str, Tensor]:
    """Zeros of every parameter's shape on the CPU.

    numpy's zeros come from calloc: pages that are only read take no memory.
    """
    return {
        name: torch.from_numpy(np.zeros(param.numel() * param.element_size(), dtype=np.uint8))
        .view(param.dtype)
        .view(param.shape)
        .requires_grad_(requires_grad)
        for name, param in module.named_parameters()
    }


def graph_leaves(*roots: Tensor) -> set[int]:
    """ids of the leaf tensors from which `roots` are computed."""
    leaves = {id(root) for root in roots if root.is_leaf}
    # Only AccumulateGrad nodes have a variable.
    variables = (getattr(node, "variable", None) for node in _graph_nodes(*roots))
    return leaves | {id(variable) for variable in variables if variable is not None}


def _graph_nodes(*roots: Tensor) -> set[Any]:
    """The nodes of the autograd graph behind `roots`."""
    seen: set[Any] = set()
    stack: list[Any] = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [following for following, _ in node.next_functions]
    return seen


@dataclass(kw_only=True)
class Findings:
    """What a probe has found; lists are by layer."""

    outputs: list[tuple[Any, ...] | None] = field(default_factory=list)
    """None if the layer returns a tensor, else what stands for the items behind the first."""
    carried: list[dict[int, str]] = field(default_factory=list)
    """Position of a leaf in the layer's call -> key of the carried tensor that it is."""
    prologue: list[Tensor] = field(default_factory=list)
    """The first layer's hidden state and what else the layers take that needs a gradient."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    random: bool = False
    """Whether anything random happened."""


class Probe:
    """Takes the place of every layer during one forward."""

    def __init__(self, model: PreTrainedModel, container: nn.ModuleList) -> None:
        self.model, self.container = model, container
        self.layers = list(container.children())
        self.chain = Chain()
        self.findings = Findings()
        self._from_prologue: dict[int, str] = {}  # id -> key
        self._from_last_layer: dict[int, str] = {}  # id -> key
        self._from_layers: dict[int, Tensor] = {}  # id -> tensor, kept so that ids stay unique
        self._forms: dict[type, tuple[Any, ...] | None] = {}
        self._times_run: dict[type, int] = {}

    def run(self, params: dict[str, Tensor]) -> Findings:
        """One forward over stand-ins for all parameters outside the layers.

        Raises:
            UserError: if the model does something that blocks cannot do.
        """
        findings, rng = self.findings, torch.get_rng_state()
        ids = torch.arange(PROBE_TOKENS).remainder(text_config(self.model.config).vocab_size)
        with torch.enable_grad(), recorders_in(self.container, self._on_call):
            try:
                output = functional_call(
                    self.model, params, (), {"input_ids": ids[None], "use_cache": False}
                )
            except BetweenLayersError as error:
                raise refuse(self.model, f"it changes the hidden state {error}") from error
            except RuntimeError as error:  # sizes that do not fit each other
                raise misconfigured(self.model.config, error) from error
        findings.logits = output.logits
        findings.random = not torch.equal(rng, torch.get_rng_state())
        torch.set_rng_state(rng)
        if len(findings.outputs) != len(self.layers):
            raise refuse(self.model, "its forward does not call every layer once")
        self._check_head(output.logits)
        carried = {key for keys in findings.carried for key in keys.values()}
        findings.outputs = [_only(carried, form) for form in findings.outputs]
        return findings

    def _check_head(self, logits: Tensor) -> None:
        """The logits are computed from parameters and the last layer's hidden state alone."""
        earlier = self._from_layers.keys() - {id(self.chain.handed_out)}
        of_prologue = {
            node for node in _graph_nodes(*self.findings.prologue) if node.next_functions
        }
        if graph_leaves(logits) & earlier or _graph_nodes(logits) & of_prologue:
            raise refuse(self.model, "its head takes more than the last layer's hidden state")

    def _on_call(self, index: int, hidden: Tensor, call: LayerCall) -> Any:
        self.chain.check(index, hidden)
        if index == 0:
            if hidden.shape[:2] != (1, PROBE_TOKENS):
                shape = tuple(hidden.shape)
                raise refuse(self.model, f"its hidden state {shape} is not (rows, tokens, ...)")
            self.findings.prologue.append(hidden)
        self.findings.carried.append(self._carried_leaves(index, call))
        form = self._output_form(self.layers[index], hidden, call)
        handed_out = self.chain.hand_out(hidden).requires_grad_(True)
        self._from_layers[id(handed_out)] = handed_out
        self._from_last_layer.clear()
        for position, item in enumerate(form or (), start=1):
            if isinstance(item, Tensor):
                self._from_last_layer[id(item)] = f"output/{position}"
                self._from_layers[id(item)] = item
        self.findings.outputs.append(form)
        return as_layer_output(form, handed_out)

    def _carried_leaves(self, index: int, call: LayerCall) -> dict[int, str]:
        carried = {}
        for position, leaf in enumerate(call.leaves):
            if not isinstance(leaf, PLAIN_TYPES):
                raise refuse(
                    self.model, f"layer {index} is given a {type(leaf).__name__}, unknown here"
                )
            if not isinstance(leaf, Tensor):
                continue
            key = self._from_prologue.get(id(leaf)) or self._from_last_layer.get(id(leaf))
            if key is None and id(leaf) in self._from_layers:
                raise refuse(
                    self.model, f"layer {index} takes the output of a layer before the last"
                )
            if key is None and leaf.requires_grad:
                if graph_leaves(leaf) & self._from_layers.keys():
                    raise refuse(
                        self.model,
                        f"layer {index} takes an argument that is computed between layers",
                    )
                key = f"prologue/{len(self._from_prologue)}"
                self._from_prologue[id(leaf)] = key
                self.findings.prologue.append(leaf)
            if key is not None:
                carried[position] = key
        return carried

    def _output_form(
        self, layer: nn.Module, hidden: Tensor, call: LayerCall
    ) -> tuple[Any, ...] | None:
        """What stands for the items that a layer returns behind its hidden state."""
        kind = type(layer)
        self._times_run[kind] = self._times_run.get(kind, 0) + 1
        if self._times_run[kind] <= RUNS_OF_A_CLASS:
            self._forms[kind] = self._run_layer(layer, hidden, call)
        form = self._forms[kind]
        if form is None:
            return None
        return tuple(
            torch.zeros_like(item).requires_grad_(item.is_floating_point())
            if isinstance(item, Tensor)
            else item
            for item in form
        )

    def _run_layer(
        self, layer: nn.Module, hidden: Tensor, call: LayerCall
    ) -> tuple[Any, ...] | None:
        kind = type(layer).__name__
        mutable = [v for v in [*call.args, *call.kwargs.values()] if isinstance(v, list | dict)]
        before = [len(value) for value in mutable]
        args, kwargs = call.bind(hidden.detach(), {})
        with torch.no_grad():
            output = functional_call(layer, stand_in_params(layer), args, kwargs)
        if [len(value) for value in mutable] != before:
            raise refuse(self.model, f"{kind} keeps state in a shared list or dict")
        if first_tensor(output).shape != hidden.shape:
            raise refuse(self.model, f"{kind} changes the hidden state's shape")
        return None if isinstance(output, Tensor) else tuple(output[1:])


def _only(carried: set[str], form: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """A form in which tensors that no layer takes are None: each layer computes its own anew."""
    if form is None:
        return None
    return tuple(
        item.detach()
        if isinstance(item, Tensor) and f"output/{position}" in carried
        else (None if isinstance(item, Tensor) else item)
        for position, item in enumerate(form, start=1)
    )
