"""Checkpoints to plain models: the weights that training has, in every dtype and family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM
from typer.testing import CliRunner

from megatrain.checkpoint import Disk, masters_of, save_model
from megatrain.cli import app
from megatrain.data import DataOptions
from megatrain.engine import Engine
from megatrain.errors import UserError
from megatrain.evaluator import evaluate_model
from megatrain.exporter import export_model
from megatrain.masters import split_master
from megatrain.opening import ModelChoice
from tests.numerics.harness import make_config, make_engine, reference_model
from tests.tokenizers_for_tests import byte_tokenizer, save_tiny_model

from .runs import ScriptedDisk, full, train

CHECKPOINT = Path("out/checkpoint-4")


def export(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["export", str(CHECKPOINT), *arguments])
    if result.exception is not None:
        raise result.exception
    return result


def save_tiny_mixtral(folder: Path) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=262,
        num_local_experts=4,
        num_experts_per_tok=2,
        bos_token_id=256,
        eos_token_id=256,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def keys_of(folder: Path) -> dict[str, str]:
    """dtype by name of every stored tensor."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                found[name] = file.get_slice(name).get_dtype()
    return found


@pytest.mark.parametrize("kind", ["tied", "untied", "experts", "frozen"])
def test_the_exported_model_is_the_trained_one(kind: str, workspace: Path) -> None:
    changes: dict[str, Any] = {"frozen": ["model.layers.0.*"]} if kind == "frozen" else {}
    if kind == "experts":
        save_tiny_mixtral(Path("models/moe"))
        changes["model_name_or_path"] = "models/moe"
    else:
        save_tiny_model(Path("models/one"), tie_word_embeddings=kind == "tied")
        changes["model_name_or_path"] = "models/one"
    made = train(max_steps=4, dtype="bfloat16", **changes)
    export("fp32", "--dtype", "float32")
    export("bf16", "--max-shard-size", "30KB")
    export("fp16", "--dtype", "float16")
    read = masters_of(made.model, CHECKPOINT)
    masters = {n: t for block in made.model.blocks for n, t in read(block.index).items()}
    loaded: dict[str, Any] = {}
    for name in ("fp32", "bf16", "fp16"):
        loaded[name], info = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True)
        assert not any(info.values()), info
        assert AutoTokenizer.from_pretrained(name).chat_template
        assert set(keys_of(Path(name))) == set(keys_of(Path(changes["model_name_or_path"])))
    for name, param in loaded["fp32"].named_parameters():
        assert torch.equal(param, masters[name]), name
    assert any(bool((m != m.bfloat16().float()).any()) for m in masters.values()), "real masters"
    for name, param in loaded["bf16"].named_parameters():
        assert torch.equal(param, split_master(masters[name])[0]), name
    for name, param in loaded["fp16"].named_parameters():
        assert torch.equal(param, masters[name].half()), name
    # What training computes with is what the checkpoint and the final model have.
    for name in ("out", str(CHECKPOINT)):
        state = AutoModelForCausalLM.from_pretrained(name).state_dict()
        for key, tensor in loaded["bf16"].state_dict().items():
            assert torch.equal(state[key], tensor), key


@pytest.mark.parametrize("experts", [False, True])
def test_transformers_has_our_loss(experts: bool, workspace: Path) -> None:
    if experts:
        save_tiny_mixtral(Path("models/base"))
    train(max_steps=4)
    choice = ModelChoice(path=str(CHECKPOINT))
    (ours,) = evaluate_model(choice, ["data/text"], options=DataOptions(max_length=64))
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT).eval()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    ids = tokenizer(Path("data/text/a.txt").read_text())["input_ids"] + [256]
    total = count = 0.0
    for start in range(0, len(ids), 64):
        part = torch.tensor([ids[start : start + 64]])
        if part.shape[1] > 1:
            with torch.no_grad():
                total += float(model(part, labels=part).loss) * (part.shape[1] - 1)
            count += part.shape[1] - 1
    assert ours.result.supervised_tokens == count
    assert ours.result.loss == pytest.approx(total / count, rel=1e-5)


def test_the_generation_config_goes_with_the_model(workspace: Path) -> None:
    """Also one that transformers loads and would not save."""
    text = '{"do_sample": false, "temperature": 0.6, "eos_token_id": [256, 10]}'
    source = workspace / "models" / "base" / "generation_config.json"
    source.write_text(text)
    train(max_steps=4, save_steps=2)
    export("exported")
    for folder in (CHECKPOINT, Path("out"), Path("exported")):
        assert (folder / source.name).read_text() == text, folder


def test_what_cannot_be_exported_is_one_error(workspace: Path) -> None:
    train(max_steps=4)
    with pytest.raises(UserError, match="something there"):
        export("data")
    with pytest.raises(UserError, match="not a size"):
        export("new", "--max-shard-size", "much")
    path = CHECKPOINT / "training_state/block-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"block-00001\.safetensors has"):
        export("new")
    with pytest.raises(UserError, match="no such directory"):
        export_model(Path("no/where/at/all"), Path("new"))
    assert not Path("new").exists()


def test_a_model_is_uploaded_where_there_is_a_hub(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(max_steps=4)
    calls: list[tuple[str, dict[str, Any]]] = []

    class Api:
        def create_repo(self, name: str, **options: Any) -> None:
            calls.append((name, options))

        def upload_folder(self, **options: Any) -> None:
            calls.append(("upload", options))

    monkeypatch.setattr("megatrain.models.hub.HfApi", Api)
    export("pushed", "--push-to-hub", "me/model", "--private")
    assert calls == [
        ("me/model", {"private": True, "exist_ok": True}),
        ("upload", {"folder_path": Path("pushed"), "repo_id": "me/model"}),
    ]
    monkeypatch.undo()
    monkeypatch.chdir(workspace)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="upload again to me/model"):
        export("again", "--push-to-hub", "me/model")
    assert Path("again/config.json").is_file()


def tiny_engine(seed: int = 0) -> Engine:
    config = make_config("llama")
    masters = {n: p.detach() for n, p in reference_model(config, seed=seed).named_parameters()}
    return make_engine(config, masters)


def write_model(
    engine: Engine, path: Path, disk: Disk | None = None, dtype: str = "float32"
) -> None:
    read = engine.store.masters
    save_model(engine.model, read, path, dtype=dtype, max_shard_bytes=20_000, disk=disk)


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("what", ["write", "close", "rename"])
def test_a_model_that_cannot_be_written_leaves_no_remains(
    what: str, exists: bool, tmp_path: Path
) -> None:
    """They might be what fills the disk."""

    def fail(done: str, path: Path) -> None:
        if done == what:
            raise full()

    path = tmp_path / "model"
    if exists:
        path.mkdir()
    with pytest.raises(OSError, match="No space left"):
        write_model(tiny_engine(), path, ScriptedDisk(fail))
    assert [*tmp_path.iterdir()] == [path] * exists
    assert not exists or not [*path.iterdir()]


def test_a_value_too_large_for_float16_leaves_no_remains(tmp_path: Path) -> None:
    engine = tiny_engine()
    (name,) = (p.name for p in engine.model.blocks[-1].layout.params if "lm_head" in p.name)
    masters = engine.store.masters(engine.model.blocks[-1].index)
    masters[name][0, 0] = 7e4
    engine.store.write(engine.model.blocks[-1].index, masters)
    with pytest.raises(UserError, match=r"lm_head.weight in float16.*70000"):
        write_model(engine, tmp_path / "model", dtype="float16")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("after", range(1, 12))
def test_a_model_that_is_replaced_by_halves_is_none(after: int, tmp_path: Path) -> None:
    """A kill between two renames: shards of two models, each whole, would load as one."""

    class Killed(BaseException):
        pass

    count = [after]

    def kill(what: str, path: Path) -> None:
        count[0] -= what == "rename"
        if what == "rename" and count[0] < 0:
            raise Killed

    path, states = tmp_path / "model", []
    for seed in (0, 1):
        write_model(tiny_engine(seed), path)
        states.append(AutoModelForCausalLM.from_pretrained(path).state_dict())
    write_model(tiny_engine(0), path)
    try:
        write_model(tiny_engine(1), path, ScriptedDisk(kill))
    except Killed:
        pass
    try:
        found = AutoModelForCausalLM.from_pretrained(path).state_dict()
    except OSError:
        return
    assert any(all(torch.equal(found[n], t) for n, t in state.items()) for state in states)
