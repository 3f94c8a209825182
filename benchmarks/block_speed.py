"""How fast is one decoder layer of a shape: transformers' own code, ours, and ours compiled?

    python benchmarks/block_speed.py configs/shapes/qwen2.5-3b
    python benchmarks/block_speed.py configs/shapes/qwen3-30b-a3b --attention flash

Times forward, and recompute + backward, on random input: `transformers` with gradients in the
compute dtype, as with gradient checkpointing; the others add them to fp32 sums.  Prints TFLOPS of
the products that a token uses (of experts only those it is sent to, attention counted causal) and
the host's time a call.  Appends one JSON line a variant to benchmarks/results/block_speed.jsonl.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain.engine.compiled import Compiler, Run, Runner
from megatrain.models import BlockModel, build_on_meta, read_config, split_model
from megatrain.models.build import COMPUTE_DTYPES
from megatrain.models.initialise import init_block_weights
from megatrain.models.passes import (
    Tensors,
    as_leaves,
    backward,
    forward,
    forward_with_graph,
)
from megatrain.models.templates import layer_templates
from megatrain.models.work import count_layers

RESULTS = Path(__file__).parent / "results" / "block_speed.jsonl"
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
OTHERWISE = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
VARIANTS = ("transformers", "eager", "compiled")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", type=Path, help="a directory with a config.json")
    parser.add_argument("--config-overrides", type=json.loads, default={}, help="JSON")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--attention", choices=ATTENTION, default="cudnn")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def timed(call: Callable[[], Any], repeats: int, device: torch.device) -> tuple[float, float]:
    """Median ms of a call on the device, and of the host in it."""
    for _ in range(3):
        call()
    if device.type == "cpu":
        host_ms = [_host_ms(call) for _ in range(repeats)]
        return statistics.median(host_ms), statistics.median(host_ms)
    torch.cuda.synchronize()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in "se"] for _ in range(repeats)]
    host_ms = []
    for start, end in marks:
        start.record()
        host_ms.append(_host_ms(call))
        end.record()
    torch.cuda.synchronize()
    device_ms = [start.elapsed_time(end) for start, end in marks]
    return statistics.median(device_ms), statistics.median(host_ms)


def _host_ms(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def as_checkpointed(
    run: Any, tensors: Tensors, x_BTD: Tensor, call: Any, outgoing: Tensor
) -> list[Tensor | None]:
    """Recompute and backward by plain autograd; gradients have the compute dtype."""
    trained = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    leaves = as_leaves(tensors, x_BTD, {}, trained=trained, differentiable=(), passes_on=True)
    output, _ = forward_with_graph(run, leaves.tensors, leaves.x_BTD, call, {})
    inputs = [leaves.x_BTD, *(leaves.tensors[name] for name in trained)]
    return list(torch.autograd.grad([output], inputs, [outgoing], allow_unused=True))


def measure(
    args: argparse.Namespace, model: BlockModel, device: torch.device
) -> list[dict[str, Any]]:
    """A row for every variant."""
    dtype = COMPUTE_DTYPES["bfloat16"]
    weights = dict(init_block_weights(model, seed=0))
    prefix = model.layer_prefix(args.layer)
    local = {
        name.removeprefix(prefix): tensor.to(device, dtype)
        for name, tensor in weights[args.layer + 1].items()
    }
    embed = {name: tensor.to(device, dtype) for name, tensor in weights[0].items()}
    ids = torch.zeros((args.rows, args.length), dtype=torch.long, device=device)
    embedded, calls, carried = model.prologue(embed, ids)
    assert not carried, "layers that read carried tensors are not timed alone"
    x, outgoing = (torch.randn(embedded.shape, device=device, dtype=dtype) for _ in "xd")
    sums = {name: torch.zeros(tensor.shape, device=device) for name, tensor in local.items()}
    work = count_layers(model, args.length)[args.layer]
    flops = args.rows * (work.product_flops + work.attention_flops)
    run = Run(
        plain=partial(model.layer, args.layer), shared=layer_templates(model)[args.layer].layer
    )
    call, rows = calls[args.layer], []
    for variant in args.variants:
        runner = Compiler("inductor") if variant == "compiled" else Runner()
        ahead: Callable[[], Any] = partial(runner, forward, run, local, x, call, {})
        back: Callable[[], Any] = partial(
            runner, backward, run, local, x, call, {}, (), {"": outgoing}, sums, True
        )
        if variant == "transformers":
            back = partial(as_checkpointed, run.plain, local, x, call, outgoing)
        forward_ms, forward_host_ms = timed(ahead, args.repeats, device)
        backward_ms, backward_host_ms = timed(back, args.repeats, device)
        rows.append(
            {
                "what": f"one layer, {variant}",
                "model": args.shape.name,
                "layer": args.layer,
                "attention": args.attention,
                "config_overrides": args.config_overrides,
                "rows": args.rows,
                "length": args.length,
                "forward_ms": round(forward_ms, 3),
                "backward_ms": round(backward_ms, 3),
                "forward_tflops": round(flops / forward_ms / 1e9, 1),
                "backward_tflops": round(3 * flops / backward_ms / 1e9, 1),
                "forward_host_ms": round(forward_host_ms, 3),
                "backward_host_ms": round(backward_host_ms, 3),
                "compile_seconds": round(getattr(runner, "seconds", 0), 1),
                "notices": getattr(runner, "notices", []),
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Every variant."""
    args = parse(arguments)
    device = torch.device(args.device)
    overrides = {**args.config_overrides, "num_hidden_layers": args.layer + 1}
    config = read_config(args.shape, overrides=overrides)
    model = split_model(build_on_meta(config, compute_dtype="bfloat16"), compute_dtype="bfloat16")
    model.move_buffers(device)
    with sdpa_kernel([ATTENTION[args.attention], *OTHERWISE], set_priority=True):
        rows = measure(args, model, device)
    versions = {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    args.output.parent.mkdir(exist_ok=True)
    with args.output.open("a") as file:
        for row in rows:
            print(json.dumps(row | versions), flush=True)
            file.write(json.dumps(row | versions) + "\n")


if __name__ == "__main__":
    main()
