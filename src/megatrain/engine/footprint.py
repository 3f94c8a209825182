"""What a step of given shapes costs on this machine, measured before the state is allocated.

The engine's own compute is run once over all layers, on random weights in one set of buffers that
every layer shares: a micro-batch's memory beside the slots, and the time of a layer's forward,
backward and backward without recompute.  What is compiled for it, the run needs anyway.

Price: the slots of embed, head and one layer for its duration; compilation, and then a second.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.data import Row
from megatrain.engine.attention import attention_choice
from megatrain.engine.compute import BlockCompute
from megatrain.engine.device import release_cached_memory
from megatrain.engine.kept_rates import run_rates
from megatrain.engine.loss import Loss
from megatrain.engine.microbatch import MicroBatch, make_micro_batch
from megatrain.engine.options import EngineOptions, step_plan
from megatrain.engine.programs import Programs
from megatrain.engine.recovery import DeviceMemoryError
from megatrain.engine.state import StepState
from megatrain.layout import BlockLayout, Purpose
from megatrain.memory import segment_views
from megatrain.memory.store import param_views
from megatrain.models import BlockModel, LayerCall
from megatrain.schedule import Footprint, Lane, Op, OpKind, Rates

INITIAL_STD = 0.02


class _SharedViews:
    """Random weights and gradient sums in one set of buffers, whatever the layer."""

    def __init__(self, model: BlockModel, device: torch.device) -> None:
        self._model, self._device = model, device
        self._flat: dict[tuple[Purpose, str], Tensor] = {}

    def layout(self, block: int) -> BlockLayout:
        return self._model.blocks[block].layout

    def weights(self, op: Op, block: int) -> dict[str, Tensor]:
        del op
        return self._views(block, Purpose.WEIGHT)

    def sums(self, op: Op, block: int) -> dict[str, Tensor]:
        del op
        return self._views(block, Purpose.ACCUMULATOR)

    def passing(self, op: Op, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        raise AssertionError("nothing is spilled in a measurement")

    def on_host(self, op: Op, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        raise AssertionError("nothing is spilled in a measurement")

    def _views(self, block: int, purpose: Purpose) -> dict[str, Tensor]:
        layout, kind = self.layout(block), self._model.blocks[block].kind
        if (purpose, kind) not in self._flat:
            alike = [b.layout for b in self._model.blocks if b.kind is kind]
            size = max(each.nbytes(purpose) for each in alike)
            self._flat[purpose, kind] = torch.zeros(size, dtype=torch.uint8, device=self._device)
        segments = segment_views(layout, purpose, self._flat[purpose, kind])
        for segment in segments.values() if purpose is Purpose.WEIGHT else ():
            segment.normal_(std=INITIAL_STD)
        return param_views(layout, segments)


class _Meter:
    """Peak memory beyond what was there, and seconds, of one call."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.peak_bytes = 0

    def __call__(self, call: Callable[..., None], *args: Any) -> float:
        self._synchronize()
        before = self.allocated()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        call(*args)
        self._synchronize()
        seconds = time.perf_counter() - began
        if self._cuda:
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated() - before)
        return seconds

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._cuda else 0

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def measure_footprint(
    model: BlockModel,
    options: EngineOptions,
    *,
    shape: tuple[int, int],
    device: torch.device,
    loss: Loss,
    programs: Programs,
) -> Footprint:
    """Run one micro-batch through all blocks, twice: the first time compiles.

    Args:
        model: its buffers are moved to the device.
        options: of the run; what they say of saved layers is ignored.
        shape: the largest (B, T).
        device: where blocks are computed.
        loss: of the run.
        programs: of the run; what is compiled here stays.
    """
    model.move_buffers(device)
    plan = replace(step_plan(model, options), saved=frozenset(), spill=None)
    compute = BlockCompute.of(
        model,
        options,
        plan=plan,
        views=_SharedViews(model, device),
        programs=programs,
        device=device,
        loss=loss,
        recovers=False,
    )
    rows, length = shape
    batch = make_micro_batch([_row(model, length)] * rows, 0, device)
    with attention_choice(device):
        try:
            rates = run_rates(device, host_threads=options.host_threads)
            _one_pass(compute, batch, rates)
            found = _one_pass(compute, batch, rates)
        except torch.OutOfMemoryError as error:
            what = f"one micro-batch of {rows} x {length} tokens, to measure it"
            raise DeviceMemoryError.of(what, str(error)) from None
    del compute
    release_cached_memory(device)
    return found


def _row(model: BlockModel, length: int) -> Row:
    """Every token supervised; two samples, if rows are packed."""
    ids = np.arange(length, dtype=np.int64)
    positions = None if model.packing is None else ids % (length // 2 + 1)
    weights = np.ones(length, dtype=np.float32)
    if positions is not None:
        weights[positions == 0] = 0.0
    return Row(input_ids=ids % model.vocab_size, weights=weights, positions=positions)


def _recorded_bytes(calls: Sequence[LayerCall]) -> int:
    """Of all tensors in calls of layers, what several of them share counted once."""
    leaves = [leaf for call in calls for leaf in call.leaves if isinstance(leaf, Tensor)]
    storages = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage() for leaf in leaves}
    return sum(storage.nbytes() for storage in storages.values())


def _one_pass(compute: BlockCompute, batch: MicroBatch, rates: Rates) -> Footprint:
    model, meter = compute.model, _Meter(compute.device)
    state = StepState(
        step=0,
        micro_batches=[batch],
        total_weight=float(batch.ids_BT.numel()),
        training=True,
    )

    def op(kind: OpKind, block: int) -> Op:
        return Op(kind=kind, lane=Lane.COMPUTE, block=block)

    layers = range(1, model.num_stages + 1)
    embed_s = meter(compute.forward, state, op(OpKind.FORWARD, 0))
    forward_s, saved_bytes = [], []
    for block in layers:
        saving = replace(compute, saved=frozenset({block}))
        kept = state.boundaries[block, 0]
        before = meter.allocated()
        meter(saving.forward, state, op(OpKind.FORWARD, block))
        saved_bytes.append(meter.allocated() - before + kept.nbytes)
        last = state.saved.pop((block, 0))
        if block != model.num_stages:
            del last
            state.boundaries[block, 0] = kept
            forward_s.append(meter(compute.forward, state, op(OpKind.FORWARD, block)))
    state.saved[model.num_stages, 0] = last
    carried_bytes = state.carried[0].nbytes
    loss_s = meter(compute.loss, state, op(OpKind.LOSS, model.head.index))
    backward_s = []
    saving = replace(compute, saved=frozenset({model.num_stages}))
    for block in reversed(layers):
        if block < compute.lowest_trainable:
            break
        backward_s.append(meter(saving.backward, state, op(OpKind.BACKWARD, block)))
    embed_backward_s = 0.0
    if compute.lowest_trainable == 0:
        embed_backward_s = meter(compute.backward, state, op(OpKind.BACKWARD, 0))
    return Footprint(
        input_bytes=kept.nbytes,
        saved_bytes=tuple(saved_bytes),
        carried_bytes=carried_bytes,
        calls_bytes=_recorded_bytes(state.calls[0]),
        workspace_bytes=meter.peak_bytes,
        embed_s=embed_s,
        forward_s=_mean(forward_s),
        backward_s=_mean(backward_s[1:]),
        saved_backward_s=_mean(backward_s[:1]),
        embed_backward_s=embed_backward_s,
        loss_s=loss_s,
        rates=rates,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
