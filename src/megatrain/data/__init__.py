"""Rows in, token rows out: files, formats, supervision, order."""

from megatrain.data.dataset import load_rows
from megatrain.data.formats import DataOptions
from megatrain.data.packing import PackedSampler
from megatrain.data.rows import ChosenRows, DatasetStats, Row, TokenizedRows
from megatrain.data.sampler import StepSampler, split_rows
from megatrain.data.tokenizer import (
    extend_tokenizer,
    load_tokenizer,
    num_token_ids,
    special_token_ids,
)

Sampler = StepSampler | PackedSampler
"""Which rows a step takes."""

__all__ = [
    "ChosenRows",
    "DataOptions",
    "DatasetStats",
    "PackedSampler",
    "Row",
    "Sampler",
    "StepSampler",
    "TokenizedRows",
    "extend_tokenizer",
    "load_rows",
    "load_tokenizer",
    "num_token_ids",
    "special_token_ids",
    "split_rows",
]
