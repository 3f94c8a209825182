"""Rows in, token rows out: files, formats, supervision, order."""

from megatrain.data.dataset import load_rows
from megatrain.data.formats import DataOptions
from megatrain.data.rows import DatasetStats, Row, TokenizedRows
from megatrain.data.sampler import StepSampler, split_rows
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
