"""How good a model is on held-out rows."""

from megatrain.evaluation.perplexity import (
    MICRO_BATCHES_A_PASS,
    EvalResult,
    evaluate_rows,
    total,
)

__all__ = ["MICRO_BATCHES_A_PASS", "EvalResult", "evaluate_rows", "total"]
