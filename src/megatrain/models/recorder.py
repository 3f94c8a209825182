"""Stand-ins for decoder layers that note how Hugging Face's own forward would call each layer.

The model's `forward` is run unchanged; its decoder layers are replaced by recorders, so rotary
embeddings, masks and whatever else a layer is given come from the model's own code.  A recorder
checks what the block view of a model takes for granted: that the hidden state which reaches a
layer *is* the one that the layer before it returned.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megatrain.models.carried import StandIn


class BetweenLayersError(Exception):
    """The model does something to the hidden state between two layers."""


class PrologueDone(Exception):  # noqa: N818  (a signal, not an error)
    """All layer calls are recorded; the rest of forward is not wanted."""


class LayerCall(NamedTuple):
    """The arguments of one layer call, without the hidden state."""

    args: tuple[Any, ...]
    """Positional arguments; the hidden state's place holds None if it is positional."""
    kwargs: dict[str, Any]
    hidden_key: int | str
    """Position or keyword of the hidden state."""

    def bind(
        self, hidden_BTD: Tensor, substitutes: Mapping[StandIn, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the hidden state put back, and a value for every stand-in."""

        def put_back(leaf: Any) -> Any:
            return substitutes[leaf] if isinstance(leaf, StandIn) else leaf

        args, kwargs = self.args, self.kwargs
        if substitutes:  # a container that a layer writes to must stay the same object
            args, kwargs = pytree.tree_map(put_back, (args, kwargs))
        if isinstance(self.hidden_key, int):
            args = (*args[: self.hidden_key], hidden_BTD, *args[self.hidden_key + 1 :])
        else:
            kwargs = {**kwargs, self.hidden_key: hidden_BTD}
        return args, kwargs

    def replace_leaves(self, replacements: Mapping[int, Any]) -> "LayerCall":
        """The same call with some of its leaves, by position in the flattened call, replaced."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        for position, leaf in replacements.items():
            leaves[position] = leaf
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return LayerCall(args=args, kwargs=kwargs, hidden_key=self.hidden_key)

    @property
    def leaves(self) -> list[Any]:
        """Everything in the arguments that is no tuple, list or dict."""
        leaves: list[Any] = pytree.tree_leaves((self.args, self.kwargs))
        return leaves


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, LayerCall]:
    """Take the hidden state (first positional argument, else `hidden_states`) out of a call."""
    if args and isinstance(args[0], Tensor):
        return args[0], LayerCall(args=(None, *args[1:]), kwargs=kwargs, hidden_key=0)
    hidden = kwargs["hidden_states"]
    rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
    return hidden, LayerCall(args=args, kwargs=rest, hidden_key="hidden_states")


OnCall = Callable[[int, Tensor, LayerCall], Any]


class Recorder(nn.Module):
    """Takes a layer's place in the container; attributes are the layer's own."""

    def __init__(self, index: int, layer: nn.Module, on_call: OnCall) -> None:
        super().__init__()
        # Kept out of the module tree, so that parameter names do not change.
        self.__dict__["layer"] = layer
        self.__dict__["index"] = index
        self.__dict__["on_call"] = on_call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, call = split_call(args, kwargs)
        return self.__dict__["on_call"](self.__dict__["index"], hidden, call)


@contextmanager
def recorders_in(container: nn.ModuleList, on_call: OnCall) -> Iterator[None]:
    """Replace the container's layers by recorders for the duration of the context."""
    layers = dict(container._modules)
    for position, (name, layer) in enumerate(layers.items()):
        assert layer is not None
        container._modules[name] = Recorder(position, layer, on_call)
    try:
        yield
    finally:
        container._modules.update(layers)


def _same_elements(hidden: Tensor, other: Tensor | None) -> bool:
    """Whether both are the same tensor or a full view of it (gemma4 slices with `0:`)."""
    if hidden is other or other is None:
        return hidden is other
    return (
        hidden.data_ptr() == other.data_ptr()
        and hidden.shape == other.shape
        and hidden.stride() == other.stride()
        and hidden.dtype == other.dtype
        and not hidden.is_neg()
        and not hidden.is_conj()
    )


class Chain:
    """Hands one layer's stand-in output to the next and checks that nothing touched it."""

    def __init__(self) -> None:
        self.handed_out: Tensor | None = None
        """What stands for the hidden state that the last layer so far has returned."""
        self._version = 0

    def check(self, index: int, hidden: Tensor) -> None:
        """Raise unless `hidden` is untouched since the previous layer returned it."""
        if index == 0:
            return
        if not _same_elements(hidden, self.handed_out) or hidden._version != self._version:
            raise BetweenLayersError(f"between layers {index - 1} and {index}")

    def hand_out(self, hidden: Tensor) -> Tensor:
        """A new tensor object over the same values, remembered for the next check."""
        self.handed_out = hidden.detach()
        self._version = self.handed_out._version
        return self.handed_out


def as_layer_output(template: Any, hidden: Tensor) -> Any:
    """`hidden` in the form that the layer returns: a tensor, or a tuple led by it."""
    if template is None:
        return hidden
    return (hidden, *template)


def first_tensor(output: Any) -> Tensor:
    """The hidden state of a layer's output."""
    hidden = output if isinstance(output, Tensor) else output[0]
    assert isinstance(hidden, torch.Tensor)
    return hidden
