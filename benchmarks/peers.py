"""How fast is the same work with other ways to train a model of this size on one GPU?

    python benchmarks/peers.py configs/shapes/qwen2.5-3b --rows 32 --length 1024

Every peer starts from the same random weights and sees the same fresh tokens, each in a process of
its own: one that runs out of memory is a row that says so.  Precision differs, and each row says
how.  Shapes must be like Llama's, with a head that is one matrix.  Only megatrain is held to
`--gpu-memory`.  Prints times as multiples of the first peer's, and appends one JSON line a peer.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megatrain import __version__
from megatrain.bencher import LEARNING_RATE, BenchOptions, _random_weights, append_row, run_bench
from megatrain.engine import choose_device
from megatrain.engine.attention import attention_choice
from megatrain.engine.meter import GpuMeter
from megatrain.models import build_on_meta, read_config, split_model
from megatrain.units import parse_bytes

RESULTS = Path(__file__).parent / "results" / "peers.jsonl"
LOSS_CHUNK_TOKENS = 4096
WORLD = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
WORLD |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # whichever is free
PACKAGES = ("torch", "transformers", "deepspeed", "torchao", "liger-kernel")
BENCH_STEP = re.compile(r"step \d+: loss (\S+),")
ERROR_LINE = re.compile(r"^(?:\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)", re.MULTILINE)

Row = dict[str, Any]
Step = Callable[[Tensor], Tensor]
"""One optimizer step on `ids_BT`, on the device; returns the loss."""


class LossHead(nn.Module):
    """Mean cross-entropy without all logits at one time: Liger's fused loss, else in chunks.

    It holds the output matrix itself, so that whoever shards parameters by module gathers it here.
    """

    def __init__(self, weight_VD: nn.Parameter, liger: Any) -> None:
        super().__init__()
        self.weight, self.liger = weight_VD, liger

    def forward(self, x_TD: Tensor, labels_T: Tensor) -> Tensor:
        """Loss of the predictions from `x_TD`."""
        if self.liger is not None:
            return self.liger(self.weight, x_TD, labels_T)

        def summed(x_TD: Tensor, labels_T: Tensor) -> Tensor:
            return F.cross_entropy((x_TD @ self.weight.T).float(), labels_T, reduction="sum")

        chunks = zip(x_TD.split(LOSS_CHUNK_TOKENS), labels_T.split(LOSS_CHUNK_TOKENS), strict=True)
        sums = [checkpoint(summed, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(sums).sum() / len(labels_T)


class Trainee(nn.Module):
    """A causal LM whose forward is its loss on tokens, with the weights of megatrain's bench."""

    def __init__(self, work: BenchOptions, dtype: torch.dtype, on: str) -> None:
        super().__init__()
        device = choose_device(work.device)
        config = read_config(Path(work.model))
        config._attn_implementation = "sdpa"
        kind = str(dtype).removeprefix("torch.")
        blocks = split_model(build_on_meta(config, compute_dtype=kind), compute_dtype=kind)
        model: Any = build_on_meta(config, compute_dtype=kind)
        for _, drawn in _random_weights(blocks, device):
            weights = {name: tensor.to(on, dtype) for name, tensor in drawn.items()}
            model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        for module in model.modules():
            for key, buffer in module.named_buffers(recurse=False):
                setattr(module, key, buffer.to(device))
        head = model.get_output_embeddings()
        if head.bias is not None or getattr(config, "final_logit_softcapping", None):
            raise ValueError(f"{work.model}: its head is more than a matrix; use another shape")
        liger = None
        if device.type == "cuda" and importlib.util.find_spec("liger_kernel"):
            functions = importlib.import_module("liger_kernel.transformers")
            liger = functions.LigerFusedLinearCrossEntropyLoss()
        self.body, self.head = model.model, LossHead(head.weight, liger)
        for index, layer in enumerate(self.body.layers):
            wrapped: Any = checkpoint_wrapper(layer)  # not reentrant
            if work.compile:  # the recomputation with it
                wrapped = torch.compile(wrapped, fullgraph=True, dynamic=False)
            self.body.layers[index] = wrapped
        assert not any(param.is_meta for param in self.parameters())

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Mean loss of the next tokens."""
        x_BTD = self.body(input_ids=ids_BT, use_cache=False).last_hidden_state
        return self.head(x_BTD[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())


Built = tuple[Trainee, Step, Row]
"""A model, its step, and what the row says of how it trains."""
PURE = {"state": "weights and moments in the compute dtype"}
MASTERS = {"state": "fp32 masters and moments"}


def plain_step(work: BenchOptions, trainee: Trainee, offloaded: Any = None) -> Step:
    """Micro-batches, clipping, update by torchao's optimizer or a plain one."""
    clipped: list[Tensor] = list(trainee.parameters())
    optimizer = offloaded or torch.optim.AdamW(clipped, LEARNING_RATE, weight_decay=0.0, fused=True)
    if offloaded:
        clipped = [offloaded.param_d2h_map.get(param, param) for param in clipped]

    def step(ids_BT: Tensor) -> Tensor:
        losses = []
        for micro_BT in ids_BT.split(work.micro_rows):
            loss = trainee(micro_BT) * (len(micro_BT) / len(ids_BT))
            loss.backward()
            losses.append(loss.detach())
        if work.max_grad_norm > 0:
            if offloaded:
                offloaded.stream.synchronize()  # gradients are under way to the host
            nn.utils.clip_grad_norm_(clipped, work.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


def in_vram(work: BenchOptions, device: torch.device, dtype: torch.dtype) -> Built:
    """Weights, gradients and moments on the device."""
    trainee = Trainee(work, dtype, on=device.type)
    return trainee, plain_step(work, trainee), PURE


def torchao_offload(work: BenchOptions, device: torch.device, dtype: torch.dtype) -> Built:
    """Weights on the device; gradients and moments on the host, updated there."""
    optim = importlib.import_module("torchao.optim")
    trainee = Trainee(work, dtype, on=device.type)
    options: Row = {"offload_gradients": True, "lr": LEARNING_RATE, "weight_decay": 0.0}
    optimizer = optim.CPUOffloadOptimizer(trainee.parameters(), torch.optim.AdamW, **options)
    return trainee, plain_step(work, trainee, optimizer), PURE


def fsdp2_offload(work: BenchOptions, device: torch.device, dtype: torch.dtype) -> Built:
    """Each layer a shard of a world of one; parameters, gradients and moments on the host."""
    cuda = device.type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")  # gloo for the norm
    trainee = Trainee(work, torch.float32, on="cpu")
    policies: Any = {
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=cuda),
    }
    for module in (*trainee.body.layers, trainee):
        fully_shard(module, **policies)
    return trainee, plain_step(work, trainee), MASTERS


def zero3_offload(work: BenchOptions, device: torch.device, dtype: torch.dtype) -> Built:
    """ZeRO-3 in a world of one; parameters, gradients and moments on the host."""
    cuda = device.type == "cuda"
    deepspeed = importlib.import_module("deepspeed")
    unbuilt = None
    try:  # compiled here and now, with g++ and ninja
        importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder().load()
    except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError) as error:
        unbuilt = str(error).splitlines()[0]
    adam = {"lr": LEARNING_RATE, "weight_decay": 0.0, "torch_adam": unbuilt is not None}
    host = {"device": "cpu", "pin_memory": cuda}
    plan = {
        "train_micro_batch_size_per_gpu": work.micro_rows,
        "gradient_accumulation_steps": work.rows // work.micro_rows,
        "gradient_clipping": work.max_grad_norm,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host},
    }
    model = Trainee(replace(work, compile=False), dtype, on="cpu")
    deepspeed.zero.Init(module=model, config_dict_or_path=plan, dtype=dtype)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=plan)

    def step(ids_BT: Tensor) -> Tensor:
        losses = []
        for micro_BT in ids_BT.split(work.micro_rows):
            losses.append(engine(micro_BT))
            engine.backward(losses[-1])
            engine.step()
        return torch.stack(losses).detach().mean()

    which = "DeepSpeedCPUAdam" if unbuilt is None else f"torch.optim.AdamW ({unbuilt})"
    return model, step, MASTERS | {"adam": which, "compile": False}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to train; without `build` it is megatrain."""

    build: Callable[[BenchOptions, torch.device, torch.dtype], Built] | None = None
    place: str = "auto"
    needs: str | None = None
    """Module without which it cannot run."""
    micro: str = "micro_rows"
    """Option with the rows of its micro-batches: fewer are better where each moves all weights."""


PEERS = {
    "megatrain-resident": Peer(place="device"),
    "megatrain": Peer(),
    "vram": Peer(build=in_vram),
    "deepspeed-zero3-offload": Peer(build=zero3_offload, needs="deepspeed", micro="offload_rows"),
    "torchao-cpu-offload": Peer(build=torchao_offload, needs="torchao", micro="rows"),
    "fsdp2-cpu-offload": Peer(build=fsdp2_offload, micro="offload_rows"),
}


def measure(peer: Peer, work: BenchOptions, device: torch.device) -> Row:
    """Train with a peer, timed as megatrain's bench times itself."""
    if peer.build is None:
        return measure_megatrain(replace(work, place=peer.place))
    meter = GpuMeter(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    trainee, step, notes = peer.build(work, device, dtype)
    num_params = sum(getattr(p, "ds_numel", p.numel()) for p in trainee.parameters())
    vocab_size = trainee.body.config.vocab_size
    generator = np.random.default_rng(0)
    seconds, losses = [], []
    for index in range(work.warmup_steps + work.steps):
        rows = [generator.integers(0, vocab_size, work.length) for _ in range(work.rows)]
        if index == work.warmup_steps:
            torch.cuda.empty_cache()  # what only the start needed
            meter.start()
        began = time.perf_counter()
        with attention_choice(device):
            loss = step(torch.from_numpy(np.stack(rows)).to(device)).item()
        seconds.append(time.perf_counter() - began)
        losses.append(loss)
        print(f"step {index + 1}: loss {loss:.4f}, {seconds[-1]:.3f} s", flush=True)
    meter.stop()
    tokens, timed = work.rows * work.length, seconds[work.warmup_steps :]
    row: Row = {f"seconds_per_step_p{q}": np.percentile(timed, q).round(4) for q in (20, 50, 80)}
    p50 = row["seconds_per_step_p50"]
    row |= {
        "parameters": num_params,
        "tokens_per_second": round(tokens / p50, 1),
        "tflops_6n": round(6 * num_params * tokens / p50 / 1e12, 1),
        "losses": losses[work.warmup_steps :],
        "loss_head": "chunks" if trainee.head.liger is None else "liger",
    }
    return row | meter.figures() | notes


def measure_megatrain(work: BenchOptions) -> Row:
    """Run megatrain's own bench; it tells the losses only as it goes."""
    losses: list[float] = []

    def listen(line: str) -> None:
        print(line, flush=True)
        if told := BENCH_STEP.match(line):
            losses.append(float(told[1]))

    budget = None if work.place == "device" else work.gpu_memory
    row = run_bench(replace(work, gpu_memory=budget), listen)
    return row | MASTERS | {"losses": losses[work.warmup_steps :]}


def child(name: str, work: str, result: str) -> None:
    """One peer in this process; its row goes to a file."""
    Path("/proc/self/oom_score_adj").write_text("1000")  # if one must go, then this process
    device = choose_device("auto")
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    Path(result).write_text(json.dumps({"machine": machine}))  # also if it goes no further
    row = measure(PEERS[name], BenchOptions(**json.loads(work)), device) | {"machine": machine}
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    row["host_rss_bytes"] = int(peak[1]) * 1024 if peak else None
    Path(result).write_text(json.dumps(row))
    if dist.is_initialized():
        dist.destroy_process_group()


def in_process(name: str, work: BenchOptions, timeout_s: float) -> Row:
    """A peer's figures from a process of its own, or why there are none."""
    needs = PEERS[name].needs
    if needs is not None and importlib.util.find_spec(needs) is None:
        return {"error": f"{needs} is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        result, errors = Path(folder, "row.json"), Path(folder, "errors")
        command = [sys.executable, __file__, "--child", name, json.dumps(asdict(work)), str(result)]
        before, began = psutil.virtual_memory().used, time.monotonic()
        peak, late = before, False
        with errors.open("w") as stderr:
            process = subprocess.Popen(command, stderr=stderr, env=os.environ | WORLD)
        while process.poll() is None:
            peak = max(peak, psutil.virtual_memory().used)  # pinned memory too
            if late := time.monotonic() - began > timeout_s:
                process.kill()
            time.sleep(0.2)
        text = errors.read_text(errors="replace")
        print(text[-4000:], flush=True)
        row = json.loads(result.read_text()) if result.exists() else {}
        row |= {"host_rise_bytes": peak - before, "wall_seconds": round(time.monotonic() - began)}
        if process.returncode:
            why = reason(text, process.returncode)
            row["error"] = f"not done after {timeout_s:.0f} s" if late else why
        return row


def reason(text: str, code: int) -> str:
    """Why a process failed, from what it wrote and its exit code."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}, as when the host has no memory left"
    errors = ERROR_LINE.findall(text) or text.splitlines() or [f"exit code {code}"]
    return errors[-1][:500]


def table(rows: Sequence[Row]) -> str:
    """The main figures; times as multiples of the first row's."""
    first = rows[0].get("seconds_per_step_p50")
    heads = ("s/step", "ratio", "tokens/s", "TFLOPS", "VRAM", "RSS")
    lines = [f"{'peer':24}" + "".join(f"{head:>9}" for head in heads) + "  losses (memory in GiB)"]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['peer']:24}  {row['error'][:100]}")
            continue
        p50, losses = row["seconds_per_step_p50"], row["losses"]
        cells = [f"{p50:.3f}", f"{p50 / first:.2f}" if first else "-"]
        cells += [f"{row['tokens_per_second']:,.0f}", f"{row['tflops_6n']:.1f}"]
        for nbytes in (row.get("device_process_bytes"), row["host_rss_bytes"]):
            cells.append(f"{nbytes / 2**30:.1f}" if nbytes else "-")
        text = "".join(f"{cell:>9}" for cell in cells)
        lines.append(f"{row['peer']:24}{text}  {losses[0]:.4f} to {losses[-1]:.4f}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="directory with a config.json; no weights needed")
    numbers = {"rows": 32, "length": 1024, "micro-rows": 16, "steps": 6, "warmup-steps": 3}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--offload-rows", type=int, help="default: all rows at once")
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--gpu-memory", type=parse_bytes)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--timeout", type=float, default=900, help="seconds of one peer")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.offload_rows = args.offload_rows or args.rows
    if args.rows % args.offload_rows:
        parser.error("--offload-rows must divide --rows")
    return args


def main() -> None:
    """Every peer, one after the other."""
    args = parse()
    versions = {"python": platform.python_version(), "megatrain": __version__}
    found = [name for name in PACKAGES if importlib.util.find_spec(name.replace("-", "_"))]
    versions |= {name: metadata.version(name) for name in found}
    names = ("model", "rows", "length", "steps", "warmup_steps", "max_grad_norm", "gpu_memory")
    rows: list[Row] = []
    for name in args.peers:
        options = {key: getattr(args, key) for key in names}
        options |= {"micro_rows": getattr(args, PEERS[name].micro), "compile": not args.no_compile}
        print(f"== {name}", flush=True)
        row = options | in_process(name, BenchOptions(**options), args.timeout)
        row |= {"what": "peers", "peer": name, "model": Path(args.model).name}
        rows.append(row | {"versions": versions})
        append_row(args.output, rows[-1])
    print(table(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
