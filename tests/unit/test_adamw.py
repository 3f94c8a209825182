"""One formula: the host kernel equals the reference bit for bit, and both follow torch's AdamW."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from megatrain.masters import join_master, split_master
from megatrain.optim import (
    AdamWHyper,
    SegmentBuffers,
    Updater,
    host_updater,
    reference_update,
)


def make_buffers(size: int, split: bool, gradient_dtype: torch.dtype) -> SegmentBuffers:
    generator = torch.Generator().manual_seed(size)
    master = torch.randn(size, generator=generator) * 0.02
    weight, residual = split_master(master)
    return SegmentBuffers(
        weight=weight if split else master,
        residual=residual if split else None,
        exp_avg=torch.randn(size, generator=generator) * 1e-3,
        exp_avg_sq=torch.rand(size, generator=generator) * 1e-6,
        gradient=(torch.randn(size, generator=generator) * 1e-3).to(gradient_dtype),
    )


def copy_of(buffers: SegmentBuffers) -> SegmentBuffers:
    return SegmentBuffers(**{k: None if v is None else v.clone() for k, v in vars(buffers).items()})


def hyper(step: int, **changes: float) -> AdamWHyper:
    values = {"learning_rate": 1e-3, "weight_decay": 0.1, "gradient_scale": 0.37} | changes
    return AdamWHyper(beta1=0.9, beta2=0.95, eps=1e-8, step=step, **values)


def assert_same(first: SegmentBuffers, second: SegmentBuffers) -> None:
    for field, expected in vars(first).items():
        if expected is not None:
            assert torch.equal(getattr(second, field), expected), field


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 100_003])
@pytest.mark.parametrize("split", [True, False], ids=["split", "fp32"])
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
def test_host_kernel_equals_the_reference(
    size: int, split: bool, gradient_dtype: torch.dtype
) -> None:
    mine = make_buffers(size, split, gradient_dtype)
    theirs = copy_of(mine)
    update = host_updater(2)
    for step in range(1, 4):
        decay = 0.1 * (step % 2)
        update(mine, hyper(step, weight_decay=decay))
        reference_update(theirs, hyper(step, weight_decay=decay))
    assert_same(mine, theirs)


def test_concurrent_sweeps_do_not_disturb_each_other() -> None:
    buffers = [make_buffers(50_001 + i, True, torch.bfloat16) for i in range(4)]
    expected = [copy_of(b) for b in buffers]
    update = host_updater(2)
    threads = [threading.Thread(target=update, args=(b, hyper(1))) for b in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, theirs in zip(buffers, expected, strict=True):
        reference_update(theirs, hyper(1))
        assert_same(mine, theirs)


@pytest.mark.process
def test_numba_s_unsafe_threads_are_told_before_the_first_sweep_and_take_turns() -> None:
    """Without turns numba ends the process."""
    code = (
        "from megatrain.optim.host import threading_notice\n"
        "from tests.unit import test_adamw\n"
        "print(threading_notice())\n"
        "test_adamw.test_concurrent_sweeps_do_not_disturb_each_other()\n"
    )
    environment = os.environ | {
        "NUMBA_THREADING_LAYER": "workqueue",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "unsafe threading layer, workqueue" in done.stdout


def test_the_sweep_leaves_torch_s_threads_alone() -> None:
    before = torch.get_num_threads()
    host_updater(2)(make_buffers(1000, True, torch.bfloat16), hyper(1))
    assert torch.get_num_threads() == before


def test_the_formula_follows_torch_adamw() -> None:
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(1000, generator=generator))
    optimizer = torch.optim.AdamW(
        [param], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
    )
    mine = SegmentBuffers(
        weight=param.detach().clone(),
        residual=None,
        exp_avg=torch.zeros(1000),
        exp_avg_sq=torch.zeros(1000),
        gradient=torch.zeros(1000),
    )
    for step in range(1, 51):
        gradient = torch.randn(1000, generator=generator)
        param.grad = gradient.clone()
        mine.gradient.copy_(gradient)
        optimizer.step()
        reference_update(mine, hyper(step, gradient_scale=1.0))
    # torch fuses multiply and add and takes roots from MKL: a few units in the last place.
    torch.testing.assert_close(mine.weight, param.detach(), rtol=2e-6, atol=2e-6)
    state = optimizer.state[param]
    torch.testing.assert_close(mine.exp_avg, state["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(mine.exp_avg_sq, state["exp_avg_sq"], rtol=1e-5, atol=1e-7)


EDGES = [0x0, 0x80000000, 0x1, 0x8000, 0x7FFF, 0x8001, 0x3F808000, 0xBF808000, 0x3F7F8000]
EDGES += [0x7F7F7FFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x00807FFF, 0x807F8000]


def test_masters_survive_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.randint(-(2**31), 2**31, (100_000,), generator=generator, dtype=torch.int64)
    edges = torch.tensor([e - 2**32 if e >= 2**31 else e for e in EDGES])
    bits = torch.cat([low, edges]).to(torch.int32)
    master = bits.view(torch.float32)
    weight, residual = split_master(master)
    assert torch.equal(join_master(weight, residual).view(torch.int32), bits)


def test_the_weight_is_the_nearest_bf16() -> None:
    master = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    weight, residual = split_master(master)
    ties = residual == -(2**15)
    assert torch.equal(weight[~ties], master.bfloat16()[~ties])
    tie = torch.tensor([0x3F808000], dtype=torch.int32).view(torch.float32)
    assert split_master(tie)[0].view(torch.int16).item() == 0x3F81  # away from zero
    assert split_master(-tie)[0].view(torch.int16).item() == 0xBF81 - 2**16


@pytest.mark.parametrize("update", [host_updater(1), reference_update], ids=["host", "reference"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"gradient": torch.zeros(99)},
        {"exp_avg": torch.zeros(100, dtype=torch.float64)},
        {"residual": None},
        {"exp_avg_sq": torch.zeros(200)[::2]},
    ],
    ids=["short", "dtype", "no residual", "strided"],
)
def test_buffers_that_do_not_belong_together_are_refused(
    update: Updater, wrong: dict[str, torch.Tensor | None]
) -> None:
    buffers = make_buffers(100, True, torch.bfloat16)
    with pytest.raises(ValueError, match=r"weight|exp_avg|gradient"):
        update(SegmentBuffers(**(vars(buffers) | wrong)), hyper(1))
