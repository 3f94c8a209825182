"""GPUs by name."""

import pytest

from megatrain.hardware import GPUS, find_gpu


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", "H200"),
        ("h200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", None),
        ("GeForce GTX 1080", None),
        ("A100", None),
        ("4090", "RTX 4090"),
        ("a6000", "RTX A6000"),
        ("6000", None),
        ("PRO", None),
        ("", None),
    ],
)
def test_a_gpu_is_found_by_what_its_driver_calls_it(name: str, found: str | None) -> None:
    gpu = find_gpu(name)
    assert (None if gpu is None else gpu.name) == found


def test_every_number_has_a_source() -> None:
    assert all(gpu.source and gpu.memory_bytes > 2**33 for gpu in GPUS.values())
