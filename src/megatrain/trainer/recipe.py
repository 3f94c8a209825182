"""`megatrain train CONFIG.yaml --recipe`: what is known for such a run, as lines to paste.

Promise: it changes and trains nothing, and every number stands beside its source.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatrain.config import TrainConfig
from megatrain.data import DataOptions, dataset_format, find_sources
from megatrain.models import build_on_meta, read_config
from megatrain.models.active import EXPERT, params_without_embeddings
from megatrain.models.hub import find_model
from megatrain.preflight import find_gguf
from megatrain.trainer.pasting import in_brief, lines_to_paste, short, title
from megatrain.trainer.published import (
    CHINCHILLA,
    STEP_LAW,
    STEP_LAW_PARAMS,
    STEP_LAW_TOKENS,
    Job,
    PublishedRun,
    deepseek_law,
    published_runs,
    step_law,
)

SAME_SIZE, IN_REACH = 1.5, 4.0
"""Factors between two sizes: what counts as the same, and from where on a source says nothing."""
DISAGREEMENT = 2.0
"""Factor between learning rates from which on it is told."""
SUPERVISION = {"labels", "completion_mask", "assistant_masks"}
"""Columns of tokenised records that leave tokens out of the loss."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run, as far as sources are asked about it."""

    config: TrainConfig
    job: Job
    params: int
    """Without embeddings."""

    @property
    def tokens(self) -> float:
        """Of the whole run: at most so many if max_steps is given, else what suits the size."""
        config = self.config
        if config.max_steps <= 0:
            return CHINCHILLA * self.params
        step = config.tokens_per_step or config.rows_per_step() * config.max_length
        return config.max_steps * step

    def apart(self, run: PublishedRun) -> float:
        """Factor between the sizes."""
        return max(run.params, self.params) / min(run.params, self.params)


def advise(config: TrainConfig) -> Iterator[str]:
    """YAML; whatever is no line to paste is a comment.

    Raises:
        UserError: for data or a model that is not there.
    """
    job = job_of(config)
    params, has_experts = model_size(config)
    yield f"# {config.model_name_or_path}, {short(params)} parameters without embeddings:"
    yield f"# {job.in_words()}. Nothing is trained or changed."
    if has_experts:
        yield "# Nothing is known here for mixtures of experts: all sources are of dense models."
        return
    if config.trainable or config.frozen:
        yield "# The sources trained all parameters; this config does not."
    yield from _answer(Question(config=config, job=job, params=params))


def job_of(config: TrainConfig) -> Job:
    """By `model_init`, then by the format of the data, of which a record is read if it must be.

    Raises:
        UserError: for data that is not there, or of no format.
    """
    if config.model_init == "random":
        return Job.SCRATCH
    options = DataOptions(
        format=config.dataset_format,
        prompt_column=config.prompt_column,
        completion_column=config.completion_column,
        text_column=config.dataset_text_field,
    )
    for source in find_sources(config.train_names()):
        found = dataset_format(source, options)
        if found == "tokens":
            first = next(iter(source.records()), None)
            found = "text" if first is None or not SUPERVISION & set(first.value) else "messages"
        if found != "text":
            return Job.FINE_TUNING
    return Job.CONTINUED


def model_size(config: TrainConfig) -> tuple[int, bool]:
    """Parameters without embeddings, and whether some are experts; no weights are read.

    Raises:
        UserError: for a model that is not there, or cannot be built.
    """
    name, gguf_file = find_gguf(config.model_name_or_path, config.gguf_file)
    files = find_model(
        name, gguf_file=gguf_file, revision=config.model_revision, cache_dir=config.cache_dir
    )
    shape = read_config(
        files.directory, overrides=config.config_overrides, gguf_file=files.gguf_file
    )
    model = build_on_meta(shape, compute_dtype="float32")
    has_experts = any(EXPERT.fullmatch(name) for name, _ in model.named_parameters())
    return params_without_embeddings(model), has_experts


def _answer(question: Question) -> Iterator[str]:
    runs = [run for run in published_runs() if run.job is question.job]
    runs.sort(key=question.apart)
    known = [run for run in runs if question.apart(run) <= IN_REACH]
    chosen = choose(question, known)
    if question.job is Job.SCRATCH:
        yield from _about_laws(question)
        laws = (law(question.params, question.tokens) for law in (step_law, deepseek_law))
        known += [law for law in laws if law is not None]
    if chosen is None:
        nearest = title(runs[0])
        yield f"# Nothing to paste: no run of this size is known here, the nearest is {nearest}."
    else:
        yield "#"
        yield from lines_to_paste(chosen, question.config)
    others = [run for run in known if chosen is None or run.name != chosen.name]
    if others:
        yield "#"
        yield "# Others:"
        yield from (f"#   {in_brief(run)}" for run in others)
    rates = [run.keys["learning_rate"] for run in known]
    if rates and max(rates) >= DISAGREEMENT * min(rates):
        yield f"# Their rates differ by a factor of {max(rates) / min(rates):.2g}: try several."
    if question.job is Job.CONTINUED and chosen is not None:
        yield "# A higher rate learns more of the data and forgets more of what was known before"
        yield "# (Ibrahim et al. 2024, arXiv:2403.08763)."


def choose(question: Question, in_reach: Sequence[PublishedRun]) -> PublishedRun | None:
    """Step Law where it was fitted; else the newest run of this size; else the nearest in reach.

    Of runs of this size those that say what a step held go first.
    """
    law = step_law(question.params, question.tokens) if question.job is Job.SCRATCH else None
    if law is not None and question.config.max_steps > 0:
        steps = round(question.tokens / law.keys["tokens_per_step"])  # for the same tokens
        return replace(law, keys={**law.keys, "max_steps": steps})
    if law is not None:
        return law
    alike = [run for run in in_reach if question.apart(run) <= SAME_SIZE]
    if alike:
        return max(alike, key=lambda run: (run.names_its_step, run.year))
    return in_reach[0] if in_reach else None


def _about_laws(question: Question) -> Iterator[str]:
    tokens = f"# Laws are asked for {short(question.tokens)} tokens"
    if question.config.max_steps > 0:
        yield f"{tokens}, as many as max_steps has at most."
    else:
        yield f"{tokens}, {CHINCHILLA} a parameter (Hoffmann et al. 2022, arXiv:2203.15556);"
        yield "# with max_steps for those of the run."
    if step_law(question.params, question.tokens) is None:
        params, fitted = (
            " to ".join(map(short, both)) for both in (STEP_LAW_PARAMS, STEP_LAW_TOKENS)
        )
        yield f"# Step Law ({STEP_LAW}) is of {params} parameters and {fitted} tokens."
