"""Does a model far larger than its device slots train?  Loss, time and memory of a random model.

    python benchmarks/stream_shape.py --layers 28 --hidden 1536 --steps 20

The shape is Qwen2.5-1.5B by default.  Rows are arithmetic sequences modulo a small number with
random starts and strides, new ones each step, so that the loss can fall without repeating data.
Appends one JSON line to benchmarks/results/stream_shape.jsonl.
"""

import argparse
import json
import platform
import resource
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from megatrain.data import Row
from megatrain.engine import Engine, EngineOptions
from megatrain.engine.lanes import InlineLanes
from megatrain.layout import Purpose
from megatrain.memory import BlockStore
from megatrain.models import build_on_meta, split_model
from megatrain.models.initialise import init_block_weights
from megatrain.monitor import write_trace
from megatrain.schedule import occupancy

RESULTS = Path(__file__).parent / "results" / "stream_shape.jsonl"


def sequences(count: int, length: int, generator: np.random.Generator) -> list[Row]:
    """Rows start + i * stride (mod 1009)."""
    starts, strides = generator.integers(0, 1009, count), generator.integers(1, 8, count)
    return [
        Row(
            input_ids=(start + stride * np.arange(length)) % 1009,
            weights=np.ones(length, dtype=np.float32),
        )
        for start, stride in zip(starts, strides, strict=True)
    ]


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--intermediate", type=int, default=8960)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--micro-rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--trace", type=Path, help="write a trace of the last step")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--chunk", type=int, default=4096, help="tokens whose logits exist at once")
    parser.add_argument(
        "--resident", type=int, help="state of embed, head and so many first layers on the device"
    )
    parser.add_argument("--saved", type=int, default=0, help="last layers that are not recomputed")
    parser.add_argument("--inline", action="store_true", help="no overlap: the reference")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Build, train, print, record."""
    args = parse()
    device = torch.device(args.device)
    config = transformers.AutoConfig.for_model(
        "qwen2",
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        vocab_size=args.vocab,
        tie_word_embeddings=True,
    )
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    model = split_model(build_on_meta(config, compute_dtype=dtype), compute_dtype=dtype)
    layouts = [block.layout for block in model.blocks]
    head = model.head.index
    resident = frozenset()
    if args.resident is not None:
        resident = frozenset({0, head, *range(1, args.resident + 1)})
    store = BlockStore.filled(
        layouts, init_block_weights(model, seed=0), device=device, resident=resident
    )
    compiles = device.type == "cuda" and not args.eager
    options = EngineOptions(
        micro_batch_rows=args.micro_rows,
        max_grad_norm=args.max_grad_norm,
        compile_backend="inductor" if compiles else None,
        loss_chunk_tokens=args.chunk if compiles else 1024,
        saved=frozenset(range(head - args.saved, head)),
    )
    lanes = InlineLanes(device) if args.inline else None
    engine = Engine(model, store, options, device=device, lanes=lanes)
    generator = np.random.default_rng(0)
    losses, times = [], []
    for step in range(args.steps):
        started = time.perf_counter()
        rows = sequences(args.rows, args.length, generator)
        if args.trace and step == args.steps - 1:
            engine.spans = []
        result = engine.step(rows, learning_rate=args.learning_rate)
        times.append(time.perf_counter() - started)
        losses.append(result.loss)
        print(
            f"step {step + 1} loss {result.loss:.4f} norm {result.grad_norm:.3f} {times[-1]:.3f} s",
            flush=True,
        )
    busy = {}
    if engine.spans:
        busy = {lane.value: round(share, 4) for lane, share in occupancy(engine.spans).items()}
        write_trace(args.trace, engine.spans, [block.name for block in model.blocks])
    tokens = args.rows * args.length
    seconds = statistics.median(times[2:])
    state = sum(
        block.layout.nbytes(p)
        for block in model.blocks
        for p in Purpose
        if p not in (Purpose.GRADIENT, Purpose.ACCUMULATOR)
    )
    row = {
        "what": "streamed training of a random Qwen2-shaped model",
        "parameters": model.num_params,
        "layers": args.layers,
        "tokens_per_step": tokens,
        "max_grad_norm": args.max_grad_norm,
        "lanes": "inline" if args.inline else "default",
        "lanes_busy": busy,
        "compiled": compiles,
        "resident_blocks": len(resident),
        "saved_layers": args.saved,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "seconds_per_step_p50": seconds,
        "tokens_per_second": tokens / seconds,
        "tflops_6n": 6 * model.num_params * tokens / seconds / 1e12,
        "host_state_bytes": state,
        "slot_bytes": sum(
            t.numel()
            for pool in (
                engine.buffers.weights,
                engine.buffers.accumulators,
                engine.buffers.staging,
            )
            for t in pool
        ),
        "device_peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        "host_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(row, indent=1))
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
