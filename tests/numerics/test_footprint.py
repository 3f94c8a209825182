"""The measurement before a run: it runs for every manner of model, and its programs are reused."""

import math
from dataclasses import asdict

import pytest
import torch

from megatrain.engine import Engine, EngineOptions, cross_entropy
from megatrain.engine.footprint import measure_footprint
from megatrain.engine.options import largest_shape
from megatrain.engine.programs import Programs
from megatrain.memory import BlockStore
from megatrain.models import build_on_meta, split_model
from megatrain.models.initialise import init_block_weights
from megatrain.models.selection import Selection

from .harness import ADAMW, make_config, make_rows
from .test_carried import gemma4

CPU = torch.device("cpu")
OPTIONS = EngineOptions(adamw=ADAMW, host_threads=1, micro_batch_rows=2)


@pytest.mark.parametrize("name", ["llama_tied", "gemma4", "gpt2_dropout", "mixtral"])
@pytest.mark.parametrize("frozen", [(), ("embed", "layers[:1]")], ids=["all", "frozen"])
def test_every_manner_of_model_is_measured(name: str, frozen: tuple[str, ...]) -> None:
    config = gemma4() if name == "gemma4" else make_config(name)
    model = split_model(
        build_on_meta(config, compute_dtype="float32"),
        compute_dtype="float32",
        selection=Selection(frozen=frozen),
    )
    footprint = measure_footprint(
        model,
        OPTIONS,
        shape=(2, 8),
        device=CPU,
        loss=cross_entropy,
        programs=Programs.of(model, OPTIONS),
    )
    assert footprint.input_bytes == 2 * 8 * model.config.hidden_size * 4
    assert len(footprint.saved_bytes) == model.num_layers
    times = [footprint.forward_s, footprint.backward_s, footprint.loss_s]
    assert all(math.isfinite(each) and each > 0 for each in times)
    rates = asdict(footprint.rates)
    of_disk = {rates.pop(f"disk_{way}_bytes_per_s") for way in ("read", "write")}
    assert all(rate > 0 for rate in rates.values()) and of_disk == {None}  # nobody has asked


def test_a_run_compiles_nothing_that_its_measurement_has_compiled() -> None:
    options = EngineOptions(
        adamw=ADAMW,
        host_threads=1,
        micro_batch_rows=2,
        compile_backend="aot_eager",
        length_multiple=8,
        loss_chunk_tokens=8,
        saved=frozenset({3}),
    )
    model = split_model(
        build_on_meta(make_config("llama"), compute_dtype="float32"), compute_dtype="float32"
    )
    programs = Programs.of(model, options)
    assert programs.compiler is not None
    rows, length, num_micro = largest_shape(model, options, num_rows=4, longest=8)
    assert (rows, length, num_micro) == (2, 8, 2)
    measure_footprint(
        model, options, shape=(rows, length), device=CPU, loss=cross_entropy, programs=programs
    )
    count = programs.compiler.num_programs
    layouts = [block.layout for block in model.blocks]
    store = BlockStore.filled(layouts, init_block_weights(model, seed=0), device=CPU)
    engine = Engine(model, store, options, device=CPU, programs=programs)
    engine.step(make_rows(4, longest=8), learning_rate=1e-3)
    # All but the rounding of the gradients of embed, layers and head.
    assert programs.compiler.num_programs == count + 3


def test_the_largest_shape_of_a_step() -> None:
    model = split_model(
        build_on_meta(make_config("llama"), compute_dtype="float32"), compute_dtype="float32"
    )
    by_tokens = EngineOptions(micro_batch_tokens=64)
    assert largest_shape(model, by_tokens, num_rows=10, longest=20) == (4, 20, 4)
    assert largest_shape(model, by_tokens, num_rows=2, longest=100) == (1, 100, 2)
    assert largest_shape(model, EngineOptions(), num_rows=5, longest=7) == (5, 7, 1)
