"""How long each operation of a step takes, from the costs of a micro-batch and a machine's rates.

Left out, because they are small or hidden: launches, the decisions of the control lane, and that
lanes slow each other down (copies share the host's memory with updates).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.layout import BlockLayout, Purpose
from megatrain.schedule import Footprint, Lane, Op, OpKind, StepPlan, moved_bytes

UPDATE_BYTES = 26
"""Of memory traffic a parameter: 12 of state read and written, 2 of gradient read."""
FINISH_BYTES = 8
"""The fp32 sum read, the rounded gradient written and read again."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of an operation of `plan`."""

    layouts: Sequence[BlockLayout]
    """Embed, layers, head."""
    plan: StepPlan
    gradient_dtype: str
    footprint: Footprint

    def __call__(self, op: Op) -> float:
        """Seconds of an operation, if nothing holds it up."""
        cost, rates = self.footprint, self.footprint.rates
        layout = self.layouts[op.block]
        match op.kind:
            case OpKind.UPDATE if op.lane is Lane.HOST:
                return self._trained(layout) / rates.update_params_per_s
            case OpKind.UPDATE:
                return UPDATE_BYTES * self._trained(layout) / rates.device_bytes_per_s
            case OpKind.FETCH:
                return layout.nbytes(Purpose.WEIGHT) / rates.h2d_bytes_per_s
            case OpKind.FORWARD:
                return cost.forward_s if op.block else cost.embed_s
            case OpKind.LOSS:
                return cost.loss_s
            case OpKind.BACKWARD if not op.block:
                return cost.embed_backward_s
            case OpKind.BACKWARD:
                saved = op.block in self.plan.saved
                return cost.saved_backward_s if saved else cost.backward_s
            case OpKind.ZERO:
                return layout.nbytes(Purpose.ACCUMULATOR) / rates.device_bytes_per_s
            case OpKind.FINISH:
                return FINISH_BYTES * self._trained(layout) / rates.device_bytes_per_s
            case OpKind.OFFLOAD if op.block not in self.plan.resident:
                nbytes = layout.nbytes(Purpose.GRADIENT, self.gradient_dtype)
                return nbytes / rates.d2h_bytes_per_s
            case OpKind.SPILL:
                return cost.input_bytes / rates.d2h_bytes_per_s
            case OpKind.UNSPILL:
                return cost.input_bytes / rates.h2d_bytes_per_s
            case _ if op.lane is Lane.DISK_READ:
                return self._disk_s(op, rates.disk_read_bytes_per_s)
            case _ if op.lane is Lane.DISK_WRITE:
                return self._disk_s(op, rates.disk_write_bytes_per_s)
            case _:
                return 0.0

    def _disk_s(self, op: Op, bytes_per_s: float | None) -> float:
        assert bytes_per_s is not None, "the disk's rates were not measured"
        return moved_bytes(op, self.layouts[op.block], self.plan, self.gradient_dtype) / bytes_per_s

    @staticmethod
    def _trained(layout: BlockLayout) -> int:
        """Parameters."""
        return sum(segment.numel for segment in layout.segments if segment.trainable)
