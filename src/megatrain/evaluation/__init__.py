"""How good a model is on held-out rows."""

from megatrain.evaluation.perplexity import EvalResult, evaluate_rows

__all__ = ["EvalResult", "evaluate_rows"]
