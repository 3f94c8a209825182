"""Rows in, token rows out: files, formats, supervision, order."""

from megatrain.data.dataset import DataOptions, DatasetStats, TokenizedRows, load_rows, split_rows
from megatrain.data.rows import Row
from megatrain.data.sampler import StepSampler
from megatrain.data.tokenizer import load_tokenizer

__all__ = [
    "DataOptions",
    "DatasetStats",
    "Row",
    "StepSampler",
    "TokenizedRows",
    "load_rows",
    "load_tokenizer",
    "split_rows",
]
