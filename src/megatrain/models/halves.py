"""A decoder layer's own forward in two halves: before its experts' output is needed, and after.

The layer is traced once for each shape, above autograd (`make_fx(pre_dispatch=True)`), with its
experts replaced by an input of the trace.  What depends on that input is the second half.  So no
architecture is re-implemented: both halves are transformers' own operations, in their order.  What
cannot be cut exactly this way (writes across the cut, say) is refused by name.
"""

import inspect
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from megatrain.models.recorder import LayerCall, first_tensor


class UncuttableError(Exception):
    """Why a layer cannot be cut, in words."""


class ExpertsStandIn(nn.Module):
    """Takes the experts' place: notes what they are given, returns what it is told.

    Args:
        experts: whose place it is.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self._signature = inspect.signature(experts.forward)
        self.output: Tensor | None = None
        self.seen: list[tuple[Tensor, ...]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The output that the caller has put here, in the shape of the experts' input."""
        given = tuple(self._signature.bind(*args, **kwargs).arguments.values())
        if len(given) != 3 or not all(isinstance(each, Tensor) for each in given):
            raise UncuttableError("its experts take more than tokens, indices and weights")
        hidden, output = given[0], self.output
        assert output is not None
        if hidden.numel() != output.numel() or hidden.dtype != output.dtype:
            raise UncuttableError("its experts are given another size or dtype than the layer")
        self.seen.append(given)
        return output.view(hidden.shape)


@dataclass(frozen=True, kw_only=True)
class Half:
    """One half as a function of tensors by name."""

    module: fx.GraphModule
    inputs: tuple[str, ...]
    """Names of parameters, buffers, leaves of the call, carried tensors; X, OUTPUT."""

    def __call__(self, tensors: Mapping[str, Tensor]) -> Any:
        """Its results."""
        return self.module(*(tensors[name] for name in self.inputs))


X, OUTPUT = "<input>", "<experts' output>"
Carried = Callable[[int], str]


def leaf_name(position: int) -> str:
    """A tensor among the arguments of a layer, by its position in the flattened call."""
    return f"<leaf {position}>"


@dataclass(frozen=True, kw_only=True)
class Halves:
    """Both, and what passes from the first to the second beside the experts' output."""

    before: Half
    """Gives the experts' three arguments, then what crosses."""
    after: Half
    """Gives the layer's output; its inputs `carried(3)` ... are what crosses."""
    num_crossing: int

    def names(self, half: Half, known: Iterable[str]) -> set[str]:
        """The parameters among `known` that a half uses."""
        return set(half.inputs) & set(known)


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a trace holds for."""

    rows: torch.Size
    """(B, T)."""
    width: int
    """D."""
    dtype: torch.dtype
    device: torch.device
    call: Hashable

    @classmethod
    def of(cls, like: Tensor, width: int, call: LayerCall) -> "Form":
        """Of a tensor (B, T, anything) in the dtype of the layer's input."""
        leaves = tuple(
            (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in call.leaves
        )
        return cls(
            rows=like.shape[:2],
            width=width,
            dtype=like.dtype,
            device=like.device,
            call=leaves,
        )


def trace_halves(
    module: nn.Module,
    stand_in: ExpertsStandIn,
    dtypes: Mapping[str, torch.dtype],
    form: Form,
    call: LayerCall,
    carried: Carried,
) -> Halves:
    """Trace the layer and cut it.

    Args:
        module: the layer, `stand_in` in the experts' place; parameters may be on meta.
        dtypes: of its parameters by name in the layer, where they differ from the module's.
        form: shapes to trace for.
        call: its recorded arguments; only shapes of tensors matter.
        carried: the name of the N-th tensor that the first half gives.

    Raises:
        UncuttableError: if it cannot be cut.
    """
    # Whoever calls may be tracing itself; this trace is of its own.
    with _disable_current_modes(), torch.enable_grad():
        graph, names = _trace(module, stand_in, dtypes, form, call)
    return _cut(graph, names, carried)


def _trace(
    module: nn.Module,
    stand_in: ExpertsStandIn,
    dtypes: Mapping[str, torch.dtype],
    form: Form,
    call: LayerCall,
) -> tuple[fx.GraphModule, list[str]]:
    """The graph, and the names of its inputs; it gives the output, then the experts' arguments."""
    shapes: dict[str, tuple[Any, Any, torch.dtype]] = {}
    x_shape = (*form.rows, form.width)
    shapes[X] = (x_shape, _contiguous(x_shape), form.dtype)
    numel = torch.Size(x_shape).numel()
    shapes[OUTPUT] = ((numel,), (1,), form.dtype)
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, tensor in named.items():
        dtype = dtypes.get(name, tensor.dtype)
        shapes[name] = (tensor.shape, _contiguous(tensor.shape), dtype)
    leaves = {p: leaf for p, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)}
    for position, leaf in leaves.items():
        shapes[leaf_name(position)] = (leaf.shape, leaf.stride(), leaf.dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [
            torch.empty_strided(shape, stride, dtype=dtype, device=form.device)
            for shape, stride, dtype in shapes.values()
        ]
    for name, tensor in zip(shapes, inputs, strict=True):
        differentiable = name in (X, OUTPUT) or name in dict(module.named_parameters())
        tensor.requires_grad_(differentiable and tensor.is_floating_point())

    def layer(*flat: Tensor) -> list[Tensor]:
        given = dict(zip(shapes, flat, strict=True))
        stand_in.output, stand_in.seen = given[OUTPUT], []
        replaced = call.replace_leaves({p: given[leaf_name(p)] for p in leaves})
        args, kwargs = replaced.bind(given[X], {})
        output = functional_call(module, {name: given[name] for name in named}, args, kwargs)
        if len(stand_in.seen) != 1:
            raise UncuttableError("its experts are not called exactly once")
        return [first_tensor(output), *stand_in.seen[0]]

    try:
        graph = make_fx(layer, tracing_mode="real", pre_dispatch=True)(*inputs)
    finally:
        stand_in.output, stand_in.seen = None, []
    return graph, list(shapes)


def _contiguous(shape: Iterable[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, kw_only=True)
class _Traced:
    """The nodes of a trace."""

    graph: fx.GraphModule
    name_of: Mapping[fx.Node, str]
    """Of its inputs."""
    result: fx.Node
    given: tuple[fx.Node, ...]
    """The experts' arguments."""
    behind: frozenset[fx.Node]
    """What depends on the experts' output."""
    without_grad: frozenset[fx.Node]
    """What the layer computes under `no_grad`."""


def _read(graph: fx.GraphModule, names: list[str]) -> _Traced:
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    name_of = dict(zip(placeholders, names, strict=True))
    (result, *given) = next(node for node in nodes if node.op == "output").args[0]
    behind = {placeholders[names.index(OUTPUT)]}
    without_grad, enabled, first_behind = set(), True, False
    for node in nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
            continue
        is_behind = any(each in behind for each in node.all_input_nodes)
        first_behind |= is_behind
        if is_behind:
            behind.add(node)
        if not enabled:
            without_grad.add(node)
        _check(node, behind, enabled=enabled, late=first_behind)
    if result not in behind or behind & set(given):
        raise UncuttableError("its output does not depend on its experts', or their input does")
    return _Traced(
        graph=graph,
        name_of=name_of,
        result=result,
        given=tuple(given),
        behind=frozenset(behind),
        without_grad=frozenset(without_grad),
    )


def _check(node: fx.Node, behind: set[fx.Node], *, enabled: bool, late: bool) -> None:
    """Refuse what is not sure to be the same when all of one half runs before the other."""
    if node.target is operator.getitem:
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        raise UncuttableError(f"it calls {node.target}, which is no plain operation on tensors")
    if not node.target._schema.is_mutable:
        return
    names = [argument.name for argument in node.target._schema.arguments]
    values = dict(zip(names, node.args, strict=False)) | node.kwargs
    written = [
        values[argument.name]
        for argument in node.target._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    several = not all(isinstance(each, fx.Node) for each in written)
    across = late
    if node in behind and not several:
        across = any(each not in behind for each in written)
    if several or across or not enabled:
        raise UncuttableError(f"it changes a tensor in place ({node.target})")


def _cut(graph: fx.GraphModule, names: list[str], carried: Carried) -> Halves:
    traced = _read(graph, names)
    inputs_of_both = {node for node, name in traced.name_of.items() if name != X}
    used = [
        each for node in graph.graph.nodes if node in traced.behind for each in node.all_input_nodes
    ]
    used += [traced.result]
    crossing = [
        node
        for node in dict.fromkeys(used)
        if node not in traced.behind and node not in inputs_of_both and node.op != "get_attr"
    ]
    crossing = [*traced.given, *(node for node in crossing if node not in traced.given)]
    names_across = {node: carried(position) for position, node in enumerate(crossing)}
    return Halves(
        before=_half(traced, crossing, {}, behind=False),
        after=_half(traced, [traced.result], names_across, behind=True),
        num_crossing=len(crossing),
    )


def _half(
    traced: _Traced, results: list[fx.Node], across: Mapping[fx.Node, str], *, behind: bool
) -> Half:
    """The operations of one side; `across` are inputs that the other side has computed."""
    nodes = [
        node
        for node in traced.graph.graph.nodes
        if node.op == "get_attr"
        or (node.op == "call_function" and (node in traced.behind) == behind)
    ]
    nodes = [node for node in nodes if node.target is not torch._C._set_grad_enabled]
    needed = {each for node in nodes for each in node.all_input_nodes} | set(results)
    inputs = {n: name for n, name in traced.name_of.items() if n in needed and n not in across}
    inputs |= {node: name for node, name in across.items() if node in needed}
    half, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for position, node in enumerate(inputs):
        copies[node] = half.placeholder(f"input_{position}")
    for node in nodes:
        copies[node] = half.node_copy(node, lambda each: copies[each])
        if node in traced.without_grad and node.target is not operator.getitem:
            copies[node] = _detached(half, node, copies[node])
    half.output([copies[node] for node in results])
    half.eliminate_dead_code()
    return Half(module=fx.GraphModule(traced.graph, half), inputs=tuple(inputs.values()))


def _detached(half: fx.Graph, node: fx.Node, copy: fx.Node) -> fx.Node:
    """What is computed under `no_grad`, without its gradient; no mode is changed for it."""
    if not isinstance(node.meta.get("val"), Tensor):
        raise UncuttableError(f"it calls {node.target} under no_grad")
    return half.call_function(torch.ops.aten.detach.default, (copy,))
