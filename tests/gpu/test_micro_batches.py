"""A split that is chosen on a real GPU; run with `make test-gpu`."""

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from megatrain.adviser import Earlier, plan_in_micro_batches
from megatrain.bencher import BenchOptions, run_bench
from megatrain.engine import EngineOptions, cross_entropy
from megatrain.engine.device import release_cached_memory
from megatrain.models import build_on_meta, read_config, split_model
from megatrain.placing import Budgets, plan_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

SHAPE = Path(__file__).parents[2] / "configs" / "shapes" / "llama-50m"
DEVICE = torch.device("cuda", 0)
ROWS, LENGTH = 64, 1024


@pytest.fixture(autouse=True)
def _whole_memory() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def test_what_has_no_room_leaves_room_for_the_next_smaller() -> None:
    model = split_model(
        build_on_meta(read_config(SHAPE), compute_dtype="bfloat16"), compute_dtype="bfloat16"
    )
    gc.collect()  # the sessions of other tests of this process
    before = torch.cuda.memory_allocated(DEVICE)
    options, budgets = EngineOptions(length_multiple=LENGTH), Budgets(gpu=2**31 + before)
    measure = partial(
        plan_run,
        model,
        device=DEVICE,
        loss=cross_entropy,
        num_rows=ROWS,
        longest=LENGTH,
        budgets=budgets,
    )
    plan = plan_in_micro_batches(
        measure,
        model,
        options,
        device=DEVICE,
        num_rows=ROWS,
        longest=LENGTH,
        budgets=budgets,
        offload={},
        earlier=Earlier(checkpoint="checkpoint-1", tokens=ROWS * LENGTH),
    )
    tokens = plan.options.micro_batch_tokens
    assert tokens is not None and tokens < ROWS * LENGTH
    assert f"no room for {ROWS * LENGTH}" in plan.in_words()
    torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream that has multiplied
    release_cached_memory(DEVICE)
    assert torch.cuda.memory_allocated(DEVICE) - before < 2**24  # buffers of the model


def test_a_bench_in_micro_batches_that_are_chosen() -> None:
    said: list[str] = []
    options = BenchOptions(
        model=str(SHAPE), rows=8, length=512, micro_rows=None, steps=1, warmup_steps=1
    )
    row = run_bench(options, said.append)
    assert 8 % row["micro_rows"] == 0
    assert f"micro_batch_tokens {512 * row['micro_rows']}, chosen: " in "\n".join(said)
