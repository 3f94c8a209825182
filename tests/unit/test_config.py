"""Keys are strict, synonyms are said, mistakes are one clear line, no foreign key is unknown."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from megatrain.config import TrainConfig, document, make_config, parse_overrides, read_config
from megatrain.config.foreign import MET, REFUSED, SYNONYMS
from megatrain.config.options import GROUPS, OWN_KEYS
from megatrain.errors import UserError

NEEDED: dict[str, Any] = {"model_name_or_path": "m", "train_files": ["t"], "output_dir": "o"}

SFT_CONFIG = """
    activation_offloading assistant_only_loss chat_template_path completion_only_loss dataset_kwargs
    dataset_num_proc dataset_text_field eos_token eval_packing learning_rate loss_type max_length
    model_init_kwargs packing packing_strategy pad_to_multiple_of pad_token padding_free
    router_aux_loss_coef shuffle_dataset trackio_space_id truncation_mode trust_remote_code
""".split()  # noqa: SIM905  a list of twenty strings is harder to compare
MODEL_CONFIG = {
    "model_name_or_path",
    "model_revision",
    "dtype",
    "attn_implementation",
}
"""Of TRL's ModelConfig."""


def training_arguments() -> dict[str, Any]:
    """Fields of transformers' TrainingArguments and their defaults."""
    return {
        field.name: field.default_factory()
        if field.default_factory is not dataclasses.MISSING
        else field.default
        for field in dataclasses.fields(TrainingArguments)
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rat": 1}, "did you mean 'learning_rate'"),
        ({"cutoff_le": 1}, "did you mean 'cutoff_len'"),
        ({"qqqq": 1}, "no such key"),
        ({"max_length": "long"}, "max_length: .*found 'long'"),
        ({"max_length": True}, "max_length: "),
        ({"max_length": 10.5}, "max_length: "),
        ({"max_length": None}, "max_length: .*give one"),
        ({"save_strategy": "best"}, "save_strategy: use load_best_model_at_end"),
        ({"train_on_inputs": True}, "train_on_inputs.*completion_only_loss: false"),
        ({"use_wandb": True}, r"use_wandb.*report_to: \[wandb\]"),
        ({"seed": None}, "seed: "),
        ({"per_device_train_batch_size": 0}, "greater than or equal to 1"),
        ({"dtype": "float16"}, "dtype: "),
        ({"learning_rate": float("nan")}, "learning_rate: .*finite"),
        ({"learning_rate": "inf"}, "learning_rate: .*finite"),
        ({"train_files": []}, "one of train_files, dataset, dataset_name is needed: there is none"),
        ({"frozen": [1]}, r"frozen\.0: "),
        ({"max_steps": 0}, "max_steps: give a positive number"),
        ({"max_steps": -3}, "max_steps: give a positive number"),
        ({"lr_scheduler_type": "cosin"}, "no such schedule, did you mean 'cosine' "),
        ({"lr_scheduler": "wsd"}, "no such schedule, use one of linear, .*warmup_stable_decay"),
        ({"lr_scheduler_type": "greedy"}, "follows the measured loss, and a rate .*one of linear"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "follows the measured loss"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "use constant_with_warmup"),
        (
            {"lr_scheduler_type": "constant_with_warmup", "lr_scheduler_kwargs": {"num_cycles": 2}},
            "lr_scheduler_kwargs: .*takes none",
        ),
        (
            {"report_to": "tensorbord"},
            r"'wandb' or 'trackio' \(found .*: did you mean 'tensorboard'",
        ),
        ({"report_to": ["wandb", "WanDB"]}, r"report_to\.1: .*did you mean 'wandb'"),
        ({"report_to": "mlflow"}, r"'tensorboard', 'wandb' or 'trackio' \(found 'mlflow'\)"),
        ({"report_to": ["wandb", 5]}, r"report_to\.1: .*\(found 5\)"),
        ({"eval_split": 4, "eval_strategy": "step"}, "did you mean 'steps'"),
        ({"warmup_steps": 2.5}, "warmup_steps: a count is a whole number"),
        ({"eval_split": 1.5}, "eval_split: a count is a whole number"),
        ({"warmup_ratio": 1.0}, "no share of the steps"),
        ({"warmup_ratio": 100}, "no share of the steps"),
        ({"warmup_ratio": 0.1, "warmup_steps": 10}, "two keys that both mean warmup_steps"),
        ({"cutoff_len": 5, "sequence_len": 5}, "cutoff_len and sequence_len"),
        ({"eval_files": ["e"], "eval_split": 0.1}, "exclude each other"),
        ({"dataset": "a"}, "one of .* is needed: there is train_files and dataset"),
        ({"dataset_test_split": "test"}, "dataset_test_split needs dataset_name"),
        ({"dataset_train_split": "test"}, "dataset_train_split needs dataset_name"),
        ({"dataset_dir": "elsewhere"}, "dataset_dir needs dataset or eval_dataset"),
        ({"stopping_strategy": "all_exhausted"}, "stopping_strategy needs weights"),
        ({"train_files": {"a": "much"}}, "train_files"),
        ({"train_files": [], "dataset": "a", "dataset_format": "text"}, "dataset_info.json says"),
        ({"interleave_probs": "0.5,0.5"}, "write weights beside the names"),
        ({"mix_strategy": "interleave_under"}, "set it to one of: concat"),
        ({"dataset_num_proc": 0}, "greater than or equal to 1"),
        ({"excess_length_strategy": "raise"}, "'truncate', 'drop' or 'error'"),
        ({"packing": True, "max_length": 16384}, "256 MiB for a row.*8192 or less"),
        ({"packing": True, "neat_packing": True}, "two keys that both mean packing"),
        ({"packing_strategy": "wrapped"}, "whole samples.*set it to one of: bfd"),
        ({"eval_steps": 5}, "eval_steps needs"),
        ({"trace_steps": 5}, "trace_steps needs trace"),
        ({"allow_nonfinite_blocks": True}, "needs max_grad_norm: 0"),
        ({"chat_template_path": "models/base"}, "ends in .jinja"),
        ({"attn_implementation": "flash_attention_2"}, "needs the flash-attn package; use eager"),
        ({"attn_implementation": "flex_attention"}, "not tried with layers"),
        (
            {"attn_implementation": "sdpaa"},
            "no such attention here; use eager, sdpa or fused_sinks",
        ),
        (
            {"config_overrides": {"attn_implementation": 5}},
            "not a name; use eager, sdpa or fused_sinks",
        ),
        (
            {"config_overrides": {"attn_implementation": "sdpa"}, "attn_implementation": "sdpa"},
            "stands in config_overrides too",
        ),
        ({"config_overrides": "a"}, "config_overrides: .*dictionary"),
        ({"config_overrides": "a=[,b=1"}, "config_overrides: .*dictionary"),
        ({"add_tokens": ["a", ""]}, "a token is not empty"),
        ({"add_tokens": "a,,b"}, "a token is not empty"),
        ({"add_tokens": ["a"], "add_special_tokens": ["a", "b"]}, "add_special_tokens: a"),
        ({"pad_vocab_to_multiple_of": 0}, "greater than or equal to 1"),
        ({"resize_token_embeddings_to_32x": True}, "pad_vocab_to_multiple_of: 32"),
        ({"rope_scaling": "linear"}, "use config_overrides: {rope_parameters"),
        ({"flash_attn": "fa2"}, "use attn_implementation"),
        ({"shrink_embeddings": True}, "never shrinks"),
        ({"deepspeed": "z3.json"}, "does its own offload"),
        ({"fp16": True}, "use dtype"),
        ({"optim": "sgd"}, "the optimizer is AdamW"),
        ({"optim": "adamw_8bit"}, "the optimizer is AdamW.*set it to one of: adamw, adamw_torch"),
        ({"eval_strategy": "epoch"}, "eval_strategy needs one of eval_files, "),
        ({"eval_on_start": True}, "eval_on_start needs one of"),
        ({"metric_for_best_model": "loss"}, "metric_for_best_model needs one of"),
        ({"eval_split": 4, "metric_for_best_model": "bleu"}, "metric_for_best_model: "),
        ({"eval_split": 4, "eval_strategy": "epoch", "eval_steps": 2}, "epoch: keep one"),
        ({"eval_split": 4, "eval_strategy": False, "eval_steps": 2}, "no: keep one"),
        ({"eval_split": 4, "eval_strategy": "steps"}, "eval_strategy: steps needs eval_steps"),
        ({"eval_split": 4, "early_stopping_patience": 2}, "eval_strategy: steps or epoch"),
        ({"eval_split": 4, "early_stopping_threshold": 0.1}, "needs early_stopping_patience"),
        ({"eval_split": 4, "eval_steps": 2.5}, "eval_steps: a count is a whole number"),
        ({"logging_steps": 2.5}, "logging_steps: a count is a whole number"),
        ({"eval_delay": 5}, "eval_on_start: false"),
        (
            {"eval_split": 4, "eval_strategy": "epoch", "load_best_model_at_end": True},
            "save_strategy: epoch with eval_strategy: epoch",
        ),
        ({"save_strategy": "best"}, "save_strategy: "),
        ({"save_steps": 1.5}, "a share is below 1"),
        ({"save_total_limit": 0}, "greater than or equal to 1"),
        ({"checkpoint_memory": "1KiB"}, "at least 1MiB"),
        ({"load_best_model_at_end": True}, "a multiple of eval_steps"),
        ({"greater_is_better": True}, "the lowest loss or perplexity is the best"),
        ({"train_sampling_strategy": "sequential"}, "shuffle: false"),
        ({"bf16": True, "dtype": "float32"}, "a contradiction"),
        ({"use_cpu": True, "device": "cuda"}, "use_cpu: true with device: cuda.*a contradiction"),
        ({"no_cuda": "yes"}, "no_cuda: yes: true is taken as device: cpu"),
        ({"use_cpu": True, "gpu_memory": "8GiB"}, "gpu_memory needs a GPU"),
        ({"template": "qwen"}, "the tokenizer's own chat template.*chat_template_path"),
        ({"host_memory": "much"}, "not a size"),
        ({"max_shard_size": 0}, "no room at all"),
    ],
)
def test_mistakes(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_config(NEEDED | values)
    assert len(str(caught.value).splitlines()) == 1


def test_every_wrong_value_is_named_at_once() -> None:
    with pytest.raises(UserError, match=r"max_length: .*; seed: ") as caught:
        make_config(NEEDED | {"seed": "x", "max_length": []})
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": "x", "max_length": []}, r"max_length: .*\(found \[\]\); seed: .*\(found 'x'\)"),
        ({"gpu_memory": "8GiB", "device": "cpu"}, "gpu_memory needs a GPU"),
        ({"learning_rat": 1e-3}, r"learning_rat: no such key \(did you mean 'learning_rate'\)"),
        ({"cutoff_len": 64}, r"cutoff_len: no such key \(did you mean 'max_length'\)"),
        ({"cutof_len": 64}, r"cutof_len: no such key \(did you mean 'max_length'\)"),
        ({"nonsense": 1}, r"nonsense: no such key\. "),
    ],
)
def test_mistakes_in_python_are_told_alike(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        TrainConfig(**NEEDED | values)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize("key", ["use_cpu", "no_cuda"])
def test_names_that_others_have_for_the_cpu(key: str) -> None:
    config, notices = make_config(NEEDED | {key: True})
    assert (config.device, notices) == ("cpu", [f"{key}: true is taken as device: cpu"])
    assert make_config(NEEDED | {key: True, "device": "cpu"})[0].device == "cpu"
    assert make_config(NEEDED | {key: False, "device": "cuda"})[0].device == "cuda"


def test_a_required_key_is_named() -> None:
    with pytest.raises(UserError, match="output_dir: field required"):
        make_config({"model_name_or_path": "m", "train_files": ["t"]})


def test_synonyms_and_keys_met_by_design_are_noticed() -> None:
    config, notices = make_config(
        NEEDED | {"cutoff_len": 77, "bf16": True, "fsdp": None, "learning_rate": "1e-5"}
    )
    assert config.max_length == 77
    assert config.learning_rate == 1e-5
    assert len(notices) == 2
    assert "cutoff_len is taken as max_length" in notices


def test_what_yaml_reads_otherwise_is_fitted() -> None:
    values = {"train_files": "one.txt", "max_grad_norm": 0, "host_memory": 10**9, "dtype": "auto"}
    config, _ = make_config(NEEDED | values)
    assert config.train_files == ["one.txt"]
    assert isinstance(config.max_grad_norm, float)
    assert config.host_memory == "1000000000"


def test_strategies_in_the_spellings_of_yaml_and_others() -> None:
    values = {"eval_split": 4, "evaluation_strategy": "steps", "eval_steps": "0.1"}
    config, notices = make_config(NEEDED | values | {"early_stopping_steps": 3})
    assert (config.eval_strategy, config.eval_steps) == ("steps", 0.1)
    assert config.early_stopping_patience == 3 and len(notices) == 2
    keys = ("eval_strategy", "logging_strategy", "save_strategy")
    config, _ = make_config(NEEDED | parse_overrides([f"{key}=no" for key in keys]))
    assert [getattr(config, key) for key in keys] == ["no", "no", "no"]


def test_tokens_and_config_overrides_in_the_spellings_of_others() -> None:
    values = {"new_special_tokens": "<a>, <b>", "tokens": ["c,d"], "resize_vocab": True}
    config, notices = make_config(NEEDED | values | {"config_overrides": "a=1,b=false,c=x,d=1e-3"})
    assert (config.add_special_tokens, config.add_tokens) == (["<a>", "<b>"], ["c,d"])
    assert config.config_overrides == {"a": 1, "b": False, "c": "x", "d": 1e-3}
    assert len(notices) == 3
    for typed in (
        ["--config_overrides", '{"a": {"b": 1e-6}}'],
        ["config_overrides={a: {b: 1e-6}}"],
    ):
        config, _ = make_config(NEEDED | parse_overrides(typed))
        assert config.config_overrides == {"a": {"b": 1e-6}}


def test_overrides_in_three_spellings() -> None:
    found = parse_overrides(["--max-length", "5", "--seed=3", "frozen=[a, b]", "--max_steps", "-1"])
    assert found == {"max_length": 5, "seed": 3, "frozen": ["a", "b"], "max_steps": -1}
    for wrong in (["--seed"], ["seed"], ["--seed", "--max_steps", "5"]):
        with pytest.raises(UserError, match=r"override '(--)?seed': no value"):
            parse_overrides(wrong)
    with pytest.raises(UserError, match=r"override 'frozen=\[a'.*quoted"):
        parse_overrides(["frozen=[a"])


def test_an_override_wins_under_whichever_name(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(NEEDED | {"cutoff_len": 10, "max_steps": 1}))
    for override in ("max_length=20", "sequence_len=20"):
        config, notices = read_config(path, [override])
        assert config.max_length == 20
        assert notices.count("cutoff_len is taken as max_length") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "YAML"),
        ("", "no keys"),
        ("{}", "no keys"),
        ("- 1", "no keys"),
        ("1: 2", "the key 1, which is not text"),
        ("seed: 1\nmax_steps: 2\nseed: 3", "the key 'seed' stands there twice.*line 3"),
        ("? [a]\n: 1", "YAML"),
    ],
)
def test_malformed_files(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_config(tmp_path / "c.yaml")
    assert len(str(caught.value).splitlines()) == 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "directory")):
        with pytest.raises(UserError, match=message):
            read_config(path)
    (tmp_path / "c.yaml").write_bytes(b"a: \xff")
    with pytest.raises(UserError, match="mend the YAML"):
        read_config(tmp_path / "c.yaml")


@pytest.mark.parametrize("key", sorted({*training_arguments(), *SFT_CONFIG}))
def test_every_key_of_transformers_and_trl_has_one_verdict(key: str) -> None:
    verdicts = [key in table for table in (TrainConfig.model_fields, MET, REFUSED, SYNONYMS)]
    assert verdicts.count(True) == 1


@pytest.mark.skipif(find_spec("trl") is None, reason="needs the package trl")
def test_the_keys_of_trl_are_those_of_the_installed_one() -> None:
    from trl import SFTConfig

    own = {field.name for field in dataclasses.fields(SFTConfig)} - {*training_arguments()}
    assert own <= {*SFT_CONFIG}


@pytest.mark.parametrize("key", sorted(training_arguments()))
def test_what_transformers_does_by_default_is_accepted(key: str) -> None:
    value = training_arguments()[key]
    if key in TrainConfig.model_fields:
        return
    make_config(NEEDED | {key: value if isinstance(value, bool | list) else _plain(value)})


def _plain(value: Any) -> Any:
    """An enum's value, as a config would have it."""
    return getattr(value, "value", value)


def test_tables_do_not_overlap_and_own_keys_are_our_own() -> None:
    fields = set(TrainConfig.model_fields)
    tables = [fields, set(MET), set(REFUSED), set(SYNONYMS)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert set(SYNONYMS.values()) <= fields
    assert fields - OWN_KEYS <= {*training_arguments(), *SFT_CONFIG, *MODEL_CONFIG}
    assert fields - {*training_arguments(), *SFT_CONFIG, *MODEL_CONFIG} >= OWN_KEYS
    in_groups = [name for group in GROUPS.values() for name in group.model_fields]
    assert in_groups == list(TrainConfig.model_fields)


def test_defaults_are_those_of_transformers() -> None:
    ours = TrainConfig(**NEEDED)
    own_choice = {"output_dir", "logging_steps", "lr_scheduler_kwargs", "torch_compile"}
    own_choice |= {"eval_strategy", "eval_on_start"}
    for key, value in training_arguments().items():
        if key in TrainConfig.model_fields and key not in own_choice:
            theirs, _ = make_config(NEEDED | {key: _plain(value)})
            assert getattr(ours, key) == getattr(theirs, key), key


def test_what_print_config_prints_is_read_back_alike(tmp_path: Path) -> None:
    config, _ = make_config(NEEDED | {"learning_rate": 1e-5, "frozen": ["a*"], "max_steps": 3})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config.model_dump()))
    assert read_config(tmp_path / "c.yaml") == (config, [])


def test_the_documentation_is_current() -> None:
    path = Path(__file__).parents[2] / "docs" / "config.md"
    assert path.read_text() == document(), "run `make docs`"
    assert all(info.description for info in TrainConfig.model_fields.values())
    for name in (*TrainConfig.model_fields, *MET, *REFUSED, *SYNONYMS):
        assert f"| `{name}` |" in path.read_text(), name
