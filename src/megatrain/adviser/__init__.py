"""Whether a model fits a machine, how fast it trains there, what would help; micro-batches for it.

`megatrain plan` asks, and runs and benches whose micro-batches are left to the machine.  Answers
come from the model's config alone; no weights, no GPU.  Bytes of state and slots are those that a
run allocates; activations and times are estimates (`planner.estimate` says how good).
"""

from megatrain.adviser.chosen_rates import GivenRates
from megatrain.adviser.micro_batches import Earlier, plan_in_micro_batches
from megatrain.adviser.plan import plan_run_of
from megatrain.adviser.question import Training

__all__ = ["Earlier", "GivenRates", "Training", "plan_in_micro_batches", "plan_run_of"]
