"""Where training data comes from, run for real: mixtures, registry, datasets, token cache."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain.config import make_config
from megatrain.data import tokenise
from megatrain.errors import UserError
from megatrain.trainer import Trainer

from .test_commands import GOOD, run

PAIRS = {"prompt_column": "question", "completion_column": "answer"}
MIXED = PAIRS | {"train_files": {"data/train.jsonl": 0.75, "data/text": 0.25}, "max_length": 32}
ALPACA = [{"instruction": f"say {i}", "output": f"{i}"} for i in range(12)]


@pytest.fixture
def registered(workspace: Path) -> Path:
    """The same workspace with a registry in data/."""
    entries = {
        "numbers": {"file_name": "alpaca.json"},
        "talk": {
            "file_name": "chat.jsonl",
            "formatting": "openai",
            "columns": {"messages": "messages"},
        },
    }
    (workspace / "data" / "dataset_info.json").write_text(json.dumps(entries))
    (workspace / "data" / "alpaca.json").write_text(json.dumps(ALPACA))
    return workspace


def trainer(**keys: Any) -> Trainer:
    values = {key: value for key, value in GOOD.items() if key != "train_files"}
    config, _ = make_config(values | keys)
    return Trainer(config, quiet=True)


def drawn(made: Trainer, epoch: int) -> list[int]:
    sampler = made.run.sampler
    steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    return [row for step in steps for row in sampler.row_indices(step)]


def test_a_mixture_trains_with_exact_counts_and_goes_on(workspace: Path) -> None:
    keys = MIXED | {
        "lr_scheduler_type": "constant",
        "max_steps": 9,
        "save_steps": 3,
        "save_strategy": "steps",
    }
    whole = trainer(**keys, output_dir="whole")
    parts = whole.run.data.parts
    assert [part["rows_per_epoch"] for part in parts.values()] == [24, 8]
    assert whole.run.sampler.num_rows == 32
    numbers = drawn(whole, 0)
    assert sum(number < 24 for number in numbers) == 24 == len({n for n in numbers if n < 24})
    whole.train()
    record = json.loads(Path("whole/run.json").read_text())["sessions"][0]["data"]
    assert record["parts"]["data/text"]["rows_per_epoch"] == 8
    trainer(**keys | {"max_steps": 3}, output_dir="parts").train()
    again = trainer(**keys, output_dir="parts", resume_from_checkpoint="auto")
    assert again.progress.step == 3
    again.train()
    models = [Path(folder, "model.safetensors").read_bytes() for folder in ("whole", "parts")]
    assert models[0] == models[1]


def test_a_run_tells_what_it_made_of_its_data(workspace: Path) -> None:
    values = GOOD | MIXED | {"max_length": 8, "max_steps": 1, "output_dir": "told"}
    Path("c.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    told = run("train", "c.yaml").output
    assert "held out; files (prompt_completion, text): " in told
    assert "rows of an epoch: 24 of data/train.jsonl, 8 of data/text\n" in told
    assert "records (56%) are cut at max_length\n" in told


def test_other_weights_are_another_run(workspace: Path) -> None:
    keys = MIXED | {"max_steps": 1, "save_steps": 1, "save_strategy": "steps", "output_dir": "o"}
    trainer(**keys).train()
    same = {"data/train.jsonl": 3, "data/text": 1}
    assert trainer(**keys | {"train_files": same}, resume_from_checkpoint="auto").resumed
    # The same rows an epoch, of which others are drawn: only the digest tells.
    other = {"data/train.jsonl": 0.7499, "data/text": 0.25}
    with pytest.raises(UserError, match="their content or weights"):
        trainer(**keys | {"train_files": other}, resume_from_checkpoint="auto")


def test_a_part_of_a_mixture_is_held_out(workspace: Path) -> None:
    made = trainer(**MIXED, eval_split=10)
    data = made.run.data
    assert data.order is not None and len(data.eval_rows) == 10
    assert sum(data.order.counts) == made.run.sampler.num_rows
    assert max(drawn(made, 0)) < len(data.train_rows)


def test_a_packed_mixture_trains(workspace: Path) -> None:
    made = trainer(**MIXED, packing=True, per_device_train_batch_size=2, max_steps=6)
    rows = [
        row
        for step in range(made.run.sampler.steps_in(1))
        for row in made.run.sampler.take(made.run.data.train_rows, step)
    ]
    assert made.run.sampler.num_rows == 32 > len(rows)
    made.train()


def test_names_of_a_registry(registered: Path) -> None:
    made = trainer(dataset="numbers, talk", output_dir="o1")
    assert made.run.data.stats.rows == 72 and made.run.data.order is None
    made.train()
    weighted = trainer(dataset={"numbers": 1, "talk": 1}, eval_dataset="talk", output_dir="o2")
    assert weighted.run.sampler.num_rows == 24 and len(weighted.run.data.eval_rows) == 60
    with pytest.raises(UserError, match=r"'number': no such entry .*there is 'numbers'"):
        trainer(dataset="number", output_dir="o3")


def test_preprocess_shows_the_parts(registered: Path) -> None:
    config = GOOD | {"train_files": None} | {"dataset": {"numbers": 1, "talk": 2}}
    del config["train_files"]
    Path("c.yaml").write_text(yaml.safe_dump(config))
    result = run("preprocess", "c.yaml")
    assert result.exit_code == 0, result.exception
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["part", "rows", "tokens", "weight", "rows", "per", "epoch"] in lines
    shares = {line[0]: (line[1], line[-1]) for line in lines if line[:1] in (["numbers"], ["talk"])}
    assert shares == {"numbers": ("12", "12"), "talk": ("60", "24")}


def test_rows_that_are_too_long(workspace: Path) -> None:
    lines = [{"question": "a" * length, "answer": "b"} for length in (3, 30)]
    Path("data/two.jsonl").write_text("\n".join(map(json.dumps, lines)))
    values = GOOD | PAIRS | {"train_files": ["data/two.jsonl"], "max_length": 8}
    Path("c.yaml").write_text(yaml.safe_dump(values))
    counts = {
        "rows cut at max_length": {"truncate": 1, "drop": 0},
        "rows longer than max_length, dropped": {"truncate": 0, "drop": 1},
        "skipped: nothing supervised": {"truncate": 1, "drop": 0},
    }
    for strategy in ("truncate", "drop"):
        shown = run("preprocess", "c.yaml", f"excess_length_strategy={strategy}").stdout
        lines_shown = [" ".join(line.split()) for line in shown.splitlines()]
        for what, count in counts.items():
            assert f"{what} {count[strategy]}" in lines_shown
    with pytest.raises(UserError, match=r"32 tokens at data/two\.jsonl:2\. raise max_length"):
        run("preprocess", "c.yaml", "excess_length_strategy=error")


def test_what_preprocess_tokenised_is_not_tokenised_again(
    workspace: Path, own_token_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("c.yaml").write_text(yaml.safe_dump(GOOD))
    run("preprocess", "c.yaml")
    assert len(list((own_token_cache / "megatrain" / "tokens").iterdir())) == 1
    before = trainer(train_files=GOOD["train_files"], dataset_cache_dir="mine").run.data.digest

    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(tokenise.Task, "batch", never)
    made = trainer(train_files=GOOD["train_files"])
    assert made.run.data.digest == before
    made.train()


def test_a_cache_that_cannot_be_written_is_told(workspace: Path) -> None:
    Path("file").write_text("")
    made = trainer(train_files=GOOD["train_files"], dataset_cache_dir="file/cache")
    assert [note for note in made.notes if "token cache file/cache cannot be written" in note]


class FakeDataset(list[dict[str, Any]]):
    """What the library gives, as far as it is used."""

    def __init__(self, rows: list[dict[str, Any]], files: list[Path]) -> None:
        super().__init__(rows)
        self.cache_files = [{"filename": str(file)} for file in files]
        self.column_names = list(rows[0])


@pytest.fixture
def library(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """In place of the datasets package; keeps what it was asked for."""
    asked: list[Any] = []
    splits = {"train": 20, "test": 4}

    def load_dataset(name: str, config: str | None, *, split: str) -> FakeDataset:
        asked.append((name, config, split))
        if split not in splits:
            raise ValueError(f"Unknown split \"{split}\". Should be one of ['train', 'test'].")
        file = workspace / f"{split}.arrow"
        if not file.exists():
            file.write_bytes(split.encode())
        rows = [{"question": f"{i}+1?", "answer": f" {i + 1}"} for i in range(splits[split])]
        return FakeDataset(rows, [file])

    module: Any = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    module.__spec__ = types.SimpleNamespace(name="datasets")
    exceptions: Any = types.ModuleType("datasets.exceptions")
    exceptions.DatasetsError = type("DatasetsError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setitem(sys.modules, "datasets.exceptions", exceptions)
    return asked


def test_a_dataset_by_name(library: list[Any]) -> None:
    keys = PAIRS | {
        "dataset_name": "openai/gsm8k",
        "dataset_config": "main",
        "dataset_test_split": "test",
    }
    made = trainer(**keys)
    assert library == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert (made.run.data.stats.rows, len(made.run.data.eval_rows)) == (20, 4)
    made.train()
    with pytest.raises(UserError, match=r"gsm8k, config main, split dev: Unknown split.*the split"):
        trainer(**keys | {"dataset_train_split": "dev"}, output_dir="other")


def test_an_entry_of_the_registry_may_be_a_dataset_by_name(
    library: list[Any], registered: Path
) -> None:
    entry = {
        "hf_hub_url": "openai/gsm8k",
        "subset": "main",
        "split": "test",
        "columns": {"prompt": "question", "response": "answer"},
    }
    Path("data/dataset_info.json").write_text(json.dumps({"maths": entry}))
    made = trainer(dataset="maths")
    assert library == [("openai/gsm8k", "main", "test")]
    assert made.run.data.stats.rows == 4
    text = made.tokenizer.decode(made.run.data.train_rows[0].input_ids)
    assert text.startswith("<|im_start|>user\n0+1?")


def test_without_the_package_a_name_is_one_error(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.data.hub.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"no datasets package.*pip install 'megatrain\[datasets\]"):
        trainer(dataset_name="openai/gsm8k")


@pytest.mark.filterwarnings("default")  # the package's own
def test_a_local_directory_through_the_real_package(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(workspace / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets")
    folder = workspace / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text(Path("data/train.jsonl").read_text())
    (folder / "test.jsonl").write_text(Path("data/train.jsonl").read_text())
    made = trainer(dataset_name="set", dataset_test_split="test[:25%]", **PAIRS)
    assert (made.run.data.stats.rows, len(made.run.data.eval_rows)) == (24, 6)
    plain = trainer(train_files=["data/train.jsonl"], **PAIRS, output_dir="plain")
    assert made.run.data.digest == plain.run.data.digest
    with pytest.raises(UserError, match=r"dataset set, split dev: .*dev"):
        trainer(dataset_name="set", dataset_train_split="dev", **PAIRS, output_dir="o")
    with pytest.raises(UserError, match="dataset nowhere/none, split train: "):
        trainer(dataset_name="nowhere/none", **PAIRS, output_dir="o")
