"""Runs pure functions of tensors as compiled programs: one for each behaviour and shape.

A function is traced on fake tensors, so whatever looks at a value (a routing decision, `.item()`)
is noticed before anything has run; such a function is run as it is, and that is said.  What is
baked into a program is part of its key: everything in the arguments that is no tensor, and the
shape, strides and dtype of every tensor.

Price: seconds of compilation for each key, kept on the disk between runs by torch's own cache.
"""

import logging
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

Function = Callable[..., Any]
Program = Callable[[list[Tensor]], Any]

MAX_PROGRAMS = 16
"""Of one function and behaviour; one that needs more has a constant that is new in every call."""
KEEP_LESS = {"ban_recompute_materialized_backward": False}
"""A graph keeps results of products for backward, and computes what is between them again: a layer
of Qwen2.5-7B then keeps 107 kB a token instead of 148."""
FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
UNCOMPILABLE = (RuntimeError, AttributeError, NotImplementedError, TypeError, ValueError)
"""What a function raises on fake tensors that runs on real ones, and what a backend raises."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Something to be run."""

    plain: Any
    shared: Any
    """The same for everything that behaves alike; traced instead of `plain`."""


class Runner:
    """Runs functions as they are."""

    atomic = True
    """Whether a function of `passes` or `loss` that fails has added nothing to any sum."""

    def __call__(self, function: Function, run: Run, *args: Any) -> Any:
        """`function` of what is to be run, and of the arguments.

        Args:
            function: pure but for tensors that it changes in place.
            run: its first argument, in two forms.
            args: nested tuples, lists and dicts of tensors and constants.
        """
        return function(run.plain, *args)


class Compiler(Runner):
    """Runs functions as compiled programs where that is possible.

    Args:
        backend: of torch.compile.
    """

    atomic = False  # a program adds as soon as it can, and then allocates more

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.seconds = 0.0
        """Time spent compiling."""
        self.notices: list[str] = []
        """What a user should hear, once."""
        self._programs: dict[Hashable, Program] = {}
        self._count: dict[Hashable, int] = {}
        self._as_it_is: set[Hashable] = set()
        self._said: set[str] = set()
        self._programs_told, self._seconds_told = 0, 0.0

    @property
    def num_programs(self) -> int:
        return len(self._programs)

    def take_notices(self) -> list[str]:
        """Notices since the last time, and how long compilation has taken since then."""
        notices, self.notices = self.notices, []
        if self.num_programs > self._programs_told:
            new = self.num_programs - self._programs_told
            notices.append(f"compiled {new} programs in {self.seconds - self._seconds_told:.0f} s")
            self._programs_told, self._seconds_told = self.num_programs, self.seconds
        return notices

    def __call__(self, function: Function, run: Run, *args: Any) -> Any:
        """As `Runner`; compiles at the first call of its kind."""
        kind = (function, run.shared)
        if kind in self._as_it_is:
            return function(run.plain, *args)
        tensors: list[Tensor] = []
        key = (kind, _signature(args, tensors))
        program = self._programs.get(key)
        if program is not None:
            return program(tensors)
        began = time.perf_counter()
        try:
            self._count[kind] = self._count.get(kind, 0) + 1
            if self._count[kind] > MAX_PROGRAMS:
                raise RuntimeError(f"it would need more than {MAX_PROGRAMS} programs")
            program = _compile(partial(function, run.shared), args, tensors, self.backend)
        except torch.OutOfMemoryError:  # says nothing about what can be compiled
            raise
        except UNCOMPILABLE as error:
            self._give_up(kind, error)
            return function(run.plain, *args)
        self.seconds += time.perf_counter() - began
        self._programs[key] = program
        return program(tensors)

    def _give_up(self, kind: tuple[Function, Any], error: Exception) -> None:
        self._as_it_is.add(kind)
        reason = " ".join(str(error).split()) or type(error).__name__
        notice = f"{kind[0].__name__} runs uncompiled: {reason[:300]}"
        if notice not in self._said:
            self._said.add(notice)
            self.notices.append(notice)


def _signature(value: Any, tensors: list[Tensor]) -> Hashable:
    """What a program for these arguments depends on; the tensors are appended in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return (value.dtype, value.shape, value.stride(), value.requires_grad)
    if isinstance(value, dict):
        items = tuple((name, _signature(each, tensors)) for name, each in value.items())
        return (type(value), items)
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(_signature(each, tensors) for each in value))
    return (type(value), value)


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same arguments with other tensors, taken in the order of `_signature`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return type(value)((name, _filled(each, tensors)) for name, each in value.items())
    if isinstance(value, (tuple, list)):
        items = [_filled(each, tensors) for each in value]
        named = type(value).__base__ is tuple and type(value) is not tuple
        return type(value)(*items) if named else type(value)(items)
    return value


@contextmanager
def _without_log(name: str) -> Iterator[None]:
    """What cannot be traced is told in our own words."""
    log = logging.getLogger(name)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _compile(function: Function, args: Any, tensors: list[Tensor], backend: str) -> Program:
    """Trace on fake tensors, down to single operations, backward ones included; then compile."""
    spec: Any = None
    constants: list[Any] = []

    def flat(*inputs: Tensor) -> list[Tensor]:
        nonlocal spec, constants
        leaves, spec = pytree.tree_flatten(function(*_filled(args, iter(inputs))))
        constants = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    # Tensors that a module holds itself, such as the head's unused rotary buffers, stay its own.
    with _without_log(FAKE_TENSOR_LOG), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's, of itself and of fp32 products
        graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
        # Straight to the backend: torch.compile would guard what the key holds already, each time.
        with functorch_config.patch(KEEP_LESS):
            compiled = torch._dynamo.lookup_backend(backend)(graph, tensors)

    def program(inputs: list[Tensor]) -> Any:
        # Leaves ask for a graph; a program that runs backward itself is no part of one.
        with torch.set_grad_enabled(any(tensor.requires_grad for tensor in inputs)):
            outputs = iter(compiled(*inputs))
        leaves = [next(outputs) if each is None else each[0] for each in constants]
        return pytree.tree_unflatten(leaves, spec)

    return program
