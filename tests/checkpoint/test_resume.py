"""A run that goes on from a checkpoint is the run that was never stopped, bit for bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerState

from megatrain.checkpoint import checkpoints, verify
from megatrain.errors import UserError

from .runs import MEASURED, OnRow, numbers_of, tensors_of, train, train_until, trainer

LAST = "checkpoint-8"


def log_of(folder: str) -> list[dict[str, Any]]:
    """Rows without what depends on the clock."""
    rows = [json.loads(line) for line in Path(f"{folder}/log.jsonl").read_text().splitlines()]
    for row in rows:
        for name in MEASURED:
            row.pop(name, None)
    return [row for row in rows if "checkpoint_seconds" not in row]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_grad_norm": 0.0},
        {"logging_steps": 3},
        {"max_grad_norm": 0.05, "weight_decay": 0.1, "lr_scheduler_type": "cosine"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "max_grad_norm": 0.0, "gradient_dtype": "float32"},
        {"frozen": ["model.layers.0.*", "embed"]},
        {"eval_split": 4, "eval_steps": 2},
        {"packing": True, "max_length": 24, "eval_split": 4, "gradient_accumulation_steps": 1},
    ],
    ids=[
        "fp32",
        "no_clip",
        "rows_of_steps",
        "clip",
        "bf16",
        "bf16_no_clip",
        "frozen",
        "eval",
        "packed",
    ],
)
def test_a_resumed_run_equals_one_that_was_never_stopped(
    changes: dict[str, Any], workspace: Path
) -> None:
    train(output_dir="whole", **changes)
    train_until(5, **changes)
    assert sorted(p.name for p in Path("out").glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    resumed = train(resume_from_checkpoint="auto", **changes)
    assert "going on from" in resumed.notes[0] and "checkpoint-4 after step 4" in resumed.notes[0]
    expected, found = Path("whole") / LAST, Path("out") / LAST
    assert tensors_of(found) == tensors_of(expected) != {}
    first, second = numbers_of(expected), numbers_of(found)
    for state in (first, second):
        state["trainer_state"].pop("best_model_checkpoint")
    assert first == second
    assert log_of("whole") == log_of("out")


def test_another_split_and_other_budgets_resume(workspace: Path) -> None:
    train(output_dir="whole")
    train_until(5)
    resumed = train(
        resume_from_checkpoint=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        host_memory="8GiB",
        checkpoint_memory="1MiB",
        max_shard_size="1MB",
    )
    assert "per_device_train_batch_size: 1, was 2" in "\n".join(resumed.notes)
    models = [AutoModelForCausalLM.from_pretrained(name) for name in ("whole", "out")]
    first, second = (dict(model.named_parameters()) for model in models)
    for name, param in first.items():
        torch.testing.assert_close(second[name], param, rtol=1e-4, atol=1e-6)


def test_the_directory_is_a_model_with_a_trainers_state(workspace: Path) -> None:
    train(eval_split=4, eval_steps=4, save_total_limit=1)
    assert [p.name for p in Path("out").glob("checkpoint-*")] == [LAST]
    folder = Path("out") / LAST
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loaded[1].values())
    final = AutoModelForCausalLM.from_pretrained("out").state_dict()
    assert all(torch.equal(tensor, final[name]) for name, tensor in loaded[0].state_dict().items())
    state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
    assert (state.global_step, state.max_steps, state.num_train_epochs) == (8, 8, 2)
    assert state.best_global_step in (4, 8)
    assert sum("loss" in row for row in state.log_history) == 8
    assert (folder / "tokenizer.json").is_file() and (folder / "chat_template.jinja").is_file()


def test_a_finished_run_has_nothing_left_to_do(workspace: Path) -> None:
    train()
    before = tensors_of(Path("out") / LAST)
    (Path("out") / "model.safetensors.index.json").unlink()
    train(resume_from_checkpoint="auto")
    assert tensors_of(Path("out") / LAST) == before
    AutoModelForCausalLM.from_pretrained("out")


def test_auto_begins_where_there_is_nothing(workspace: Path) -> None:
    train(resume_from_checkpoint="auto", max_steps=2)
    shutil.rmtree("out")
    train_until(1, resume_from_checkpoint="auto")  # killed before its first checkpoint
    assert not list(Path("out").glob("checkpoint-*"))
    train(resume_from_checkpoint="auto", max_steps=2)
    assert (Path("out") / "checkpoint-2").is_dir()


def test_a_run_goes_on_longer_and_in_another_directory(workspace: Path) -> None:
    train(max_steps=4, lr_scheduler_type="constant")
    train(output_dir="whole", lr_scheduler_type="constant")
    resumed = train(
        output_dir="other",
        resume_from_checkpoint="out/checkpoint-4",
        lr_scheduler_type="constant",
    )
    assert "max_steps: 8, was 4" in "\n".join(resumed.notes)
    assert tensors_of(Path("other") / LAST) == tensors_of(Path("whole") / LAST)


def test_the_best_checkpoint_is_kept_and_can_be_what_is_written(workspace: Path) -> None:
    made = train(
        load_best_model_at_end=True,
        eval_files=["data/text"],  # which the model unlearns
        eval_steps=2,
        save_total_limit=1,
        learning_rate=0.03,
    )
    best = made.progress.best_step
    assert best is not None and best < 8
    kept = {f"checkpoint-{best}", LAST}
    assert {p.name for p in Path("out").glob("checkpoint-*")} == kept
    final = AutoModelForCausalLM.from_pretrained("out").state_dict()
    wanted = AutoModelForCausalLM.from_pretrained(f"out/checkpoint-{best}").state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in final.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "another run .seed: 1, was 42"),
        ({"max_length": 32}, "max_length: 32, was 64"),
        ({"per_device_train_batch_size": 3}, "rows a step: 6, was 4"),
        ({"dtype": "bfloat16"}, "dtype: bfloat16, was float32"),
        ({"config_overrides": {"rms_norm_eps": 1e-3}}, "rms_norm_eps of the model"),
        ({"train_files": ["data/other.jsonl"]}, "other rows from train_files"),
        ({"max_steps": 3}, "4 steps done"),
        ({"frozen": ["embed"]}, "frozen: "),
    ],
)
def test_another_run_is_refused_by_name(
    changes: dict[str, Any], message: str, workspace: Path
) -> None:
    train_until(5)
    text = Path("data/train.jsonl").read_text()
    Path("data/other.jsonl").write_text(text.replace("23+1?", "23+2?"))
    with pytest.raises(UserError, match=message) as caught:
        trainer(resume_from_checkpoint="auto", **changes)
    assert len(str(caught.value).splitlines()) == 1


def test_moved_data_and_model_are_the_same_run(workspace: Path) -> None:
    train(output_dir="whole")
    train_until(5)
    shutil.move("data/train.jsonl", "data/moved.jsonl")
    shutil.move("models/base", "models/moved")
    for file in Path("models/moved").glob("*.safetensors"):
        file.unlink()  # weights come from the checkpoint
    train(
        resume_from_checkpoint="auto",
        train_files=["data/moved.jsonl"],
        model_name_or_path="models/moved",
    )
    assert tensors_of(Path("out") / LAST) == tensors_of(Path("whole") / LAST)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"an earlier run or model there \(checkpoint-2, log.jsonl"),
        ({"resume_from_checkpoint": "nowhere"}, "no such directory"),
        ({"resume_from_checkpoint": "models/base"}, "an earlier run or model there"),
        (
            {"resume_from_checkpoint": "models/base", "output_dir": "new"},
            "it is no checkpoint, or an unfinished one",
        ),
        ({"resume_from_checkpoint": True, "output_dir": "new"}, "no checkpoint in new"),
    ],
)
def test_what_cannot_be_resumed_is_one_error(
    changes: dict[str, Any], message: str, workspace: Path
) -> None:
    train(max_steps=2)
    with pytest.raises(UserError, match=message):
        trainer(**changes)
    assert not (Path("new") / "log.jsonl").exists()


@pytest.mark.parametrize("asked", [True, "auto"])
def test_models_alone_are_not_resumed_and_not_removed(asked: Any, workspace: Path) -> None:
    train(save_only_model=True, max_steps=4)
    before = sorted(Path("out").glob("checkpoint-*"))
    with pytest.raises(UserError, match=r"none to go on from .*without training state"):
        train(save_only_model=True, resume_from_checkpoint=asked)
    assert sorted(Path("out").glob("checkpoint-*")) == before != []


def test_going_back_leaves_the_other_future_aside(workspace: Path) -> None:
    train()
    before = tensors_of(Path("out") / LAST)
    for rate in (2e-4, 3e-4):
        train(resume_from_checkpoint="out/checkpoint-6", learning_rate=rate, save_total_limit=2)
        assert sorted(p.name for p in Path("out").glob("checkpoint-*")) == ["checkpoint-6", LAST]
    first, second = (Path(f"out/abandoned-{LAST}-{again}") for again in (1, 2))
    assert tensors_of(first) == before
    assert len({str(tensors_of(path)) for path in (first, second, Path("out") / LAST)}) == 3


def test_overwriting_while_resuming_from_elsewhere_removes_what_was_there(workspace: Path) -> None:
    train(output_dir="source", max_steps=4)
    train(max_steps=6)
    train(resume_from_checkpoint="source/checkpoint-4", max_steps=5, overwrite_output_dir=True)
    assert [p.name for p in Path("out").glob("*checkpoint-*")] == ["checkpoint-5"]
    assert [p.name for p in Path("source").glob("checkpoint-*")] != []


def test_checkpoints_of_others_are_not_written_over(workspace: Path) -> None:
    folder = Path("out/checkpoint-2")
    folder.mkdir(parents=True)
    (folder / "optimizer.pt").touch()
    with pytest.raises(UserError, match="checkpoint-2, which is no checkpoint of megatrain"):
        trainer(resume_from_checkpoint="auto")
    assert (folder / "optimizer.pt").exists()


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_without_the_best_checkpoint_the_last_model_is_written(
    harm: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trainer(
        load_best_model_at_end=True, eval_files=["data/text"], eval_steps=2, learning_rate=0.03
    )
    made.quiet = False
    folder = Path("out/checkpoint-2")

    def spoil(row: dict[str, Any]) -> None:
        if row["step"] == 8 and folder.exists():
            if harm == "gone":
                shutil.rmtree(folder)
            else:
                (folder / "config.json").write_text("{}")
            made.progress.judged = {2: 0.0}

    made.add_callback(OnRow(spoil))
    made.train()
    assert "the last one and not the best (checkpoint-2" in capsys.readouterr().out
    AutoModelForCausalLM.from_pretrained("out")


def test_another_tokenizer_is_another_run(workspace: Path) -> None:
    train_until(5)
    path = Path("models/base/tokenizer.json")
    text = path.read_text()
    content = json.loads(text)
    vocab = content["model"]["vocab"]
    vocab["0"], vocab["1"] = vocab["1"], vocab["0"]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="other rows from train_files"):
        trainer(resume_from_checkpoint="auto")


def test_overwriting_removes_the_checkpoints_of_the_earlier_run(workspace: Path) -> None:
    train(max_steps=6)
    train(max_steps=2, overwrite_output_dir=True)
    assert [p.name for p in Path("out").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize("asked", ["auto", "out/checkpoint-4"])
def test_a_checkpoint_behind_a_link_is_this_runs_own(asked: str, workspace: Path) -> None:
    """Such as one that was moved to a larger disk: what stands beside it is not another run's."""
    train_until(5)
    shutil.move("out/checkpoint-4", "elsewhere")
    Path("out/checkpoint-4").symlink_to(Path("elsewhere").resolve())
    made = train(resume_from_checkpoint=asked, overwrite_output_dir=True)
    assert made.continues
    assert list(checkpoints(Path("out"))) == [2, 4, 6, 8]
    steps = [row["step"] for row in log_of("out") if "loss" in row]
    assert steps == list(range(1, 9))
    trainer(resume_from_checkpoint="out/checkpoint-4")


def test_rotation_removes_a_link_and_not_what_it_leads_to(workspace: Path) -> None:
    train_until(5)
    shutil.move("out/checkpoint-2", "elsewhere")
    Path("out/checkpoint-2").symlink_to(Path("elsewhere").resolve())
    train(resume_from_checkpoint="auto", save_total_limit=1)
    assert list(checkpoints(Path("out"))) == [8]
    verify(Path("elsewhere"))


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\0\0\0\0", b"\xff{"])
def test_a_record_that_a_power_cut_has_spoiled_stops_no_run(
    content: bytes, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_until(5)
    Path("out/run.json").write_bytes(content)
    made = trainer(resume_from_checkpoint="auto")
    made.quiet = False
    made.train()
    assert "run.json of the earlier sessions cannot be read" in capsys.readouterr().out
    assert len(json.loads(Path("out/run.json").read_text())["sessions"]) == 1
    assert Path("out/run.json.damaged").read_bytes() == content
