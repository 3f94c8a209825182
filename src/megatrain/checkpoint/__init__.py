"""Models on disk."""

from megatrain.checkpoint.export import save_model

__all__ = ["save_model"]
