"""Device slots and waiting gradients: every buffer that a step uses beside the persistent state.

All are allocated once, in the sizes that `slot_sizes` counts.
"""

import torch
from torch import Tensor

from megatrain.memory import HostSlab
from megatrain.schedule import SlotSizes


class StepBuffers:
    """Byte buffers by slot number, as the schedule numbers them."""

    def __init__(self, sizes: SlotSizes, *, device: torch.device) -> None:
        def on_device(nbytes: int) -> Tensor:
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)

        self.weights = [on_device(nbytes) for nbytes in sizes.weights]
        self.accumulators = [on_device(nbytes) for nbytes in sizes.accumulators]
        self.staging = [on_device(nbytes) for nbytes in sizes.staging]
        self.passing = [on_device(nbytes) for nbytes in sizes.passing]
        on_host = [*sizes.home_gradients.values(), *sizes.host_inputs.values(), *sizes.loaded]
        self.slab = HostSlab(sum(map(HostSlab.rounded, on_host)), pin=device.type == "cuda")
        self.host_inputs = {
            place: self.slab.take(nbytes) for place, nbytes in sizes.host_inputs.items()
        }
        self.loaded = [self.slab.take(nbytes) for nbytes in sizes.loaded]
        self.home_gradients = {
            slot: self.slab.take(nbytes) for slot, nbytes in sizes.home_gradients.items()
        } | {slot: on_device(nbytes) for slot, nbytes in sizes.resident_gradients.items()}

    def close(self) -> None:
        """Give back page-locked memory."""
        self.slab.close()
