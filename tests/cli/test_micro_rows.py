"""The split that a run chooses is the one that `plan` would; what has no room is made smaller."""

import gc
import json
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig
from typer.testing import CliRunner

from megatrain.adviser import micro_batches, plan_in_micro_batches
from megatrain.adviser.adviser import Adviser
from megatrain.cli import app
from megatrain.config import make_config
from megatrain.engine import EngineOptions, cross_entropy
from megatrain.engine.compute import BlockCompute
from megatrain.engine.footprint import measure_footprint
from megatrain.engine.programs import Programs
from megatrain.engine.recovery import DeviceMemoryError
from megatrain.errors import NoRoomError, UserError
from megatrain.hardware import GPUS
from megatrain.models import BlockModel, build_on_meta, read_config, split_model
from megatrain.models.parts import in_parts
from megatrain.placing import Budgets, plan_run
from megatrain.trainer import Trainer
from tests.checkpoint.test_parts import SIZES

from .test_plan_config import BASE, MACHINE, of_config, plan

CPU = torch.device("cpu")
AUTO = {"micro_batch_tokens": "auto"}


@pytest.fixture
def on_an_l4(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Asked about, this machine has one."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L4")
    monkeypatch.setattr(micro_batches, "free_device_bytes", lambda _: GPUS["L4"].memory_bytes)
    monkeypatch.setattr("megatrain.adviser.chosen_rates.host_update_rate", lambda: 100e9 / 26)
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    "keys",
    [
        {"gradient_accumulation_steps": 6},
        {"gpu_memory": "1200MiB", "per_device_train_batch_size": 64, "max_length": 2048},
        {"offload": {"saved": 1}, "max_grad_norm": 0.0, "save_strategy": "no"},
    ],
    ids=["plain", "short of memory", "by hand"],
)
def test_a_run_proposes_what_its_plan_says(
    keys: dict[str, Any], workspace: Path, on_an_l4: torch.device
) -> None:
    keys = BASE | AUTO | {"dtype": "bfloat16", "host_memory": "8GiB"} | keys
    Path("c.yaml").write_text(yaml.safe_dump(keys))
    machine = ("--gpu", "L4", "--host-bandwidth", "100GB", "--json")
    planned = json.loads(plan("c.yaml", *machine).stdout)
    assert planned == json.loads(plan("c.yaml", *machine, "--micro-rows", "auto").stdout)
    run = Trainer(make_config(keys)[0], quiet=True).run
    question = micro_batches._question_here(
        run.blocks.model,
        run.options,
        device=on_an_l4,
        rows=planned["rows"],
        length=planned["length"],
        budgets=run.memory,
        offload=keys.get("offload", {}),
    )
    assert question is not None
    sizes = micro_batches.even_splits(planned["rows"])
    rows, why = micro_batches.propose(
        run.blocks.model, sizes, length=planned["length"], device=on_an_l4, question=question
    )
    assert rows == planned["micro_rows"] and "of the fastest" in why
    assert planned["rows"] % rows == 0
    answer = Adviser(run.blocks.model).ask(replace(question, micro_rows=rows))
    assert answer.placement.seconds == planned["seconds_per_step"]
    for tier in ("device", "host"):
        assert answer.bytes_by_tier()[tier] == planned["bytes"][tier]


def test_where_the_estimate_knows_nothing(workspace: Path, on_an_l4: torch.device) -> None:
    propose = partial(micro_batches.propose, small(), device=on_an_l4)
    sizes = micro_batches.even_splits(24)
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 24]
    rows, why = propose(sizes, length=1500, question=None)
    assert rows == 8 and "bench --calibrate" in why
    assert propose(sizes, length=20_000, question=None)[0] == 1
    assert propose([1], length=10, question=None) == (1, "there is one row")


def small() -> BlockModel:
    model = build_on_meta(read_config(Path("models/base")), compute_dtype="float32")
    return split_model(model, compute_dtype="float32")


def test_a_run_that_the_planner_finds_no_room_for_begins_with_the_smallest(
    workspace: Path, on_an_l4: torch.device
) -> None:
    model, options = small(), EngineOptions(compile_backend="inductor")
    question = micro_batches._question_here(
        model,
        options,
        device=on_an_l4,
        rows=4,
        length=64,
        budgets=Budgets(host=1),
        offload={},
    )
    rows, why = micro_batches.propose(
        model, [1, 2, 4], length=64, device=on_an_l4, question=question
    )
    assert rows == 1 and "room for none" in why


def tried(most: int, wrong: UserError | None = None) -> tuple[list[int], str]:
    """Tokens of the micro-batches that were measured, where there is room for some; what is said or
    raised.
    """
    model, asked = small(), list[int]()
    budgets = Budgets(host=2**33)

    def measure(options: EngineOptions) -> Any:
        assert options.micro_batch_tokens is not None
        asked.append(options.micro_batch_tokens)
        if wrong is not None:
            raise wrong
        if options.micro_batch_tokens > most:
            raise NoRoomError(asked=f"{options.micro_batch_tokens}", found="f", change="c")
        return plan_run(
            model,
            options,
            device=CPU,
            loss=cross_entropy,
            num_rows=12,
            longest=10,
            budgets=budgets,
        )

    try:
        found = plan_in_micro_batches(
            measure,
            model,
            EngineOptions(),
            device=CPU,
            num_rows=12,
            longest=10,
            budgets=budgets,
            offload={},
        )
    except UserError as error:
        return asked, str(error)
    assert found.options.micro_batch_tokens == asked[-1]
    return asked, found.in_words()


def test_what_has_no_room_gives_way_to_the_next_smaller(workspace: Path) -> None:
    asked, said = tried(120)
    assert asked == [120] and "no room" not in said
    asked, said = tried(45)
    assert asked == [120, 60, 40] and "no room for 120, 60" in said
    assert tried(9) == ([120, 60, 40, 30, 20, 10], "10: f. c.")
    assert tried(120, UserError(asked="a", found="b", change="c")) == ([120], "a: b. c.")


@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_a_measurement_without_room_leaves_nothing_behind(
    where: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next one would have less room; reference counts alone must do it."""
    views, ran = list[Any](), getattr(BlockCompute, where)

    def fails(self: BlockCompute, state: Any, op: Any) -> None:
        ran(self, state, op)
        views.append(weakref.ref(self.views))
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(BlockCompute, where, fails)
    model, options = small(), EngineOptions(host_threads=1)
    gc.collect()
    gc.disable()
    try:
        with suppress(DeviceMemoryError):
            measure_footprint(
                model,
                options,
                shape=(2, 16),
                device=CPU,
                loss=cross_entropy,
                programs=Programs.of(model, options),
            )
        assert [view() for view in views] == [None]
    finally:
        gc.enable()


def test_a_plan_of_several_gpus_needs_a_number(workspace: Path) -> None:
    Path("c.yaml").write_text(yaml.safe_dump(BASE | AUTO))
    with pytest.raises(UserError, match="give --micro-rows a number"):
        plan("c.yaml", "--gpu", "all")
    assert plan("c.yaml", "--gpu", "all", "--micro-rows", 2).exit_code == 0
    assert of_config(AUTO, "--micro-rows", 2)["micro_rows"] == 2
    assert plan("c.yaml", *MACHINE).exit_code == 0


def test_bench_chooses_too(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batches, "CPU_TOKENS", 40)
    arguments = ["bench", "models/shape", "--rows", "6", "--length", "16", "--micro-rows", "auto"]
    arguments += ["--steps", "1", "--warmup-steps", "0"]
    result = CliRunner().invoke(app, [*arguments, "--output", "o.jsonl"])
    assert result.exit_code == 0
    assert "micro_batch_tokens 32, chosen: 2 of the step's 6 rows" in result.stdout
    assert json.loads(Path("o.jsonl").read_text())["micro_rows"] == 2
    for more, message in (
        (["--place", "host"], "--micro-rows auto with --place host"),
        (["--micro-rows", "0"], "use auto, or 1, 2"),
    ):
        error = CliRunner().invoke(app, [*arguments, *more]).exception
        assert isinstance(error, UserError) and message in str(error)


def test_experts_in_parts_are_asked_about_as_they_are(
    workspace: Path, on_an_l4: torch.device
) -> None:
    config = AutoConfig.for_model("qwen3_moe", **(SIZES | {"num_experts": 6}))
    whole = split_model(build_on_meta(config, compute_dtype="bfloat16"), compute_dtype="bfloat16")
    model, budgets = in_parts(whole, 3), Budgets(host=2**33)
    question = micro_batches._question_here(
        model,
        EngineOptions(compile_backend="inductor"),
        device=on_an_l4,
        rows=4,
        length=16,
        budgets=budgets,
        offload={},
    )
    assert question is not None
    placed = Adviser(model.whole).placed(question)
    assert [block.name for block in placed.blocks] == [block.name for block in model.blocks]
    rows, why = micro_batches.propose(
        model, [1, 2, 4], length=16, device=on_an_l4, question=question
    )
    assert rows in (1, 2, 4) and "of the fastest" in why
