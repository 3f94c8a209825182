"""What a model that is only read can tell: loss on rows, scores on tasks, text."""

from megatrain.evaluation.perplexity import (
    MICRO_BATCHES_A_PASS,
    EvalResult,
    evaluate_rows,
    total,
)

__all__ = ["MICRO_BATCHES_A_PASS", "EvalResult", "evaluate_rows", "total"]
