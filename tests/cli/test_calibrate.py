"""`megatrain bench --calibrate`: measured once, kept, used by plan, train and bench."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from megatrain.adviser import chosen_rates
from megatrain.adviser import plan as planning
from megatrain.adviser.chosen_rates import GivenRates
from megatrain.adviser.question import Question
from megatrain.cli import app
from megatrain.engine import EngineOptions, calibration, compute_rates, cross_entropy, kept_rates
from megatrain.engine.calibration import in_lines
from megatrain.engine.footprint import measure_footprint
from megatrain.engine.kept_rates import (
    Calibration,
    DiskRates,
    GpuRates,
    calibration_file,
    run_rates,
    store,
    stored_calibration,
    this_machine,
)
from megatrain.engine.programs import Programs
from megatrain.errors import UserError
from megatrain.hardware import GPUS
from megatrain.models import build_on_meta, split_model
from megatrain.schedule import AttentionRate, ProductRate
from tests.numerics.harness import make_config

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
SMALL = SHAPES / "qwen2.5-0.5b"
GPU = GpuRates(
    h2d_alone_bytes_per_s=25e9,
    d2h_alone_bytes_per_s=26e9,
    h2d_bytes_per_s=20e9,
    d2h_bytes_per_s=21e9,
    device_bytes_per_s=800e9,
    products=(
        ProductRate(tokens=2048, width=1024, flops_per_s=5e13),
        ProductRate(tokens=16384, width=1024, flops_per_s=6e13),
        ProductRate(tokens=16384, width=8192, flops_per_s=9e13),
    ),
    attention=(
        AttentionRate(
            length=1024, head_dim=64, forward_flops_per_s=3e13, backward_flops_per_s=2e13
        ),
    ),
)


def command(*arguments: Any) -> Result:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was measured anew")


def on_cpu(measure: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, __, deadline: measure(torch.device("cpu"), torch.float32, deadline)


@pytest.fixture
def kept(tmp_path: Path) -> Calibration:
    """Of this machine, which has no GPU as far as its tests know."""
    found = Calibration(
        day=date(2026, 1, 31),
        machine=this_machine(),
        update_params_per_s=3e9,
        disk=DiskRates(path=str(tmp_path), read_bytes_per_s=3e9, write_bytes_per_s=2e9),
        gpu=None,
    )
    store(found)
    return found


@pytest.fixture
def of_gpu(kept: Calibration, monkeypatch: pytest.MonkeyPatch) -> Calibration:
    """The same of a machine with a GPU, of which this one claims to be."""
    machine = replace(kept.machine, gpu="NVIDIA L4 GPU-1234", driver="580.65.06")
    monkeypatch.setattr(kept_rates, "this_machine", lambda: machine)
    found = replace(kept, machine=machine, gpu=GPU)
    store(found)
    return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials too small to mean anything."""
    monkeypatch.setattr("megatrain.engine.rates.UPDATE_SAMPLE", 2**16)
    monkeypatch.setattr("megatrain.engine.rates.DISK_BYTES", 2**22)
    monkeypatch.setattr(calibration, "DISK_BYTES", 2**22)
    monkeypatch.setattr(calibration, "LITTLE", 2**21)
    for name, value in {
        "TOKENS": (16,),
        "WIDTHS": (16, 32),
        "LENGTHS": (16,),
        "HEAD_DIMS": (8, 16),
        "ATTENTION_TOKENS": 32,
        "ATTENTION_WIDTH": 32,
        "TRIAL_SECONDS": 1e-3,
    }.items():
        monkeypatch.setattr(compute_rates, name, value)


@pytest.mark.usefixtures("quick")
def test_what_is_measured_is_shown_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert stored_calibration().found is None and not stored_calibration().words
    for arguments in ([], ["--disk-path", tmp_path]):
        result = command("bench", "--calibrate", *arguments)
        for part in ("AdamW on the host", "Gparam/s", "disk read", "disk write", "not measured"):
            assert part in result.stdout
        found = stored_calibration().found
        assert found is not None and "\n".join(in_lines(found)) in result.stdout
        assert str(calibration_file(found.machine)) in result.stdout
        assert found.disk.path == str(tmp_path) and found.gpu is None
        assert not list(tmp_path.iterdir())  # nothing is left
        assert len(list(calibration_file(found.machine).parent.iterdir())) == 1


@pytest.mark.usefixtures("quick")
def test_a_gpu_is_measured_by_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies apart, all of it runs on the CPU too."""
    monkeypatch.setattr(calibration, "choose_device", lambda _: SimpleNamespace(type="gpu"))
    monkeypatch.setattr(calibration, "copy_rates", lambda _, ways=(1, 2): (7e9,) * len(ways))
    monkeypatch.setattr(calibration, "device_rate", lambda _: 8e9)
    for name in ("product_rates", "attention_rates"):
        monkeypatch.setattr(calibration, name, on_cpu(getattr(compute_rates, name)))
    found = calibration.calibrate(tmp_path, never).gpu
    assert found is not None and found.h2d_alone_bytes_per_s == 7e9
    assert [(each.tokens, each.width) for each in found.products] == [(16, 16), (16, 32)]
    assert [(each.length, each.head_dim) for each in found.attention] == [(16, 8), (16, 16)]
    # When the time is over, the rest is left out.
    monkeypatch.setattr(calibration, "SECONDS", 0.0)
    found = calibration.calibrate(tmp_path, never).gpu
    assert found is not None and found.products == found.attention == ()


def test_shapes_without_room_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(tokens: int, width: int, *_: Any) -> ProductRate:
        if width > 2048:
            raise torch.OutOfMemoryError
        return ProductRate(tokens=tokens, width=width, flops_per_s=1.0)

    monkeypatch.setattr(compute_rates, "_product", product)
    device = torch.device("cpu")
    found = compute_rates.product_rates(device, torch.float32, float("inf"))
    assert [each.width for each in found] == [1024, 2048] * 2


@pytest.mark.usefixtures("quick")
def test_a_slow_disk_is_tried_with_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def rates(_: Path, room: int) -> tuple[float, float]:
        asked.append(room)
        return 1e5, 1e6

    monkeypatch.setattr(calibration, "disk_rates", rates)
    assert calibration.calibrate(tmp_path, never).disk.read_bytes_per_s == 1e5
    assert asked == [2 * calibration.LITTLE]


def test_the_table_of_a_gpu(of_gpu: Calibration) -> None:
    *lines, missing = in_lines(of_gpu)
    assert [line.split("  ")[-1].strip() for line in lines] == [
        *("3.00 Gparam/s", "3.00 GB/s", "2.00 GB/s", "25.0 GB/s", "26.0 GB/s", "20.0 GB/s"),
        *("21.0 GB/s", "800.0 GB/s", "50.0 TFLOPS", "60.0 TFLOPS", "90.0 TFLOPS", "30.0 TFLOPS"),
        "20.0 TFLOPS",
    ]
    assert "5 of 8 products, 5 of 6 shapes of attention" in missing


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no model. give a model's directory, or --calibrate"),
        ([SMALL, "--calibrate"], "a model too"),
        (["--calibrate", "--rows", "4"], r"would not use \(--rows\)"),
        (["--calibrate", "--disk-path", "nowhere"], "no such directory"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    arguments: list[Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "host_update_rate", never)
    with pytest.raises(UserError, match=said):
        command("bench", *arguments)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "host_update_rate", never)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        command("bench", "--calibrate", "--disk-path", tmp_path)


def _without(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda stored: json.dumps({k: v for k, v in stored.items() if k != key})


def _with(**changed: Any) -> Callable[[dict[str, Any]], str]:
    return lambda stored: json.dumps(stored | changed)


def _with_gpu(**changed: Any) -> Callable[[dict[str, Any]], str]:
    return lambda stored: json.dumps(stored | {"gpu": stored["gpu"] | changed})


DAMAGED = {
    "no format": _without("format"),
    "no rate": _without("update_params_per_s"),
    "zero": _with(update_params_per_s=0),
    "negative": _with_gpu(h2d_bytes_per_s=-1.0),
    "infinite": _with(update_params_per_s=float("inf")),
    "not a number": _with_gpu(device_bytes_per_s=float("nan")),
    "text": _with(update_params_per_s="fast"),
    "no day": _with(day="yesterday"),
    "no GPU": _with(gpu=None),
    "shape": _with_gpu(products=[{"tokens": 1, "flops_per_s": 1.0}]),
    "cut": lambda stored: json.dumps(stored)[:-9],
    "list": lambda stored: json.dumps([stored]),
    "empty": lambda _: "",
    "deep": lambda _: "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_told_and_not_used(
    of_gpu: Calibration, damage: Callable[[dict[str, Any]], str]
) -> None:
    assert stored_calibration().found == of_gpu
    path = calibration_file(of_gpu.machine)
    path.write_text(damage(json.loads(path.read_text())))
    found = stored_calibration()
    assert found.found is None
    assert "are damaged and are not used" in found.words and "\n" not in found.words


def test_what_else_cannot_be_used(kept: Calibration) -> None:
    path = calibration_file(kept.machine)
    text = path.read_text()
    path.write_text(_with(format=0, disk="of another meaning")(json.loads(text)))
    assert "another version's format" in stored_calibration().words
    path.write_bytes(b"\xff\xfe")
    assert "are damaged" in stored_calibration().words
    path.unlink()
    path.mkdir()
    assert "cannot be read (Is a directory)" in stored_calibration().words
    with pytest.raises(UserError, match="cannot be written"):
        store(kept)


def test_each_machine_has_its_own(of_gpu: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    def on(**changed: Any) -> kept_rates.Stored:
        machine = replace(of_gpu.machine, **changed)
        monkeypatch.setattr(kept_rates, "this_machine", lambda: machine)
        return stored_calibration()

    for other in ({"gpu": "NVIDIA L4 GPU-9999"}, {"cpu": "another"}, {"cores": 999}):
        assert on(**other) == kept_rates.Stored(found=None)
    assert "torch" in (words := on(torch="9.9").words) and "(now 9.9)" in words
    assert "driver 580.65.06 (now 600.1)" in on(driver="600.1").words
    assert on().found == of_gpu


def _questions(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    asked: list[Question] = []
    monkeypatch.setattr(planning, "gpu_here", lambda: GPUS["L4"])
    monkeypatch.setattr(planning, "_tell", lambda _, question, *__, **___: asked.append(question))
    return asked


def test_a_plan_for_this_machine_uses_what_is_kept(
    of_gpu: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _questions(monkeypatch)
    monkeypatch.setattr(chosen_rates, "host_update_rate", never)
    said = command("plan", SMALL, "--disk-memory", "1TiB").stderr
    assert "rates measured on 2026-01-31 by bench --calibrate" in said
    assert len(said.splitlines()) == 1
    command("plan", SMALL, "--disk-memory", "1TiB", "--disk-rate", "1GB")
    command("plan", SMALL, "--host-bandwidth", "26GB")
    here, rate, bandwidth = asked
    assert here.rates == GPU.beside(3e9) and here.measured == GPU
    assert (here.disk_bytes_per_s, rate.disk_bytes_per_s) == (2e9, 1e9)
    assert bandwidth.rates == GPU.beside(1e9)


@pytest.mark.parametrize(("folder", "rate"), [(".", 2e9), ("/proc", None), ("nowhere", None)])
def test_a_plan_of_a_config_knows_its_disk_only_if_it_was_measured(
    of_gpu: Calibration, folder: str, rate: float | None, tmp_path: Path
) -> None:
    said: list[str] = []
    path = str(tmp_path / folder)
    found = chosen_rates.known_rates(GivenRates(), path, here=True, note=said.append)
    assert found["disk_bytes_per_s"] == rate and len(said) == 1


@pytest.mark.parametrize("gpu", ["L4", "all"])
def test_a_plan_for_a_named_machine_does_not(
    of_gpu: Calibration, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen_rates, "host_update_rate", lambda: 1e9)
    monkeypatch.setattr(chosen_rates, "stored_calibration", never)
    result = command("plan", SMALL, "--gpu", gpu, "--host-memory", "64GiB")
    assert not result.stderr and result.exit_code == 0


def test_a_plan_says_what_it_cannot_use(
    of_gpu: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _questions(monkeypatch)
    monkeypatch.setattr(chosen_rates, "host_update_rate", lambda: 1e9)
    calibration_file(of_gpu.machine).write_text("{}")
    assert command("plan", SMALL).stderr.count("are damaged") == 1
    assert asked[0].measured is None and asked[0].update_params_per_s == 1e9


def test_a_gpu_that_no_data_sheet_is_known_of(
    of_gpu: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(total_memory=48 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    result = command("plan", SMALL, "--host-memory", "64GiB", "--json")
    found = json.loads(result.stdout)
    assert found["gpu"] == "Some GPU" and found["fits"]
    calibration_file(of_gpu.machine).unlink()
    with pytest.raises(UserError, match="measure them with megatrain bench --calibrate"):
        command("plan", SMALL, "--host-memory", "64GiB")


def test_a_run_uses_what_is_kept(of_gpu: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rates, "measure_rates", never)
    config = make_config("llama")
    model = split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")
    options = EngineOptions()
    footprint = measure_footprint(
        model,
        options,
        shape=(2, 8),
        device=torch.device("cpu"),
        loss=cross_entropy,
        programs=Programs.of(model, options),
    )
    assert asdict(footprint.rates) == asdict(GPU.beside(3e9))
    with pytest.raises(AssertionError, match="measured anew"):
        run_rates(torch.device("cpu"), host_threads=3)


def test_a_disk_is_not_measured_again(
    kept: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = stored_calibration()
    assert kept.disk_rates(tmp_path) == (3e9, 2e9) and stored.words_of_disk(tmp_path)
    assert kept.disk_rates(Path("/proc")) is None and not stored.words_of_disk(Path("/proc"))
    monkeypatch.setattr(kept_rates, "disk_rates", never)
    arguments = [SHAPES / "llama-50m", "--rows", "1", "--length", "8", "--steps", "1"]
    arguments += ["--warmup-steps", "0", "--disk-path", tmp_path, "--offload", "{disk: 1}"]
    assert "rates measured on 2026-01-31" in command("bench", *arguments).stdout
    calibration_file(kept.machine).write_text("")
    monkeypatch.setattr(kept_rates, "disk_rates", lambda *_: (1e9, 1e9))
    assert "are damaged and are not used" in command("bench", *arguments).stdout


def test_train_says_it_too(
    kept: Calibration, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_rates, "disk_rates", never)
    example = Path(__file__).parents[2] / "examples" / "sft.yaml"
    arguments = ["max_steps=1", "max_length=64", f"disk_path={tmp_path}", "offload={disk: 1}"]
    said = command("train", example, *arguments).stdout
    assert said.count("rates measured on 2026-01-31 by bench --calibrate") == 1


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Wed Aug 6 2025", "580.65.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1  Release", "570.1"),
        ("nothing of the kind", None),
    ],
)
def test_the_drivers_version(
    text: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_rates, "DRIVER", tmp_path / "version")
    assert kept_rates._driver_version() is None
    kept_rates.DRIVER.write_text(text)
    assert kept_rates._driver_version() == version
