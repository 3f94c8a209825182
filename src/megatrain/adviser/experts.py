"""What streaming means for a mixture of experts: little computation for each parameter.

The bus and the host's updates take the same time for every step; computation grows with its tokens.
With clipping the host updates while the next forward runs, without it while the backward does too.
"""

from dataclasses import asdict, dataclass
from typing import Any

from megatrain.adviser.adviser import Adviser
from megatrain.adviser.question import Question
from megatrain.models.active import active_params, flops_per_token, share_of_experts
from megatrain.planner.answer import Answer
from megatrain.planner.durations import UPDATE_BYTES
from megatrain.schedule import Lane


@dataclass(frozen=True, kw_only=True)
class MixtureFigures:
    """Estimates for one question and its answer."""

    parameters: int
    parameters_a_token: int
    """It is multiplied with so many."""
    hiding_tokens_clipped: float
    """Of a step whose forward is as long as the host's updates of all parameters."""
    hiding_tokens_unclipped: float
    """The same of its forward and its backward with recompute."""
    of_resident_speed: float
    """Of a GPU that would hold all state and update it, with the same activations saved."""

    def words(self) -> str:
        return (
            f"a token uses {self.parameters_a_token / 1e9:.2f}B of the parameters"
            f" ({self.parameters_a_token / self.parameters:.1%}); updates on the host hide behind"
            f" {self.hiding_tokens_clipped / 1e3:,.0f}K tokens a step with clipping,"
            f" {self.hiding_tokens_unclipped / 1e3:,.0f}K without\n"
            f"this step runs at {self.of_resident_speed:.0%} of the speed with all state on the GPU"
        )

    def figures(self) -> dict[str, Any]:
        """For a program to read."""
        return asdict(self)


def mixture_figures(adviser: Adviser, question: Question, found: Answer) -> MixtureFigures | None:
    """None for a model without experts or with frozen parts, or if its config does not say how many
    experts a token uses."""
    model, active = adviser.model, active_params(adviser.model)
    if active is None or flops_per_token(model) is None or share_of_experts(model) is None:
        return None
    cost = adviser.rule(question).footprint
    rows, length, _ = adviser.micro_batches(question)
    layers, micro_tokens = model.num_layers, rows * length
    update_s = model.num_params / question.update_params_per_s
    both_s = layers * (cost.forward_s + cost.backward_s)
    resident = found.placement.resident
    streamed = sum(block.layout.num_params for block in model.blocks if block.index not in resident)
    device_s = UPDATE_BYTES * streamed / cost.rates.device_bytes_per_s
    compute_s = found.lanes_busy[Lane.COMPUTE] * found.placement.seconds
    return MixtureFigures(
        parameters=model.num_params,
        parameters_a_token=active,
        hiding_tokens_clipped=micro_tokens * update_s / (layers * cost.forward_s),
        hiding_tokens_unclipped=micro_tokens * update_s / both_s,
        of_resident_speed=min(1.0, (compute_s + device_s) / found.placement.seconds),
    )
