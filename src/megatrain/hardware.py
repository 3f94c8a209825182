"""Sizes and rates of GPUs, as their makers publish them; what is not published is None.

Rates are peaks: what is reached is in `planner.estimate`, with where it was measured.
"""

import re
from dataclasses import dataclass

GIB = 2**30
PCIE_4, PCIE_5 = 31.5e9, 63.0e9
"""Bytes per second and direction of 16 lanes, after line coding (PCI-SIG: 16 and 32 GT/s)."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One model of GPU."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    bf16_flops_per_s: float
    """Dense matrix products with fp32 sums."""
    link_bytes_per_s: float
    """To the host, each way."""
    power_w: float | None
    source: str


def _gpu(
    name: str,
    memory_gib: int,
    memory_bytes_per_s: float,
    bf16_flops_per_s: float,
    link: float,
    power_w: float | None,
    source: str,
) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=memory_gib * GIB,
        memory_bytes_per_s=memory_bytes_per_s,
        bf16_flops_per_s=bf16_flops_per_s,
        link_bytes_per_s=link,
        power_w=power_w,
        source=source,
    )


AMPERE = "NVIDIA Ampere GA102 whitepaper"
ADA = "NVIDIA Ada architecture whitepaper"
BLACKWELL = "NVIDIA RTX Blackwell architecture whitepaper"
_ALL = (
    _gpu("RTX 3090", 24, 936e9, 71e12, PCIE_4, 350, AMPERE),
    _gpu("RTX A6000", 48, 768e9, 154.8e12, PCIE_4, 300, AMPERE),
    _gpu("RTX 4090", 24, 1008e9, 165.2e12, PCIE_4, 450, ADA),
    _gpu("RTX 6000 Ada", 48, 960e9, 364.2e12, PCIE_4, 300, ADA),
    _gpu("L4", 24, 300e9, 121e12, PCIE_4, 72, "NVIDIA L4 datasheet"),
    _gpu("L40S", 48, 864e9, 362e12, PCIE_4, 350, "NVIDIA L40S datasheet"),
    _gpu("RTX 5090", 32, 1792e9, 209.5e12, PCIE_5, 575, BLACKWELL),
    _gpu("RTX PRO 6000", 96, 1792e9, 503.8e12, PCIE_5, 600, "NVIDIA RTX PRO Blackwell whitepaper"),
    _gpu("A100-40", 40, 1555e9, 312e12, PCIE_4, 400, "NVIDIA A100 datasheet (SXM)"),
    _gpu("A100-80", 80, 2039e9, 312e12, PCIE_4, 400, "NVIDIA A100 datasheet (SXM)"),
    _gpu("H100-PCIe", 80, 2000e9, 756e12, PCIE_5, 350, "NVIDIA H100 datasheet (PCIe)"),
    _gpu("H100", 80, 3350e9, 989e12, PCIE_5, 700, "NVIDIA H100 datasheet (SXM)"),
    _gpu("H200", 139, 4800e9, 989e12, PCIE_5, 700, "NVIDIA H200 datasheet (SXM); memory as seen"),
    _gpu("GH200", 96, 4000e9, 989e12, 450e9, 1000, "NVIDIA GH200 datasheet (HBM3, NVLink-C2C)"),
    _gpu("B200", 179, 7700e9, 2250e12, PCIE_5, 1000, "NVIDIA DGX B200 datasheet"),
)
GPUS = {gpu.name: gpu for gpu in _ALL}


def find_gpu(name: str) -> Gpu | None:
    """The GPU of that name, however it is spelt: `rtx4090`, `RTX-4090`, `NVIDIA A100-SXM4-80GB`.

    More words in common win: `NVIDIA H100 PCIe` is not an H100.  A part of one name alone will do
    if it has a number: `4090`, but not `A100`, of which there are two.
    """
    asked = _words(name)
    known = sorted(GPUS, key=lambda each: len(_words(each)), reverse=True)
    alike = (each for each in known if _words(each) <= asked or _glued(each) == _glued(name))
    if (found := next(alike, None)) is not None:
        return GPUS[found]
    longer = [each for each in known if asked <= _words(each)]
    return GPUS[longer[0]] if len(longer) == 1 and re.search("[0-9]", name) else None


def _words(name: str) -> set[str]:
    return {word.removesuffix("gb") for word in re.findall(r"[a-z0-9]+", name.lower())}


def _glued(name: str) -> str:
    return "".join(re.findall(r"[a-z0-9]+", name.lower()))
