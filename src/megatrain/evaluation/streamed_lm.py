"""lm_eval's own model class over streamed blocks, so that a model larger than the GPU is scored.

Tokens, truncation, stop sequences and chat templates are those of `lm_eval --model hf`, whose class
this is.  Log-likelihoods come from the engine: weights are fetched once for several batches, only
the positions asked for go through the head, and contexts that differ in the last token of their
continuation alone are computed once.  Generation is transformers' own over streamed layers.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from megatrain.engine import Engine, Query
from megatrain.evaluation.perplexity import MICRO_BATCHES_A_PASS

Request = tuple[Any, list[int], list[int]]
"""What lm_eval caches the answer under (None: nothing), context, continuation."""
Score = tuple[float, bool]
"""Log-likelihood of the continuation, and whether it is what greedy decoding gives."""


class StreamedLM(HFLM):  # type: ignore[misc]
    """A `TemplateLM`.

    Args:
        engine: scores rows.
        whole: gives the transformers model for generation.
        tokenizer: the model's.
        batch_size: rows that are computed at a time.
        max_length: tokens of context and continuation; None: as the model's config says.
    """

    def __init__(
        self,
        engine: Engine,
        whole: Callable[[], AbstractContextManager[Any]],
        tokenizer: Any,
        *,
        batch_size: int,
        max_length: int | None,
    ) -> None:
        self._engine, self._whole = engine, whole
        with whole() as hf_model:
            super().__init__(
                pretrained=hf_model,
                backend="causal",
                tokenizer=tokenizer,
                batch_size=batch_size,
                max_length=max_length,
            )

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole():
            return super()._model_generate(*args, **kwargs)

    def _model_call(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole():
            return super()._model_call(*args, **kwargs)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Score]:
        del override_bs  # the engine's batches decide
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            ids = (context + continuation)[-(self.max_length + 1) :][:-1]
            groups.setdefault(tuple(ids), []).append(number)
        # The longest first, so that rows of a batch are of like length and memory runs out at once.
        order = sorted(groups, key=lambda ids: (-len(ids), ids))
        scores: dict[int, Score] = {}
        rows_a_pass = self.batch_size * MICRO_BATCHES_A_PASS
        with tqdm(
            total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests"
        ) as bar:
            for start in range(0, len(order), rows_a_pass):
                chosen = order[start : start + rows_a_pass]
                found = self._score({ids: groups[ids] for ids in chosen}, requests)
                for number, score in found.items():
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], score)
                scores |= found
                bar.update(len(found))
        return [scores[number] for number in range(len(requests))]

    def _score(
        self, groups: dict[tuple[int, ...], list[int]], requests: Sequence[Request]
    ) -> dict[int, Score]:
        """By number: one pass over some rows, each with the requests that it answers."""
        queries = []
        for ids, numbers in groups.items():
            wanted = [np.asarray(requests[number][2], dtype=np.int64) for number in numbers]
            places = [np.arange(len(ids) - len(each), len(ids)) for each in wanted]
            queries.append(
                Query(
                    input_ids=np.asarray(ids, dtype=np.int64),
                    positions=np.concatenate(places),
                    targets=np.concatenate(wanted),
                )
            )
        scores = {}
        for numbers, answer in zip(groups.values(), self._engine.answer(queries), strict=True):
            stop = 0
            for number in numbers:
                start, stop = stop, stop + len(requests[number][2])
                likelihood = answer.log_probabilities[start:stop].sum(dtype=np.float64)
                scores[number] = float(likelihood), bool(answer.likeliest[start:stop].all())
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        windows: list[Request] = []
        starts = []
        for request in requests:
            starts.append(len(windows))
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
        each = [likelihood for likelihood, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        totals = []
        for request, start, stop in zip(requests, starts, [*starts[1:], len(windows)], strict=True):
            totals.append(sum(each[start:stop]))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals
