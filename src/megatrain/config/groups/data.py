"""Keys that say which rows are trained on, and which of their tokens."""

from typing import Literal

from pydantic import Field, field_validator

from megatrain.config.groups.keys import Keys, check_count_or_share


class DataKeys(Keys):
    """Files, their format, supervision, order."""

    train_files: list[str] = Field(
        min_length=1,
        description="Files, folders or globs: .jsonl, .json, .txt, .csv, .tsv (all of them also"
        " as .gz, .bz2, .xz), .parquet, .arrow.",
    )
    eval_files: list[str] = Field(default_factory=list, description="Held-out files.")
    eval_split: float = Field(
        0.0, ge=0, description="Rows of train_files to hold out: a count, or a share below 1."
    )
    dataset_format: Literal[
        "auto", "text", "prompt_completion", "messages", "sharegpt", "alpaca", "tokens"
    ] = Field(
        "auto", description="Format of the records; auto looks at the columns of the first one."
    )
    prompt_column: str = Field("prompt", description="Column that holds the prompt.")
    completion_column: str = Field("completion", description="Column that holds the completion.")
    completion_only_loss: bool = Field(True, description="Do not train on the prompt.")
    assistant_only_loss: bool = Field(
        True, description="Train on the assistant's turns only (TRL's default is false)."
    )
    chat_template_path: str | None = Field(
        None, description="A .jinja file to use (and to save) instead of the model's chat template."
    )
    max_length: int = Field(1024, ge=2, description="Tokens per row; the rest is cut off.")
    shuffle: bool = Field(True, description="Permute the rows in each epoch, by seed.")

    @field_validator("eval_split")
    @classmethod
    def _split_is_a_count_or_a_share(cls, value: float) -> float:
        return check_count_or_share(value)

    @field_validator("chat_template_path")
    @classmethod
    def _is_a_template_file(cls, value: str | None) -> str | None:
        if value is not None and not value.endswith(".jinja"):
            raise ValueError(
                "give a file whose name ends in .jinja (what a tokenizer's chat_template.jinja"
                " needs beside it: add_special_tokens)"
            )
        return value
