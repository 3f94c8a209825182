"""`megatrain plan`: what fits, what does not, and that its bytes are those of a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from megatrain.adviser.adviser import Adviser
from megatrain.adviser.question import Question
from megatrain.adviser.smaller import smaller_kinds
from megatrain.cli import app
from megatrain.engine.buffers import StepBuffers
from megatrain.errors import UserError
from megatrain.hardware import GPUS
from megatrain.memory import BlockStore
from megatrain.memory.store import STATE
from megatrain.schedule import slot_sizes
from megatrain.units import parse_bytes

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
    assert result.output.startswith(f"{SMALL} on one RTX 4090: ")
    for part in ("device", "host", "disk", "exp_avg_sq", "a checkpoint", "workspace"):
        assert part in result.output
    assert "tokens/s" in result.output and "2B tokens:" in result.output
    assert "kWh" in result.output and "the limit is" in result.output


def test_what_is_asked_for_is_planned() -> None:
    here = (SMALL, "--gpu", "H100", "--host-memory", "64GiB", "--json", "--offload")
    found = json.loads(plan(*here, "{resident: [embed, 0-2], saved: [20], spilled: [1]}").output)
    assert found["resident_blocks"] == [0, 1, 2, 3]
    assert (found["saved_layers"], found["spilled_layers"]) == ([21], [2])
    with pytest.raises(UserError, match="layers are 0 to 23"):
        plan(*here, "{resident: [0-24]}")
    small = plan(SMALL, "--gpu", "RTX-3090", "--offload", "{saved: all}", "--micro-rows", "8")
    assert small.exit_code == 1 and "without offload" in small.output


@pytest.mark.parametrize("gpu_memory", ["4GiB", "8GiB"])
def test_micro_batches_are_as_fast_as_the_best_of_all(gpu_memory: str) -> None:
    here = (SMALL, "--gpu", "RTX-4090", "--gpu-memory", gpu_memory, "--host-memory", "64GiB")
    here += ("--rows", "12", "--json")
    every = {n: json.loads(plan(*here, "--micro-rows", n).output) for n in (1, 2, 3, 4, 6, 12)}
    seconds = {n: each["seconds_per_step"] for n, each in every.items() if each["fits"]}
    found = json.loads(plan(*here, "--micro-rows", "auto").output)
    assert found == every[found["micro_rows"]]
    assert found["seconds_per_step"] <= 1.02 * min(seconds.values())
    larger = [each for n, each in seconds.items() if n > found["micro_rows"]]
    assert all(each > 1.02 * min(seconds.values()) for each in larger)


def test_micro_batches_of_a_run_that_does_not_fit() -> None:
    small = plan(
        SMALL, "--gpu", "H100", "--host-memory", "1GiB", "--rows", "4", "--micro-rows", "auto"
    )
    assert small.exit_code == 1 and "does not fit" in small.output
    for wrong in ("0", "-1", "many", "1.5"):
        with pytest.raises(UserError, match="use auto, or 1, 2"):
            plan(SMALL, f"--micro-rows={wrong}")
    with pytest.raises(UserError, match="name one GPU"):
        plan(SMALL, "--gpu", "all", "--micro-rows", "auto")


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
    """Typed back as it is printed; and a bit less of the host does not."""
    model = str(SHAPES / "qwen2.5-1.5b")
    adviser = Adviser(model)
    question = Question(
        model=model,
        rows=4,
        micro_rows=4,
        gpu=GPUS["RTX 4090"],
        gpu_memory=6 * 2**30,
        host_memory=15 * 2**30,
        update_params_per_s=4e9,
    )
    assert adviser.try_ask(question) is None
    words = iter(adviser.smaller(question))
    host = parse_bytes(next(words).removeprefix("host memory of "))
    assert adviser.try_ask(replace(question, host_memory=host)) is not None
    assert adviser.try_ask(replace(question, host_memory=host - 2**30 // 50)) is None
    disk = (
        next(words)
        .removeprefix("a disk of ")
        .removesuffix(" for layers (disk_path, --disk-memory)")
    )
    assert adviser.try_ask(replace(question, disk_memory=parse_bytes(disk))) is not None
    gpu = parse_bytes(next(words).removeprefix("gpu_memory: "))
    assert adviser.try_ask(replace(question, gpu_memory=gpu)) is not None
    assert adviser.try_ask(replace(question, gpu_memory=gpu - 3 * 2**30)) is None
    assert next(words) == "a GPU of 32.00 GiB, such as RTX 5090"
    assert not list(words)


def test_less_memory_for_checkpoints_may_be_all_that_is_missing() -> None:
    """With it the plan fits, and with twice as much it does not."""
    adviser = Adviser(str(SMALL))
    question = Question(
        model=str(SMALL), gpu=GPUS["RTX 4090"], host_memory=2**40, update_params_per_s=4e9, rows=4
    )
    least = adviser.least_host_memory(question.with_checkpoint_memory(0))
    assert least is not None
    question = replace(question, host_memory=least + 300 * 2**20)
    assert adviser.try_ask(question) is None
    found = [words for words in adviser.smaller(question) if "checkpoint_memory" in words]
    assert found == ["checkpoint_memory: 256MiB (of a config; training waits longer)"]
    assert adviser.try_ask(question.with_checkpoint_memory(2**28)) is not None
    assert adviser.try_ask(question.with_checkpoint_memory(2**29)) is None


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
    assert 3 < hiding / mixture["hiding_tokens_unclipped"] < 5  # a forward; that and its backward
    assert 0.1 < mixture["of_resident_speed"] < many["mixture"]["of_resident_speed"] <= 1
    dense = json.loads(plan(SMALL, "--gpu", "H100", "--host-memory", "64GiB", "--json").output)
    assert "mixture" not in dense


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "GTX 1080"], "no GPU of that name is known"),
        (["--gpu", "8x H100"], "no GPU of that name is known"),
        (["--gpu", "H100,RTX-4090"], "no GPU of that name is known"),
        (["--gpu", "H100", "--gpu-memory", "lots"], "not a size"),
        (["--gpu", "H100", "--host-memory", "12 elephants"], "not a size"),
        ([], "name one with --gpu"),
        (["--gpu", "H100", "--disk-rate", "3GB"], "give --disk-memory too"),
        (["--gpu", "all", "--disk-memory", "1TB"], "give --disk-rate too"),
    ],
)
def test_bad_input_is_one_error(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=says):
        plan(SMALL, *arguments)


SHORT = [SHAPES / "qwen2.5-7b", "--gpu", "rtx4090", "--micro-rows", 4, "--host-memory", "64GiB"]
"""Not enough without a disk."""


def test_layers_on_a_disk_make_it_fit() -> None:
    refused = plan(*SHORT)
    assert refused.exit_code == 1 and "for layers (disk_path, --disk-memory)" in refused.output
    result = plan(*SHORT, "--disk-memory", "100GB", "--disk-rate", "2GB")
    assert result.exit_code == 0
    for part in ("state of layers", "on the disk: state of", "TB written to the disk", " h, "):
        assert part in result.output
    found = json.loads(
        plan(*SHORT, "--disk-memory", "100GB", "--disk-rate", "2GB", "--json").output
    )
    disk, host = found["disk"], sum(found["bytes"]["host"].values())
    assert host <= 64 * 2**30 and found["bytes"]["disk"]["state of layers"] == disk["bytes"]
    assert disk["blocks"] and max(disk["blocks"]) == 28
    moved = max(disk["read_bytes_per_step"], disk["written_bytes_per_step"])
    assert found["seconds_per_step"] >= moved / 2e9
    assert found["lanes_busy"]["disk_read"] > 0


def test_an_unknown_disk_has_no_known_time() -> None:
    result = plan(*SHORT, "--disk-memory", "100GB")
    assert result.exit_code == 0
    assert "at least" in result.output and "not known without the disk's rate" in result.output
    assert "tokens/s" not in result.output and "TB written" in result.output
    found = json.loads(plan(*SHORT, "--disk-memory", "100GB", "--json").output)
    assert found["fits"] and found["disk"]["written_bytes_per_step"] > 0
    assert found["seconds_per_step"] is None and found["tokens_per_second"] is None


def test_a_disk_that_is_too_small_is_refused_and_one_without_need_is_left_alone() -> None:
    refused = plan(*SHORT, "--disk-memory", "10MB")
    assert refused.exit_code == 1 and "allowed by disk_memory" in refused.output
    enough = plan(SMALL, "--gpu", "rtx4090", "--host-memory", "64GiB", "--disk-memory", "1GB")
    assert "tokens/s" in enough.output and "state of layers" not in enough.output


@pytest.mark.parametrize(
    ("kind", "says"),
    [("vit", "causal"), ("t5", "causal"), ("clip", "causal"), ("elephant", "no usable config")],
)
def test_no_language_model_is_refused(kind: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UserError, match=says) as refused:
        plan(tmp_path, "--gpu", "H100")
    assert "\n" not in str(refused.value)


def test_a_gguf_file_is_planned_by_its_header(workspace: Path) -> None:
    Path("run.yaml").write_text(
        "{model_name_or_path: models/base.gguf, train_files: [data/train.jsonl], output_dir: out}"
    )
    here = ("--gpu", "H100", "--host-memory", "64GiB", "--rows", "8", "--micro-rows", "8", "--json")
    of_file, of_config = (
        json.loads(plan(name, *here).stdout) for name in ("models/base.gguf", "run.yaml")
    )
    assert of_file["bytes"]["host"]["exp_avg"] == of_config["bytes"]["host"]["exp_avg"]


def test_a_config_json_is_no_config_of_a_run(workspace: Path) -> None:
    with pytest.raises(UserError, match="a file, not a directory"):
        plan("models/base/config.json", "--gpu", "H100")


def test_experts_in_more_parts_are_proposed_where_there_are_experts() -> None:
    question = Question(model="a model", gpu=GPUS["RTX 4090"], update_params_per_s=4e9)
    for parts, expected in ((None, []), (1, [2, 4]), (4, [8, 16])):
        changes = [
            each for kind in smaller_kinds(question, pool=2**30, parts=parts) for each in kind
        ]
        found = {
            words: changed.training.expert_parts
            for words, changed in changes
            if "expert_parts" in words
        }
        assert found == {f"expert_parts: {count}": count for count in expected}
