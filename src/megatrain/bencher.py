"""`megatrain bench`: training steps of a named shape on random weights and tokens, measured.

What is timed is the run itself: the trainer's engine and placement, whole optimizer steps.  Tokens
are new in every step: a GPU that is limited by its power may run faster on repeated ones.
"""

import json
import platform
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from megatrain.adviser import plan_in_micro_batches
from megatrain.data import Row
from megatrain.engine import (
    Engine,
    EngineOptions,
    StepResult,
    choose_device,
    cross_entropy,
    step_plan,
)
from megatrain.engine.meter import GpuMeter
from megatrain.engine.options import largest_shape
from megatrain.errors import UserError
from megatrain.memory import BlockStore
from megatrain.models import BlockModel, build_on_meta, read_config, split_model
from megatrain.models.active import flops_per_token
from megatrain.models.parts import in_parts, most_parts
from megatrain.monitor import write_trace
from megatrain.placing import (
    Budgets,
    RunPlan,
    check_offload_of_parts,
    check_options_and_memory,
    device_limit,
    parts_that_fit,
    plan_run,
)
from megatrain.planner import read_offload
from megatrain.schedule import Span, StepPlan, occupancy
from megatrain.versions import library_versions

LEARNING_RATE = 1e-5
INITIAL_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure."""

    model: str
    """Directory with a config.json; weights are not read."""
    layers: int | None = None
    """Of the model's decoder layers only the first so many; None for all."""
    rows: int = 32
    length: int = 1024
    """Rows of an optimizer step, and tokens of a row."""
    micro_rows: int | None = 16
    """None: chosen, as by a run with micro_batch_tokens: auto."""
    steps: int = 10
    warmup_steps: int = 3
    """Steps before those that count."""
    same_tokens: bool = False
    """In every step, so that the loss falls; a GPU limited by its power may run faster on them."""
    max_grad_norm: float = 1.0
    gpu_memory: int | None = None
    host_memory: int | None = None
    """Budgets in bytes; None for what is free."""
    disk_path: Path | None = None
    disk_memory: int | None = None
    """For state that the host has no room for, and bytes there; None for no disk, and all of it."""
    place: str = "auto"
    """auto; host: everything is streamed and recomputed; device: all state on the device, and
    everything recomputed."""
    offload: dict[str, Any] = field(default_factory=dict)
    """See the config's key; only with place auto."""
    config_overrides: dict[str, Any] = field(default_factory=dict)
    """See the config's key."""
    expert_parts: int | None = None
    """Blocks that a layer's experts are streamed in; None: as many as a layer needs to fit."""
    device: str = "auto"
    compile: bool = True
    trace: Path | None = None


def run_bench(options: BenchOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Train some steps and return the figures.

    Args:
        options: what to measure.
        say: takes a line for a person.

    Raises:
        UserError: if the model cannot be trained, or does not fit.
    """
    device = choose_device(options.device)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    config = _shape(options)
    model = split_model(build_on_meta(config, compute_dtype=dtype), compute_dtype=dtype)
    engine_options = EngineOptions(
        micro_batch_rows=options.micro_rows,
        max_grad_norm=options.max_grad_norm,
        compile_backend="inductor" if options.compile and device.type == "cuda" else None,
        length_multiple=options.length,
    )
    parts, limit = options.expert_parts, device_limit(device, options.gpu_memory)
    if parts is None and limit is not None:
        parts = parts_that_fit(model, engine_options, limit=limit)
    if parts is not None:
        model = in_parts(model, parts)
    check_offload_of_parts(options.offload, model)
    budgets = _budgets(options, step_plan(model, engine_options), device)
    check_options_and_memory(model, engine_options, device=device, budgets=budgets)
    meter = GpuMeter(device)
    plan = _plan(options, model, engine_options, device, budgets)
    say(plan.in_words())
    shape = largest_shape(model, plan.options, num_rows=options.rows, longest=options.length)
    options = replace(options, micro_rows=shape[0])
    store = BlockStore.filled(
        [block.layout for block in model.blocks],
        _random_weights(model, device),
        device=device,
        resident=plan.resident,
        disk=plan.tier,
    )
    engine = Engine(
        model, store, plan.options, device=device, loss=cross_entropy, programs=plan.programs
    )
    for notice in engine.take_notices():
        say(notice)
    seconds, results, spans = _steps(engine, options, say, meter)
    row = _figures(options, model, plan, seconds, results, spans, meter)
    if options.trace is not None:
        write_trace(options.trace, spans, [block.name for block in model.blocks])
        say(f"trace of one more step: {options.trace} (https://ui.perfetto.dev opens it)")
    engine.close()
    store.close()
    return row


def _plan(
    options: BenchOptions,
    model: BlockModel,
    engine_options: EngineOptions,
    device: torch.device,
    budgets: Budgets,
) -> RunPlan:
    measure = partial(
        plan_run,
        model,
        device=device,
        loss=cross_entropy,
        num_rows=options.rows,
        longest=options.length,
        place=options.place,
        budgets=budgets,
    )
    if options.micro_rows is not None:
        return measure(engine_options)
    return plan_in_micro_batches(
        measure,
        model,
        engine_options,
        device=device,
        num_rows=options.rows,
        longest=options.length,
        budgets=budgets,
        offload=options.offload,
    )


def _shape(options: BenchOptions) -> Any:
    """The config with `config_overrides`, cut to `layers` if they are given."""
    path, overrides = Path(options.model), options.config_overrides
    if options.layers is None:
        return read_config(path, overrides=overrides)
    depth = read_config(path).get_text_config(decoder=True).num_hidden_layers
    if options.layers > depth:
        raise UserError(
            asked=f"--layers {options.layers}",
            found=f"{options.model} has {depth}",
            change="give at most as many",
        )
    return read_config(path, overrides={**overrides, "num_hidden_layers": options.layers})


def _budgets(options: BenchOptions, plan: StepPlan, device: torch.device) -> Budgets:
    if options.offload and options.place != "auto":
        raise UserError(
            asked=f"offload with --place {options.place}",
            found="two rules for the same blocks",
            change="leave one of them out",
        )
    if options.micro_rows is None and options.place != "auto":
        raise UserError(
            asked=f"--micro-rows auto with --place {options.place}",
            found="a choice that goes with what the planner places",
            change="give a number of rows",
        )
    offload = read_offload(
        options.offload, plan, has_gpu=device.type == "cuda", has_disk=options.disk_path is not None
    )
    return Budgets(
        gpu=options.gpu_memory,
        host=options.host_memory,
        disk_path=options.disk_path,
        disk=options.disk_memory,
        offload=offload,
    )


def _random_weights(
    model: BlockModel, device: torch.device
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Matrices of a usual scale, norms of 1, no biases; drawn on the device, for speed."""
    torch.manual_seed(0)
    for block in model.blocks:
        yield (
            block.index,
            {
                param.name: torch.randn(param.shape, device=device) * INITIAL_STD
                if len(param.shape) > 1
                else torch.full(param.shape, float("norm" in param.name), device=device)
                for param in block.layout.params
            },
        )


def _steps(
    engine: Engine, options: BenchOptions, say: Callable[[str], None], meter: GpuMeter
) -> tuple[list[float], list[StepResult], list[Span]]:
    """Seconds and results of the steps that count, and the spans of one more."""
    generator = np.random.default_rng(0)
    vocab_size = engine.model.vocab_size
    seconds, results = [], []
    spans: list[Span] = []
    for step in range(options.warmup_steps + options.steps + 1):
        if options.same_tokens:
            generator = np.random.default_rng(0)
        rows = [
            Row(
                input_ids=generator.integers(0, vocab_size, options.length),
                weights=np.ones(options.length, dtype=np.float32),
            )
            for _ in range(options.rows)
        ]
        last = step == options.warmup_steps + options.steps
        engine.spans = spans if last else None  # its marks cost a little: not among the timed
        if step == options.warmup_steps:
            meter.start()
        began = time.perf_counter()
        result = engine.step(rows, learning_rate=LEARNING_RATE)
        elapsed = time.perf_counter() - began
        for notice in engine.take_notices():
            say(notice)
        if not last:
            counts = "" if step >= options.warmup_steps else " (warm-up)"
            say(f"step {step + 1}: loss {result.loss:.4f}, {elapsed:.3f} s{counts}")
        if options.warmup_steps <= step and not last:
            seconds.append(elapsed)
            results.append(result)
        if step == options.warmup_steps + options.steps - 1:
            meter.stop()
    return seconds, results, spans


def _figures(
    options: BenchOptions,
    model: BlockModel,
    plan: RunPlan,
    seconds: Sequence[float],
    results: Sequence[StepResult],
    spans: Sequence[Span],
    meter: GpuMeter,
) -> dict[str, Any]:
    p20, p50, p80 = (float(np.quantile(seconds, q)) for q in (0.2, 0.5, 0.8))
    tokens = results[-1].real_tokens
    flops = flops_per_token(model)
    busy = occupancy(spans)
    whole = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    lanes_s = {lane.value: share * whole for lane, share in busy.items()}
    row: dict[str, Any] = {
        "what": "bench",
        "model": Path(options.model).name,
        "parameters": model.num_params,
        "layers": model.num_layers,
        "rows": options.rows,
        "length": options.length,
        "micro_rows": options.micro_rows,
        "same_tokens": options.same_tokens,
        "max_grad_norm": options.max_grad_norm,
        "place": options.place,
        "config_overrides": options.config_overrides,
        "expert_parts": most_parts(model),
        "gpu_memory": options.gpu_memory,
        **_placed(plan),
        "seconds_per_step_p20": round(p20, 4),
        "seconds_per_step_p50": round(p50, 4),
        "seconds_per_step_p80": round(p80, 4),
        "tokens_per_second": round(tokens / p50, 1),
        "tflops_6n": None if flops is None else float(f"{flops * tokens / p50 / 1e12:.4g}"),
        "lanes_busy": {lane.value: round(share, 4) for lane, share in busy.items()},
        "busiest_lane_s": round(max(lanes_s.values()), 4),
        "compiled_seconds": round(plan.programs.compiler.seconds, 1)
        if plan.programs.compiler
        else None,
        "rates": None if plan.rates is None else asdict(plan.rates),
        "host_bytes": plan.need.host,
        "disk": None if plan.disk is None else plan.disk.figures(),
        **_held_by_process(),
        "first_loss": results[0].loss,
        "last_loss": results[-1].loss,
    }
    row |= meter.figures()
    matmul = row.get("matmul_tflops")
    if matmul and row["tflops_6n"]:
        row["mfu_6n"] = round(row["tflops_6n"] / matmul, 4)
    return row | {
        "machine": meter.name or platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": library_versions()["transformers"],
    }


def _placed(plan: RunPlan) -> dict[str, Any]:
    """What was placed, and what was predicted of it on a GPU."""
    options, placement = plan.options, plan.placement
    return {
        "resident_blocks": len(plan.resident),
        "saved_layers": len(options.saved),
        "spilled_layers": len(options.spill.blocks) if options.spill else 0,
        "put_off_updates": len(options.put_off),
        "predicted_seconds": None if placement is None else round(placement.seconds, 4),
        "predicted_device_bytes": None if placement is None else placement.device_bytes,
    }


def _held_by_process() -> dict[str, int]:
    """Bytes of host memory: the most, and at the end, with the files among them."""
    memory = psutil.Process().memory_info()
    return {
        "host_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "host_rss_at_end_bytes": memory.rss,
        "host_files_at_end_bytes": memory.shared,
    }


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Add one JSON line to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def table(row: dict[str, Any]) -> str:
    """The main figures for a person."""
    text = (
        f"{row['seconds_per_step_p50']:.3f} s a step (p20 {row['seconds_per_step_p20']:.3f},"
        f" p80 {row['seconds_per_step_p80']:.3f}); busiest lane {row['busiest_lane_s']:.3f} s\n"
        f"{row['tokens_per_second']:,.0f} tokens/s"
    )
    if row["tflops_6n"] is not None:
        text += f", {row['tflops_6n']:.3g} TFLOPS at 6N"
    if "mfu_6n" in row:
        text += f", {row['mfu_6n']:.0%} of what a matrix product reaches"
    text += "\nlanes busy: " + ", ".join(f"{k} {v:.0%}" for k, v in row["lanes_busy"].items())
    return text
