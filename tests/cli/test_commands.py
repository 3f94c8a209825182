"""The real commands on a tiny real model; every shipped config; every mistake one clear error."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from megatrain.cli import app
from megatrain.config import make_config, read_config
from megatrain.errors import UserError
from megatrain.trainer import Trainer

ROOT = Path(__file__).parents[2]
RUNNER = CliRunner()


def run(*arguments: str) -> Any:
    result = RUNNER.invoke(app, list(arguments), catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_for_real(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, from the current directory."""
    return subprocess.run(
        [sys.executable, "-m", "megatrain", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )


def log_of(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]


EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("name", sorted({*EXAMPLES} - {"demo"}))  # that is `make demo`
def test_every_example_trains_and_loads(name: str, workspace: Path) -> None:
    run("train", str(ROOT / "examples" / f"{name}.yaml"), "--max-steps", "3", "max_length=64")
    rows = [row for row in log_of(f"runs/{name}") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["num_input_tokens_seen"] > 0 and row["loss"] > 0 for row in rows)
    loaded: Any = AutoModelForCausalLM.from_pretrained(f"runs/{name}", output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    assert (Path(f"runs/{name}") / "tokenizer.json").is_file()
    before = AutoModelForCausalLM.from_pretrained("models/base").state_dict()
    after = model.state_dict()
    assert any(not torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", sorted({*EXAMPLES} - {"demo", "pretrain"}))
def test_recipes_have_fewer_than_ten_keys(name: str) -> None:
    assert len(yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text())) < 10


def test_training_lowers_the_loss_and_eval_agrees_with_the_log(workspace: Path) -> None:
    config = {
        "model_name_or_path": "models/base",
        "train_files": ["data/text"],
        "eval_files": ["data/text"],
        "output_dir": "out",
        "max_length": 64,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 12,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "eval_steps": 6,
    }
    Path("c.yaml").write_text(yaml.safe_dump(config))
    run("train", "c.yaml")
    losses = [row["eval_loss"] for row in log_of("out") if "eval_loss" in row]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
    result = run("eval", "out", "data/text", "--max-length", "64")
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert found["loss"] == pytest.approx(losses[2], rel=1e-5)


def test_print_config_shows_what_would_run(workspace: Path) -> None:
    result = run("train", str(ROOT / "examples" / "sft.yaml"), "--seed", "7", "--print-config")
    shown = yaml.safe_load(result.stdout)
    assert shown["seed"] == 7
    assert shown["prompt_column"] == "question"
    assert not Path("runs/sft").exists()


def test_a_trace_of_a_run_shorter_than_it_and_evaluated_meanwhile(workspace: Path) -> None:
    changes = {"max_steps": 2, "trace": "trace.json", "trace_steps": 5}
    changes |= {"eval_files": ["data/text"], "eval_steps": 1}
    Path("c.yaml").write_text(yaml.safe_dump(GOOD | changes))
    assert "trace of 2 steps in trace.json" in run("train", "c.yaml").stdout
    names = [event["name"] for event in json.loads(Path("trace.json").read_text())["traceEvents"]]
    # The first step's update ran before the evaluation, the second one's after the last step.
    assert names.count("finish head") == names.count("loss head") == 2
    assert "update head" not in names


def test_rows_longer_than_a_rotary_model_was_made_for_are_noted(workspace: Path) -> None:
    changes = {"config_overrides": {"max_position_embeddings": 16}}
    Path("c.yaml").write_text(yaml.safe_dump(GOOD | changes))
    assert "a model whose config speaks of 16 (max_position" in run("train", "c.yaml").stdout


def test_a_compiled_run_says_so_and_learns_the_same(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.trainer.model.COMPILE_BACKEND", "aot_eager")
    losses = {}
    for compiled in ("true", "false"):
        Path("c.yaml").write_text(yaml.safe_dump(GOOD | {"max_steps": 2, "max_length": 32}))
        output = run("train", "c.yaml", f"torch_compile={compiled}", f"output_dir=out-{compiled}")
        assert ("compiled" in output.stdout) == (compiled == "true")
        log = Path(f"out-{compiled}", "log.jsonl").read_text().splitlines()
        losses[compiled] = [json.loads(line)["loss"] for line in log if "grad_norm" in line]
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-5)


def test_bench_measures_a_shape_without_weights(workspace: Path) -> None:
    arguments = ["models/shape", "--rows", "2", "--length", "16", "--micro-rows", "1"]
    arguments += ["--steps", "2", "--warmup-steps", "1", "--trace", "t.json", "--output", "o.jsonl"]
    output = run("bench", *arguments, "--offload", "{saved: [0]}").stdout
    assert "as asked for in offload: saved: [0]" in output
    assert re.findall(r"^step (\d): .* s( \(warm-up\))?$", output, re.MULTILINE) == [
        ("1", " (warm-up)"),
        ("2", ""),
        ("3", ""),
    ]
    assert "trace of one more step: t.json" in output
    assert re.search(r"s a step \(p20 .*\n.*tokens/s, (?!0 ).* at 6N.*\nlanes busy: h2d", output)
    (row,) = map(json.loads, Path("o.jsonl").read_text().splitlines())
    assert row["tokens_per_second"] == pytest.approx(32 / row["seconds_per_step_p50"], rel=1e-2)
    assert row["busiest_lane_s"] > 0 and row["host_bytes"]["weight"] > 0
    assert json.loads(Path("t.json").read_text())["traceEvents"]
    for wrong, message in [
        (["--gpu-memory", "much"], "gpu_memory: 'much' is not a size"),
        (["--output", "/proc/o.jsonl"], "no way to write there"),
        (["--host-memory", "1MiB"], "allowed by host_memory"),
        (["--layers", "99"], "models/shape has 2"),
        (["--disk-memory", "1MiB"], "give --disk-path too"),
        (["--disk-path", "nowhere"], "no such directory"),
        (["--offload", "{resident: 1}"], "no GPU that 'resident' could be about"),
        (["--offload", "{disk: 1}"], "set disk_path"),
        (["--offload", "2"], "no mapping"),
        (["--offload", "{saved: 1}", "--place", "host"], "two rules for the same blocks"),
    ]:
        with pytest.raises(UserError, match=message):
            run("bench", *arguments, *wrong)


def test_bench_with_the_same_tokens_learns_them(workspace: Path) -> None:
    arguments = ["models/shape", "--rows", "1", "--length", "16", "--steps", "3"]
    arguments += ["--warmup-steps", "0", "--output", "o.jsonl"]
    run("bench", *arguments)
    run("bench", *arguments, "--same-tokens")
    fresh, same = map(json.loads, Path("o.jsonl").read_text().splitlines())
    assert same["first_loss"] == fresh["first_loss"] > same["last_loss"] != fresh["last_loss"]


def test_bench_takes_only_the_first_layers(workspace: Path) -> None:
    arguments = ["models/shape", "--layers", "1", "--rows", "1", "--length", "16"]
    run("bench", *arguments, "--steps", "1", "--warmup-steps", "0", "--output", "o.jsonl")
    assert json.loads(Path("o.jsonl").read_text())["layers"] == 1


def test_bench_changes_values_of_the_config(workspace: Path) -> None:
    arguments = ["models/shape", "--rows", "1", "--length", "16", "--steps", "1"]
    arguments += ["--warmup-steps", "0", "--layers", "1", "--output", "o.jsonl"]
    run("bench", *arguments)
    run("bench", *arguments, "--config-overrides", "{intermediate_size: 16}")
    plain, changed = map(json.loads, Path("o.jsonl").read_text().splitlines())
    assert changed["config_overrides"] == {"intermediate_size": 16}
    assert changed["layers"] == 1 and changed["parameters"] < plain["parameters"]
    for wrong, message in [("3", "no mapping"), ("{intermediate: 3}", "key 'intermediate'")]:
        with pytest.raises(UserError, match=message):
            run("bench", *arguments, "--config-overrides", wrong)


def test_the_demo_config_is_valid() -> None:
    config, notices = read_config(ROOT / "examples" / "demo.yaml")
    assert config.eval_split == 6
    assert notices == []


GOOD: dict[str, Any] = {
    "model_name_or_path": "models/base",
    "train_files": ["data/text"],
    "output_dir": "out",
    "max_steps": 1,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_name_or_path": "./models/none"}, r"\./models/none: no such directory"),
        ({"model_name_or_path": "models/none"}, "models/none: no such directory, and no such"),
        ({"model_name_or_path": "data"}, r"no config\.json there"),
        ({"model_name_or_path": "data/train.jsonl"}, "a file, not a directory"),
        ({"train_files": ["data/none.jsonl"]}, "no such file"),
        ({"device": "cuda"}, "no CUDA device|without CUDA"),
        ({"host_memory": "1MiB"}, "allowed by host_memory"),
        ({"frozen": ["nothing.*"]}, "no parameter of that name"),
        ({"frozen": ["*"]}, "no parameter left to train"),
        ({"lr_scheduler_type": "cosin"}, "did you mean 'cosine'"),
        ({"output_dir": "data/train.jsonl"}, "a file of that name"),
        ({"output_dir": "data/train.jsonl/out"}, "a file at .*train.jsonl"),
        ({"output_dir": "models/instruct"}, "an earlier run or model there"),
        (
            {"output_dir": "models/../models/base", "overwrite_output_dir": True},
            "the model to start from",
        ),
        ({"model_name_or_path": "models/shape"}, r"no file model\.safetensors"),
        ({"gradient_dtype": "bfloat16", "dtype": "float32"}, "coarser"),
        ({"model_name_or_path": "models/cut"}, "damaged or incomplete"),
        ({"trace": "/proc/trace.json"}, "no way to write there"),
        ({"output_dir": "."}, "the current directory or one above it"),
        ({"output_dir": "/proc/out"}, "no way to write there"),
    ],
)
def test_a_mistake_is_one_clear_error(
    changes: dict[str, Any], message: str, workspace: Path
) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    shutil.copytree("models/base", "models/cut")
    os.truncate("models/cut/model.safetensors", 1000)
    Path("c.yaml").write_text(yaml.safe_dump(GOOD | changes))
    with pytest.raises(UserError, match=message):
        run("train", "c.yaml")


def test_kinds_of_models_that_cannot_be_right_are_refused_by_name(workspace: Path) -> None:
    path = Path("models/base/config.json")
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": "bert", "vocab_size": 262}))
    Path("c.yaml").write_text(yaml.safe_dump(GOOD))
    with pytest.raises(UserError, match="bert"):
        run("train", "c.yaml")


def test_a_gradient_that_is_not_finite_ends_the_run_and_names_its_block(workspace: Path) -> None:
    config = GOOD | {"max_grad_norm": 0.0, "learning_rate": 1e-3}
    options, _ = make_config(config)

    def poisoned(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        del labels, weights
        return (logits * 0.0).sqrt().sum()  # finite, its slope is not

    with pytest.raises(UserError, match=r"not finite.*allow_nonfinite_blocks: true"):
        Trainer(options, loss=poisoned, quiet=True).train()
    allowed = options.model_copy(
        update={"allow_nonfinite_blocks": True, "overwrite_output_dir": True}
    )
    Trainer(allowed, loss=poisoned, quiet=True).train()
    assert "head" in log_of("out")[0]["nonfinite_blocks"]
    before = AutoModelForCausalLM.from_pretrained("models/base").state_dict()
    after = AutoModelForCausalLM.from_pretrained("out").state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_weights_are_looked_for_before_data_is_read(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError((arguments, options))

    monkeypatch.setattr("megatrain.trainer.prepare.load_corpus", never)
    config, _ = make_config(GOOD | {"model_name_or_path": "models/shape"})
    with pytest.raises(UserError, match=r"no file model\.safetensors"):
        Trainer(config, quiet=True)


def test_a_checkpoint_that_does_not_fit_is_refused_before_memory_is_taken(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError((arguments, options))

    file = Path("models/base/model.safetensors")
    kept = {name: t for name, t in load_file(file).items() if "embed" in name}
    save_file(kept, file, metadata={"format": "pt"})
    monkeypatch.setattr("megatrain.memory.store.HostSlab", never)
    config, _ = make_config(GOOD)
    with pytest.raises(UserError, match="parameters missing"):
        Trainer(config, quiet=True).train()


def test_the_chat_template_given_is_used_and_saved(workspace: Path) -> None:
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
    Path("own.jinja").write_text(template)
    example = str(ROOT / "examples" / "chat.yaml")
    run("train", example, "max_steps=1", "max_length=64", "chat_template_path=own.jinja")
    assert (Path("runs/chat") / "chat_template.jinja").read_text() == template


def test_an_output_directory_behind_a_link_is_written_where_it_leads(workspace: Path) -> None:
    Path("elsewhere").mkdir()
    Path("out").symlink_to("elsewhere")
    Path("c.yaml").write_text(yaml.safe_dump(GOOD))
    run("train", "c.yaml")
    assert Path("out").is_symlink()
    assert (Path("elsewhere") / "model.safetensors").is_file()


def test_eval_of_an_incomplete_checkpoint_is_refused(workspace: Path) -> None:
    path = Path("models/base").resolve() / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    copy = Path("models/incomplete")
    shutil.copytree("models/base", copy)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"1 parameters missing .*layers\.0\.self_attn\.q_proj"):
        run("eval", str(copy), "data/text")


def test_env_says_what_a_bug_report_needs() -> None:
    lines = run("env").stdout.splitlines()
    for name in ("megatrain ", "torch ", "transformers ", "numba ", "python ", "memory ", "GPU "):
        assert sum(line.startswith(name) for line in lines) >= 1, name


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "models/base", "data/text", "--batch-size", "0"),
        ("eval", "models/base", "data/text", "--device", "tpu"),
        ("eval", "models/base"),
        ("eval", "models/base", "data/text", "--no-such-option"),
        ("nonsense",),
    ],
)
def test_options_of_commands_are_checked(arguments: tuple[str, ...], workspace: Path) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("./none", "data/text"), "no such directory"),
        (("models/base", "data/none"), "no such file"),
    ],
)
def test_eval_refuses_what_is_not_there(
    arguments: tuple[str, ...], message: str, workspace: Path
) -> None:
    with pytest.raises(UserError, match=message):
        run("eval", *arguments)


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1\n", "did you mean 'learning_rate'"),
        (yaml.safe_dump(GOOD | {"train_files": ["none.txt"]}), "none.txt"),
    ],
)
def test_the_real_command_prints_one_line_and_no_traceback(
    text: str, message: str, workspace: Path
) -> None:
    (workspace / "c.yaml").write_text(text)
    done = run_for_real("train", "c.yaml")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.process
def test_the_real_command_trains_and_shows_only_its_own_lines(workspace: Path) -> None:
    Path("c.yaml").write_text(yaml.safe_dump(GOOD | {"max_steps": 2}))
    done = run_for_real("train", "c.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == [
        "step 1/2",
        "step 2/2",
    ]
    assert lines[-1] == "model written to out"


def test_a_trace_of_the_last_steps_of_a_short_run(workspace: Path) -> None:
    Path("c.yaml").write_text(
        yaml.safe_dump(GOOD | {"max_steps": 2, "trace": "runs/trace.json", "trace_steps": 1})
    )
    output = run("train", "c.yaml").stdout
    assert re.search(r"trace of 1 steps in runs/trace\.json; lanes busy: h2d \d+%", output)
    events = json.loads(Path("runs/trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "update head" for event in events) == 1
