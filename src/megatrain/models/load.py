"""From a model's directory to its blocks, and their weights one block at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers.utils import logging as transformers_logging

from megatrain.models.blocks import BlockModel
from megatrain.models.build import build_on_meta, read_config
from megatrain.models.hub import ModelFiles
from megatrain.models.packing_proof import prove_packing
from megatrain.models.parts import cut_blocks, in_parts
from megatrain.models.proof import prove, prove_parts
from megatrain.models.selection import Selection
from megatrain.models.source import GENERATION_CONFIG
from megatrain.models.split import split_model
from megatrain.models.vocabulary import (
    check_growth,
    grow_blocks,
    rows_needed,
    vocabulary_rows,
    with_rows,
)
from megatrain.models.weights import LoadReport, load_block_weights


@dataclass(frozen=True, kw_only=True)
class LoadedBlocks:
    """A model's blocks, and how their weights are read."""

    files: ModelFiles
    model: BlockModel
    stored: BlockModel
    """The blocks as the checkpoint holds them: whole layers, before the vocabulary grew."""

    def in_parts(self, parts: int) -> "LoadedBlocks":
        """The same with the experts of each layer in so many blocks.

        Raises:
            UserError: if that cannot be done, or is not exact.
        """
        prove_parts(self.model.config, parts)
        return replace(self, model=in_parts(self.model.whole, parts))

    @property
    def grown(self) -> str:
        """How the vocabulary grew, in words; empty if it did not."""
        if self.stored is self.model.whole:
            return ""
        before, after = (vocabulary_rows(each.hf_model) for each in (self.stored, self.model))
        return f"the vocabulary grew from {before} to {after} rows"

    def weights(
        self, report: LoadReport, *, seed: int = 0, complete: bool = False
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """(block index, tensors by full name), block by block; see `load_block_weights`."""
        source = load_block_weights(
            self.stored, self.files.weights, report, seed=seed, complete=complete
        )
        if self.stored is not self.model.whole:
            source = grow_blocks(self.stored, self.model.whole, source, seed=seed)
        return cut_blocks(self.model, source)


def load_blocks(
    files: ModelFiles,
    *,
    compute_dtype: str,
    selection: Selection | None = None,
    overrides: Mapping[str, Any] | None = None,
    num_tokens: int = 0,
    multiple_of: int | None = None,
    packing: bool = False,
) -> LoadedBlocks:
    """A model's blocks without their weights.

    Args:
        files: the model's.
        compute_dtype: "bfloat16" or "float32".
        selection: what is trained; everything by default.
        overrides: changes to its config.
        num_tokens: token ids that need a row in the embedding.
        multiple_of: round the number of rows up to a multiple of this.
        packing: rows are to hold several samples.

    Raises:
        UserError: if the model cannot be built, split, given more rows, or does not keep the
            samples of a row apart.
    """
    transformers_logging.disable_progress_bar()  # a bar for each block would drown our own
    config = read_config(
        files.directory,
        overrides=overrides,
        gguf_file=files.gguf_file,
    )
    built = build_on_meta(config, compute_dtype=compute_dtype)
    model = stored = split_model(built, compute_dtype=compute_dtype, selection=selection)
    rows = rows_needed(vocabulary_rows(built), num_tokens, multiple_of)
    if rows != vocabulary_rows(built):
        config = with_rows(config, rows)
        larger = build_on_meta(config, compute_dtype=compute_dtype)
        check_growth(built, larger)
        model = split_model(larger, compute_dtype=compute_dtype, selection=selection)
    prove(config, compute_dtype=compute_dtype)
    if packing:
        model.packing = prove_packing(config)
    generation = files.directory / GENERATION_CONFIG
    if files.gguf_file is None and generation.is_file():
        model.generation_config = generation.read_text(encoding="utf-8")
    return LoadedBlocks(files=files, model=model, stored=stored)
