"""How fast is one decoder layer: as it is or compiled, and with which attention?

    python benchmarks/block_speed.py --hidden 2048 --intermediate 11008 --heads 16 --kv-heads 2

Times forward, and recompute + backward + addition to the fp32 sums, on random input, with CUDA
events; prints TFLOPS of the products (attention counted causal) and the host's time a call.
Appends one JSON line a variant to benchmarks/results/block_speed.jsonl.
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain.engine.compiled import Compiler, Run, Runner
from megatrain.models import build_on_meta, split_model
from megatrain.models.initialise import init_block_weights
from megatrain.models.passes import backward, forward
from megatrain.models.templates import layer_templates

RESULTS = Path(__file__).parent / "results" / "block_speed.jsonl"


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args()


def timed(call: Any, repeats: int) -> tuple[float, float]:
    """Median device ms and host ms of a call."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    host = []
    for start, end in marks:
        began = time.perf_counter()
        start.record()
        call()
        end.record()
        host.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return (
        statistics.median(s.elapsed_time(e) for s, e in marks),
        statistics.median(host) * 1e3,
    )


def main() -> None:
    """Every variant."""
    args = parse()
    config = transformers.AutoConfig.for_model(
        "qwen2",
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=1,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        vocab_size=1000,
    )
    model = split_model(build_on_meta(config, compute_dtype="bfloat16"), compute_dtype="bfloat16")
    device = torch.device("cuda")
    model.move_buffers(device)
    weights = dict(init_block_weights(model, seed=0))
    local = {
        name.removeprefix(model.layer_prefix(0)): tensor.to(device, torch.bfloat16)
        for name, tensor in weights[1].items()
    }
    embed = {name: tensor.to(device, torch.bfloat16) for name, tensor in weights[0].items()}
    shape = (args.rows, args.length)
    _, calls, _ = model.prologue(embed, torch.zeros(shape, dtype=torch.long, device=device))
    x, dy = (torch.randn(*shape, args.hidden, device=device, dtype=torch.bfloat16) for _ in "ab")
    tokens = args.rows * args.length
    products = sum(t.numel() for t in local.values() if t.ndim > 1)
    flops = 2 * tokens * products + 2 * tokens * args.length * args.hidden
    run = Run(plain=partial(model.layer, 0), shared=layer_templates(model)[0].layer)
    variants: list[tuple[str, Runner, SDPBackend]] = [
        ("eager", Runner(), SDPBackend.FLASH_ATTENTION),
        ("eager", Runner(), SDPBackend.CUDNN_ATTENTION),
        ("compiled", Compiler("inductor"), SDPBackend.FLASH_ATTENTION),
        ("compiled", Compiler("inductor"), SDPBackend.CUDNN_ATTENTION),
    ]
    for name, runner, attention in variants:
        sums = {n: torch.zeros(t.shape, device=device) for n, t in local.items()}
        tail: tuple[Any, ...] = (local, x, calls[0], {})
        run_forward = partial(runner, forward, run, *tail)
        run_backward = partial(runner, backward, run, *tail, (), {"": dy}, sums, True)
        with sdpa_kernel([attention, SDPBackend.MATH], set_priority=True), torch.no_grad():
            forward_ms, forward_host_ms = timed(run_forward, args.repeats)
            backward_ms, backward_host_ms = timed(run_backward, args.repeats)
        row = {
            "what": f"one layer, {name}, {attention.name}",
            "shape": [args.hidden, args.intermediate, args.rows, args.length],
            "forward_ms": round(forward_ms, 3),
            "backward_ms": round(backward_ms, 3),
            "forward_tflops": round(flops / forward_ms / 1e9, 1),
            "backward_tflops": round(3 * flops / backward_ms / 1e9, 1),
            "forward_host_ms": round(forward_host_ms, 3),
            "backward_host_ms": round(backward_host_ms, 3),
            "compile_seconds": round(runner.seconds, 1) if isinstance(runner, Compiler) else 0,
            "notices": runner.notices if isinstance(runner, Compiler) else [],
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
        print(json.dumps(row), flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
