"""Published hyperparameters: laws by hand, the table against the config, which source is asked."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain.config import TrainConfig, make_config
from megatrain.trainer.model import learning_rate_of
from megatrain.trainer.pasting import ORDER, as_yaml, keys_beside, lines_to_paste, short
from megatrain.trainer.published import (
    Job,
    PublishedRun,
    deepseek_law,
    published_runs,
    step_law,
)
from megatrain.trainer.recipe import IN_REACH, Question, choose, job_of, model_size

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
BASE = {"model_name_or_path": "model", "train_files": ["data"], "output_dir": "out"}


def config(**keys: Any) -> TrainConfig:
    return make_config(BASE | keys)[0]


def chosen(job: Job, params: float, **keys: Any) -> PublishedRun | None:
    question = Question(config=config(**keys), job=job, params=int(params))
    runs = sorted((run for run in published_runs() if run.job is job), key=question.apart)
    return choose(question, [run for run in runs if question.apart(run) <= IN_REACH])


def test_step_law_by_hand() -> None:
    # 1.79 * 10^(-0.713 * 9) * 10^(0.307 * 11) = 1.79 * 3.828e-7 * 2382
    # 0.58 * 10^(0.571 * 11) = 0.58 * 1.910e6
    law = step_law(1e9, 1e11)
    assert law is not None
    assert (law.keys["learning_rate"], law.keys["tokens_per_step"]) == (0.00163, 1_110_000)
    assert law.keys["lr_scheduler_kwargs"] == {"min_lr": 1e-5}
    for beyond in ((1.1e9, 1e11), (58e6, 1e11), (1e9, 1.9e9), (1e9, 1.1e11)):
        assert step_law(*beyond) is None


def test_deepseek_law_by_hand_and_against_the_models_that_were_made_by_it() -> None:
    # C = 1e20: 0.3118 * 10^-2.5 = 0.3118 * 3.162e-3; 0.2920 * 10^6.542 = 0.2920 * 3.483e6
    law = deepseek_law(1e20 / 6 / 1e10, 1e10)
    assert law is not None
    assert (law.keys["learning_rate"], law.keys["tokens_per_step"]) == (0.000986, 1_020_000)
    assert deepseek_law(1e6, 1e9) is None
    for run in published_runs():
        if run.name in ("DeepSeek LLM 7B", "DeepSeek LLM 67B"):
            assert run.tokens is not None
            law = deepseek_law(run.params, run.tokens)
            assert law is not None
            for key in ("learning_rate", "tokens_per_step"):
                assert law.keys[key] == pytest.approx(run.keys[key], rel=0.1)


def test_every_run_of_the_table_is_whole() -> None:
    runs = published_runs()
    assert len({(run.job, run.name) for run in runs}) == len(runs) > 35
    assert {run.job for run in runs} == set(Job)
    for run in runs:
        assert re.search(r"arXiv:\d{4}\.\d{5}|(recipes|scripts)/", run.source), run
        assert isinstance(run.params, float) and 1e7 < run.params < 1e12, run
        assert run.tokens is None or isinstance(run.tokens, float), run
        assert 2020 <= run.year <= 2026 and set(run.keys) <= set(ORDER), run
        assert 1e-6 <= run.keys["learning_rate"] <= 1e-2, run


@pytest.mark.parametrize("run", published_runs(), ids=lambda run: f"{run.job}-{run.name}")
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 12, "max_steps": 100},
        {"packing": True, "tokens_per_step": 7, "learning_rate": 1e-3, "max_steps": 10**6},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
    ],
)
def test_what_is_pasted_is_a_config_with_those_values(
    run: PublishedRun, keys: dict[str, Any]
) -> None:
    before = config(**keys)
    lines = list(lines_to_paste(run, before))
    pasted = yaml.safe_load("\n".join(lines))
    expected, _ = keys_beside(run, before)
    after = config(**(keys | pasted))
    assert {key: getattr(after, key) for key in pasted} == expected
    if run.rows_per_step is not None and not before.tokens_per_step:
        assert after.rows_per_step() == run.rows_per_step
    rate = learning_rate_of(after, total_steps=10_000)
    warmup = after.warmup_steps if after.warmup_steps >= 1 else after.warmup_steps * 10_000
    assert rate(round(warmup)) == pytest.approx(run.keys["learning_rate"], rel=1e-6)


def test_a_step_counted_in_samples_beside_packed_rows_is_left_to_a_person() -> None:
    run = next(run for run in published_runs() if run.name == "Tulu 3 8B")
    for keys in ({"packing": True}, {"tokens_per_step": 1000}):
        found, asides = keys_beside(run, config(**keys))
        assert not found.keys() & {"tokens_per_step", "gradient_accumulation_steps"}
        assert "128 samples, so here tokens_per_step is" in " ".join(asides)


def test_a_line_says_what_the_config_has_and_whether_it_says_so() -> None:
    run = next(run for run in published_runs() if run.name == "Tulu 3 8B")
    now = config(learning_rate="2e-5", weight_decay=0)
    said = dict(line.split(":", 1) for line in lines_to_paste(run, now) if line[0] != "#")
    assert said["learning_rate"].split() == ["5.0e-06", "#", "now", "2.0e-05"]
    assert said["weight_decay"].endswith("# as it is")
    assert said["warmup_steps"].endswith("# now 0, by default")
    assert said["per_device_train_batch_size"].endswith("# as it is, by default")


def test_a_warm_up_longer_than_the_run_is_left_out_aloud() -> None:
    run = next(run for run in published_runs() if run.name == "OLMo 2 7B")
    for steps in (100, 2000):
        keys, asides = keys_beside(run, config(max_steps=steps))
        assert "warmup_steps" not in keys
        assert f"warm-up of 2000 steps is left out: this run has {steps}." in asides[-1]
    assert keys_beside(run, config(max_steps=2001))[0]["warmup_steps"] == 2000


@pytest.mark.parametrize(
    ("job", "params", "name"),
    [
        (Job.FINE_TUNING, 6.53e9, "Tulu 3 8B"),  # the newest of this size that names its step
        (Job.FINE_TUNING, 2.77e9, "SmolLM3 3B"),
        (Job.FINE_TUNING, 31.2e9, "OLMo 2 32B"),
        (Job.FINE_TUNING, 358e6, "SmolLM2 360M"),
        (Job.FINE_TUNING, 1e9, "SmolLM2 1.7B"),  # none of this size: the nearest
        (Job.FINE_TUNING, 1e7, None),
        (Job.CONTINUED, 12e9, "Code Llama 13B"),
        (Job.CONTINUED, 358e6, None),
        (Job.SCRATCH, 300e6, "Step Law"),
        (Job.SCRATCH, 23.6e6, "Pythia 70M"),
        (Job.SCRATCH, 6.53e9, "OLMo 2 7B"),
        (Job.SCRATCH, 1.4e9, "OLMo 2 1B"),
        (Job.SCRATCH, 3e12, None),
    ],
)
def test_which_source_is_asked(job: Job, params: float, name: str | None) -> None:
    found = chosen(job, params)
    assert (None if found is None else found.name) == name


def test_a_run_with_max_steps_keeps_its_tokens_in_steps_of_the_law() -> None:
    found = chosen(Job.SCRATCH, 300e6, max_steps=5000, tokens_per_step=1_000_000)
    assert found is not None and found.tokens == 5e9
    assert found.keys["max_steps"] * found.keys["tokens_per_step"] == pytest.approx(5e9, rel=1e-3)
    assert "max_steps" not in (chosen(Job.SCRATCH, 300e6) or found).keys
    by_rows = Question(config=config(max_steps=10, max_length=100), job=Job.SCRATCH, params=1)
    assert by_rows.tokens == 10 * 8 * 100


@pytest.mark.parametrize(
    ("record", "keys", "job"),
    [
        ({"text": "a"}, {}, Job.CONTINUED),
        ({"text": "a"}, {"model_init": "random"}, Job.SCRATCH),
        ({"prompt": "a", "completion": "b"}, {}, Job.FINE_TUNING),
        ({"q": "a", "r": "b"}, {"prompt_column": "q", "completion_column": "r"}, Job.FINE_TUNING),
        ({"messages": []}, {}, Job.FINE_TUNING),
        ({"text": "a", "messages": []}, {"dataset_format": "text"}, Job.CONTINUED),
        ({"input_ids": [1, 2]}, {}, Job.CONTINUED),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, {}, Job.FINE_TUNING),
    ],
)
def test_the_job_is_read_off_the_config_and_a_record(
    record: dict[str, Any], keys: dict[str, Any], job: Job, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(record))
    assert job_of(config(train_files=[str(file)], **keys)) is job
    if keys.get("model_init") != "random":
        other = tmp_path / "others.txt"
        other.write_text("a text")
        mixed = {str(other): 1, str(file): 1}
        keys = {key: value for key, value in keys.items() if key != "dataset_format"}
        assert job_of(config(train_files=mixed, **keys)) is (
            Job.FINE_TUNING if "messages" in record or job is not Job.CONTINUED else job
        )


def test_the_size_is_without_embeddings_and_with_overrides() -> None:
    def size(shape: str, **keys: Any) -> tuple[int, bool]:
        return model_size(config(model_name_or_path=str(SHAPES / shape), **keys))

    # Qwen2.5-0.5B has 0.36B parameters without embeddings, by its model card.
    assert size("qwen2.5-0.5b") == (357_898_112, False)
    whole, _ = size("smollm2-135m")
    half, _ = size("smollm2-135m", config_overrides={"num_hidden_layers": 15})
    assert whole == 106_203_456 and (whole - 576) == 2 * (half - 576)  # but for the last norm
    assert size("olmoe-1b-7b", config_overrides={"num_hidden_layers": 1})[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5e-6, "5.0e-06"),
        (6.15e-5, "6.15e-05"),
        (3e-4, "0.0003"),
        (0.0, "0"),
        (None, "null"),
        ({"min_lr": 1e-5}, "{min_lr: 1.0e-05}"),
        (4_194_304, "4194304"),
    ],
)
def test_values_are_read_back_as_they_are(value: Any, text: str) -> None:
    assert as_yaml(value) == text
    assert yaml.safe_load(text) == value


def test_counts_in_short() -> None:
    assert [short(n) for n in (15.6e12, 6.53e9, 106.2e6, 2e3, 5)] == [
        "15.6T", "6.53B", "106M", "2K", "5",
    ]  # fmt: skip
