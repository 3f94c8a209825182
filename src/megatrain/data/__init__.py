"""Rows in, token rows out: files, formats, supervision, order."""

from megatrain.data.cache import TokenCache, default_cache_dir
from megatrain.data.corpus import Corpus, load_corpus
from megatrain.data.formats import DataOptions
from megatrain.data.load import dataset_format, load_rows
from megatrain.data.mixture import MixtureOrder
from megatrain.data.names import DataNames, find_sources
from megatrain.data.packing import PackedSampler
from megatrain.data.rows import ChosenRows, DatasetStats, Row, TokenizedRows
from megatrain.data.sampler import StepSampler, split_rows
from megatrain.data.text_bytes import supervised_bytes
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
    "Corpus",
    "DataNames",
    "DataOptions",
    "DatasetStats",
    "MixtureOrder",
    "PackedSampler",
    "Row",
    "Sampler",
    "StepSampler",
    "TokenCache",
    "TokenizedRows",
    "dataset_format",
    "default_cache_dir",
    "extend_tokenizer",
    "find_sources",
    "load_corpus",
    "load_rows",
    "load_tokenizer",
    "num_token_ids",
    "special_token_ids",
    "split_rows",
    "supervised_bytes",
]
