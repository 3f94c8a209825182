"""Figures of the GPU during a run: memory of the process, power, clocks, and its matrix rate."""

import threading
from typing import Any

import psutil
import torch

from megatrain.engine.device import release_cached_memory

SAMPLE_SECONDS = 0.05
HOLDS_CLOCK = {
    0x20 | 0x40: "heat",
    0x80: "the power supply",
    0x08: "the hardware",
    0x04: "the power limit",
}
"""Bits of NVML's reasons for a lower clock (nvmlClocksEventReasons)."""
MATMUL_SIZE = 8192
MATMUL_REPEATS = 30


class GpuMeter:
    """Samples a GPU between `start` and `stop`; on the CPU it has nothing to say.

    Power and clocks need nvidia-ml-py; without it they are left out.

    Args:
        device: the compute device; nothing else may run on it, for its memory to be the run's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if self._cuda else ""
        rate = matmul_flops_per_s(device, torch.bfloat16)
        self._matmul_tflops = None if rate is None else round(rate / 1e12, 1)
        self._used: list[int] = []
        self._power_w: list[float] = []
        self._clock_mhz: list[float] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to sample."""
        if not self._cuda:
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        self._retries = torch.cuda.memory_stats(self._device)["num_alloc_retries"]
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self) -> None:
        handle = _nvml_handle(self._device)
        while not self._stopped.wait(SAMPLE_SECONDS):
            free, total = torch.cuda.mem_get_info(self._device)
            self._used.append(total - free)
            if handle is not None:
                nvml, gpu = handle
                self._power_w.append(nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3)
                self._clock_mhz.append(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))

    def figures(self) -> dict[str, Any]:
        """What was measured, by name with its unit."""
        if not self._cuda:
            return {}
        stats = torch.cuda.memory_stats(self._device)
        return {
            "matmul_tflops": self._matmul_tflops,
            "device_process_bytes": max(self._used, default=None),
            "device_peak_bytes": torch.cuda.max_memory_allocated(self._device),
            "device_reserved_bytes": torch.cuda.max_memory_reserved(self._device),
            "allocation_retries": stats["num_alloc_retries"] - self._retries,
            "power_w": _mean(self._power_w),
            "sm_clock_mhz": _mean(self._clock_mhz),
        }


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 1) if values else None


def clock_report(device: torch.device) -> str:
    """What holds the GPU's clock down at this moment, or that nothing does.

    Empty on the CPU and where nvidia-ml-py or the driver does not say.
    """
    found = _nvml_handle(device) if device.type == "cuda" else None
    if found is None:
        return ""
    nvml, gpu = found
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        now = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
        highest = nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)
        celsius = nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
        watts = nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3
    except nvml.NVMLError:
        return ""
    held = [name for bits, name in HOLDS_CLOCK.items() if reasons & bits]
    by = f"held down by {' and '.join(held)}" if held else "not held down"
    return f"the GPU's clock is {by} ({now} of {highest} MHz, {celsius} C, {watts:.0f} W)"


def _nvml_handle(device: torch.device) -> Any:
    """(pynvml, handle), or None if the package or the library is not there."""
    try:
        import pynvml

        pynvml.nvmlInit()
        # Not by index: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER number GPUs for CUDA alone.
        uuid = torch.cuda.get_device_properties(device).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except ImportError:
        return None
    except pynvml.NVMLError:
        return None


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float | None:
    """What a large product of random matrices reaches; None on the CPU, or without room for it.

    It waits for the GPU, and takes and gives back the room of three matrices: not during a run.
    """
    if device.type != "cuda":
        return None
    try:
        a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=dtype) for _ in "ab")
        for _ in range(3):
            a @ b
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        for _ in range(MATMUL_REPEATS):
            a @ b
        end.record()
        end.synchronize()
    except torch.OutOfMemoryError:
        return None
    del a, b
    release_cached_memory(device)
    seconds = start.elapsed_time(end) / 1e3 / MATMUL_REPEATS
    return 2 * MATMUL_SIZE**3 / seconds


def memory_in_use(device: torch.device) -> dict[str, float]:
    """What this process holds, by name with its unit; counters of the host, nothing waits."""
    found = {"host_memory_gib": psutil.Process().memory_info().rss / 2**30}
    if device.type == "cuda":
        found["gpu_memory_gib"] = torch.cuda.memory_reserved(device) / 2**30
    return found
