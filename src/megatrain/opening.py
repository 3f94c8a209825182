"""A model opened for reading: to be evaluated, or made to generate; no training state.

On a GPU as many weights as fit stay there, and the others are streamed from page-locked memory.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from megatrain.data import load_tokenizer
from megatrain.engine import (
    Engine,
    EngineOptions,
    LayerStream,
    choose_device,
    free_device_bytes,
    step_plan,
)
from megatrain.engine.device import DEVICE_RESERVE
from megatrain.layout import Purpose
from megatrain.memory import BlockStore
from megatrain.models.hub import find_model
from megatrain.models.load import load_blocks
from megatrain.models.selection import Selection
from megatrain.models.weights import LoadReport
from megatrain.models.whole import generation_config, whole_model
from megatrain.planner import check_fits, memory_need, resident_weights
from megatrain.preflight import check_model, find_gguf

WholeModel = Callable[[], AbstractContextManager[Any]]
"""Gives the transformers model, ready to be called, for the duration of the context."""


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """Which model, and where and how it is computed."""

    path: str
    """Directory, id, or GGUF file."""
    device: str = "auto"
    dtype: str = "auto"
    """auto: bfloat16 on a GPU, float32 on the CPU."""
    gpu_memory: int | None = None
    """Bytes of the GPU to use; None for what is free."""
    revision: str | None = None
    cache_dir: str | None = None


class OpenModel:
    """Blocks and tokenizer of a model; weights are loaded by `weights`.

    Raises:
        UserError: for a model that is not there or cannot be split.
    """

    def __init__(self, choice: ModelChoice, *, to: str) -> None:
        """Find and split the model.

        Args:
            choice: which, and where.
            to: what it is opened for, in words.
        """
        check_model(choice.path)
        self.choice, self._to = choice, to
        self.device = choose_device(choice.device)
        dtype = choice.dtype
        if dtype == "auto":
            dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        name, gguf_file = find_gguf(choice.path)
        self.files = find_model(
            name, gguf_file=gguf_file, revision=choice.revision, cache_dir=choice.cache_dir
        )
        self._loaded = load_blocks(
            self.files, compute_dtype=dtype, selection=Selection(evaluation=True)
        )
        self.model = self._loaded.model
        self.files.fetch_weights()

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.files.directory, gguf_file=self.files.gguf_file)

    @contextmanager
    def weights(self) -> Iterator[BlockStore]:
        """The weights, in memory for the duration of the context.

        Raises:
            UserError: if they do not fit, or are incomplete.
        """
        layouts = [block.layout for block in self.model.blocks]
        free = free_device_bytes(self.device)
        if free is not None:
            free = min(free, self.choice.gpu_memory or free) - DEVICE_RESERVE
        resident = resident_weights(layouts, num_layers=self.model.num_layers, device_free=free)
        on_gpu = resident if free is not None else frozenset[int]()
        plan = step_plan(self.model, self._options(None), resident=on_gpu)
        need = memory_need(layouts, plan, gradient_dtype=self.model.compute_dtype)
        if free is not None:
            free -= sum(layouts[block].nbytes(Purpose.WEIGHT) for block in resident)
        check_fits(need, budget=None, device_free=free, to=self._to)
        source = self._loaded.weights(LoadReport(), complete=True)
        store = BlockStore.filled(layouts, source, device=self.device, resident=resident)
        try:
            yield store
        finally:
            store.close()

    @contextmanager
    def engine(self, store: BlockStore, *, micro_batch_rows: int) -> Iterator[Engine]:
        """An engine that evaluates rows.

        Args:
            store: the weights.
            micro_batch_rows: rows that are computed at a time.
        """
        options = self._options(micro_batch_rows)
        engine = Engine(self.model, store, options, device=self.device)
        try:
            yield engine
        finally:
            engine.close()

    @contextmanager
    def whole(self, store: BlockStore) -> Iterator[WholeModel]:
        """The transformers model over these weights, for its own forward and `generate`.

        It is entered anew for each use: meanwhile an engine cannot use the model's layers.
        """
        self.model.move_buffers(self.device)
        self.model.hf_model.generation_config = generation_config(self.model)
        stream = LayerStream(self.model, store, device=self.device)
        try:
            yield partial(whole_model, self.model, stream.outside(), stream.weights)
        finally:
            stream.close()

    @staticmethod
    def _options(micro_batch_rows: int | None) -> EngineOptions:
        return EngineOptions(max_grad_norm=0.0, micro_batch_rows=micro_batch_rows)
