"""`megatrain plan`: what fits, what does not, and that its bytes are those of a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from megatrain.adviser.adviser import Adviser, Question
from megatrain.cli import app
from megatrain.engine.buffers import StepBuffers
from megatrain.errors import UserError
from megatrain.hardware import GPUS
from megatrain.memory import BlockStore
from megatrain.memory.store import STATE
from megatrain.schedule import slot_sizes

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
SMALL = SHAPES / "qwen2.5-0.5b"


def plan(*arguments: Any) -> Result:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments), "--host-bandwidth", "100GB"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_bytes_by_tier_a_step_and_a_whole_run() -> None:
    result = plan(SMALL, "--gpu", "rtx4090", "--host-memory", "64GiB", "--tokens", "2e9")
    assert result.exit_code == 0
    for part in ("device", "host", "disk", "exp_avg_sq", "a checkpoint", "workspace"):
        assert part in result.output
    assert "tokens/s" in result.output and "2B tokens:" in result.output
    assert "kWh" in result.output and "the limit is" in result.output


def test_json_is_what_the_text_says() -> None:
    result = plan(SMALL, "--gpu", "H100", "--host-memory", "64GiB", "--json")
    found = json.loads(result.output)
    assert found["fits"] and found["gpu"] == "H100"
    assert sum(found["bytes"]["device"].values()) < GPUS["H100"].memory_bytes
    assert found["tokens_per_second"] == pytest.approx(32 * 1024 / found["seconds_per_step"])
    assert 0 < found["model_tflops"] < 989
    assert max(found["lanes_busy"].values()) <= 1 + 1e-9


def test_what_does_not_fit_says_what_would() -> None:
    refused = plan(SMALL, "--gpu", "rtx4090", "--gpu-memory", "2GiB", "--host-memory", "3GiB")
    assert refused.exit_code == 1
    assert "does not fit" in refused.output and "what would make it fit" in refused.output
    as_json = plan(SMALL, "--gpu", "rtx4090", "--gpu-memory", "2GiB", "--json")
    assert as_json.exit_code == 1 and json.loads(as_json.output)["fits"] is False


def test_every_suggestion_fits() -> None:
    adviser = Adviser(str(SMALL))
    question = Question(
        model=str(SMALL),
        gpu=GPUS["RTX 4090"],
        gpu_memory=8 * 2**30,
        host_memory=4 * 2**30,
        update_params_per_s=4e9,
    )
    assert adviser.try_ask(question) is None
    words = list(adviser.smaller(question))
    assert words and words[0].startswith("host memory of")
    gib = float(words[0].removeprefix("host memory of ").removesuffix(" GiB"))
    enough = replace(question, host_memory=int((gib + 0.01) * 2**30))
    assert adviser.try_ask(enough) is not None
    assert adviser.try_ask(replace(question, host_memory=int((gib - 0.02) * 2**30))) is None


def test_all_gpus_are_compared() -> None:
    result = plan(SMALL, "--gpu", "all")
    assert result.exit_code == 0
    assert all(name in result.output for name in GPUS)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("gpu_memory", [1.2, 1.202, 1.21, 24.0])
def test_bytes_are_those_that_a_run_allocates(
    clip: float, gpu_memory: float, workspace: Path
) -> None:
    adviser = Adviser("models/base")
    question = Question(
        model="models/base",
        rows=4,
        length=64,
        micro_rows=2,
        max_grad_norm=clip,
        gpu=GPUS["RTX 3090"],
        gpu_memory=int(gpu_memory * 2**30),
        host_memory=2**40,
        update_params_per_s=1e5,
    )
    found, cpu = adviser.ask(question), torch.device("cpu")
    layouts, placement = [block.layout for block in adviser.model.blocks], found.placement
    store = BlockStore(layouts, device=cpu, resident=placement.resident)
    sizes = slot_sizes(layouts, adviser.rule(question).laid_out(placement), "bfloat16")
    buffers = StepBuffers(sizes, device=cpu)
    planned = {k: n for k, n in found.need.host.items() if k not in ("process", "checkpoint")}
    of_run = store.slab.nbytes + buffers.slab.nbytes
    assert 0 <= of_run - sum(planned.values()) <= 2 * 4096  # an empty slab has a page
    resident = sum(
        store.flat(block, purpose).nbytes for block in placement.resident for purpose in STATE
    )
    pools = (buffers.weights, buffers.accumulators, buffers.staging, buffers.passing)
    slots = sum(slot.nbytes for pool in pools for slot in pool)
    slots += sum(buffers.home_gradients[slot].nbytes for slot in sizes.resident_gradients)
    estimated = ("inputs of layers", "saved activations", "masks and positions", "workspace")
    on_device = sum(n for k, n in placement.device.items() if k not in estimated)
    assert on_device == resident + slots


def test_more_rows_a_step_are_told_where_they_help() -> None:
    result = plan(
        SHAPES / "qwen2.5-7b",
        *("--gpu", "H100", "--gpu-memory", "40GiB", "--host-memory", "200GiB", "--rows", 4),
        *("--micro-rows", 4),
    )
    assert result.exit_code == 0
    assert "8 rows a step (gradient_accumulation_steps):" in result.output


def test_a_mixture_is_told_what_streaming_costs_it() -> None:
    shape, machine = SHAPES / "olmoe-1b-7b", ("--gpu", "H200", "--host-memory", "300GiB")
    words = plan(shape, *machine, "--gpu-memory", "40GiB").output
    assert "a token uses 1.28B of the parameters (18.5%)" in words
    assert "of the speed with all state on the GPU" in words
    few, many = (
        json.loads(plan(shape, *machine, "--gpu-memory", "40GiB", "--rows", rows, "--json").output)
        for rows in (16, 256)
    )
    mixture = few["mixture"]
    assert mixture["parameters_a_token"] / mixture["parameters"] == pytest.approx(0.185, abs=5e-4)
    hiding = mixture["hiding_tokens_clipped"]
    assert hiding == pytest.approx(many["mixture"]["hiding_tokens_clipped"])
    assert 3 < hiding / mixture["hiding_tokens_unclipped"] < 5  # a forward; three, and the loss
    assert 0.1 < mixture["of_resident_speed"] < many["mixture"]["of_resident_speed"] <= 1
    dense = json.loads(plan(SMALL, "--gpu", "H100", "--host-memory", "64GiB", "--json").output)
    assert "mixture" not in dense


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "GTX 1080"], "no such GPU here"),
        (["--gpu", "8x H100"], "no such GPU here"),
        (["--gpu", "H100,RTX-4090"], "no such GPU here"),
        (["--gpu", "H100", "--gpu-memory", "lots"], "not a size"),
        (["--gpu", "H100", "--host-memory", "12 elephants"], "not a size"),
        ([], "name one with --gpu"),
    ],
)
def test_bad_input_is_one_error(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=says):
        plan(SMALL, *arguments)


def test_no_language_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UserError, match="causal"):
        plan(tmp_path, "--gpu", "H100")
