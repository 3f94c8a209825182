"""How a flat buffer is updated: one formula of AdamW, three ways to run it, equal bit for bit."""

from megatrain.optim.adamw import AdamWHyper, SegmentBuffers, Updater
from megatrain.optim.device import device_update
from megatrain.optim.host import host_updater
from megatrain.optim.reference import reference_update
from megatrain.optim.schedules import learning_rate_schedule

__all__ = [
    "AdamWHyper",
    "SegmentBuffers",
    "Updater",
    "device_update",
    "host_updater",
    "learning_rate_schedule",
    "reference_update",
]
