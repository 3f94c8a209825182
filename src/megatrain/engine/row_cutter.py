"""Rows of a step or an evaluation: checked against the model, and cut into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatrain.data import Row
from megatrain.engine.microbatch import MicroBatch, make_micro_batch, split_rows
from megatrain.engine.options import EngineOptions, padding_of, split_of
from megatrain.errors import UserError
from megatrain.models import BlockModel


@dataclass(frozen=True, kw_only=True)
class RowCutter:
    """Cuts rows as the options say."""

    model: BlockModel
    options: EngineOptions
    device: torch.device

    def __call__(self, rows: Sequence[Row], *, training: bool) -> list[MicroBatch]:
        """Micro-batches of rows.

        Raises:
            UserError: for rows that this model cannot be given.
        """
        if not rows or any(len(row.input_ids) == 0 for row in rows):
            raise UserError(
                asked=f"a step over {len(rows)} rows",
                found="no rows, or a row of zero tokens",
                change="give at least one row, each with at least one token",
            )
        self._check_ids(rows)
        self._check_packed(rows)
        padding = padding_of(self.model, self.options)
        # Rows of a step with dropout run one by one: randomness is keyed by row.
        alone = training and self.model.random
        rows_per_micro, tokens_per_micro = split_of(self.options, len(rows), alone=alone)
        groups = split_rows(
            rows,
            rows_per_micro=rows_per_micro,
            tokens_per_micro=tokens_per_micro,
            padding=padding,
        )
        batches, first = [], 0
        for group in groups:
            length = padding.length(max(len(row.input_ids) for row in group))
            full = rows_per_micro if tokens_per_micro is None else tokens_per_micro // length
            shape = padding.rows(len(group), full), length
            batches.append(make_micro_batch(group, first, self.device, shape))
            first += len(group)
        return batches

    def _check_ids(self, rows: Sequence[Row]) -> None:
        vocab_size = self.model.vocab_size
        highest = max(int(row.input_ids.max()) for row in rows)
        lowest = min(int(row.input_ids.min()) for row in rows)
        if lowest < 0 or highest >= vocab_size:
            raise UserError(
                asked=f"a step over {len(rows)} rows",
                found=f"token ids from {lowest} to {highest}, a vocabulary of {vocab_size}",
                change="use the model's own tokenizer",
            )

    def _check_packed(self, rows: Sequence[Row]) -> None:
        packed = [(row, row.positions) for row in rows if row.positions is not None]
        asked = f"a step over {len(rows)} rows, {len(packed)} of them packed"
        if packed and self.model.packing is None:
            raise UserError(
                asked=asked,
                found="a model of which it is not proved that it keeps the samples of a row apart",
                change="load it with packing=True, or give rows of one sample",
            )
        if any(row.weights[1:][positions[1:] == 0].any() for row, positions in packed):
            raise UserError(
                asked=asked,
                found="a weight on the first token of a sample, which nothing predicts",
                change="set it to 0, as megatrain.data.packing.joined does",
            )
