"""`megatrain bench --calibrate` on a real GPU; run with `make test-gpu`."""

import time
from pathlib import Path

import pytest
import torch

from megatrain.engine.calibration import calibrate
from megatrain.engine.compute_rates import NUM_ATTENTION, NUM_PRODUCTS
from megatrain.engine.kept_rates import run_rates, store, stored_calibration
from megatrain.hardware import find_gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def test_all_of_it_in_less_than_two_minutes_and_below_the_peaks(tmp_path: Path) -> None:
    began = time.monotonic()
    found = calibrate(tmp_path, print)
    assert time.monotonic() - began < 120
    gpu = found.gpu
    assert gpu is not None and found.machine.driver is not None
    assert len(gpu.products) <= NUM_PRODUCTS and len(gpu.attention) <= NUM_ATTENTION
    assert gpu.products and gpu.attention
    sheet = find_gpu(torch.cuda.get_device_name(0))
    if sheet is not None:
        assert max(each.flops_per_s for each in gpu.products) < 1.1 * sheet.bf16_flops_per_s
        assert max(each.forward_flops_per_s for each in gpu.attention) < sheet.bf16_flops_per_s
        assert max(gpu.h2d_alone_bytes_per_s, gpu.d2h_alone_bytes_per_s) < sheet.link_bytes_per_s
    assert gpu.h2d_bytes_per_s < 1.1 * gpu.h2d_alone_bytes_per_s
    assert gpu.d2h_bytes_per_s < 1.1 * gpu.d2h_alone_bytes_per_s
    store(found)
    assert stored_calibration().found == found
    rates = run_rates(torch.device("cuda", 0), host_threads=None)
    assert rates == gpu.beside(found.update_params_per_s)
