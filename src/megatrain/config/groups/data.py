"""Keys that say which rows are trained on, and which of their tokens."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from megatrain.config.groups.keys import Keys, check_count_or_share

LONGEST_PACKED_ROW = 8192
"""Tokens.  The mask that keeps samples apart has a byte for each pair of them: 64 MiB a row at this
length, for each kind of attention that a model has."""
TRAIN = ("train_files", "dataset", "dataset_name")
HELD_OUT = ("eval_files", "eval_dataset", "eval_split", "dataset_test_split")
"""Keys of which one says what is held out, if anything is."""


class DataKeys(Keys):
    """Files, their format, supervision, order."""

    train_files: list[str] | dict[str, float] = Field(
        default_factory=list,
        description="Files, folders or globs: .jsonl, .json, .txt, .csv, .tsv (all of them also"
        " as .gz, .bz2, .xz), .parquet, .arrow. With weights, {PATH: 0.7, OTHER: 0.3}, a mixture.",
    )
    eval_files: list[str] = Field(default_factory=list, description="Held-out files.")
    dataset: list[str] | dict[str, float] = Field(
        default_factory=list,
        description="Names in dataset_info.json, LLaMA-Factory's registry, instead of train_files;"
        " with weights a mixture.",
    )
    eval_dataset: list[str] = Field(
        default_factory=list, description="Names in the registry to hold out."
    )
    dataset_dir: str = Field("data", description="Folder of dataset_info.json and its files.")
    dataset_name: str | None = Field(
        None,
        description="A dataset of the Hugging Face Hub, or its directory, instead of train_files;"
        " needs the datasets package.",
    )
    dataset_config: str | None = Field(None, description="Config of dataset_name.")
    dataset_train_split: str = Field("train", description="Split of dataset_name to train on.")
    dataset_test_split: str | None = Field(
        None, description="Split of dataset_name to hold out (TRL's default is test)."
    )
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = Field(
        "first_exhausted",
        description="An epoch of a mixture ends when the first of its parts has given as many rows"
        " as it has, or when the last has, the others then more than once.",
    )
    eval_split: float = Field(
        0.0, ge=0, description="Rows of the training data to hold out: a count, or a share below 1."
    )
    dataset_format: Literal[
        "auto", "text", "prompt_completion", "messages", "sharegpt", "alpaca", "tokens"
    ] = Field(
        "auto", description="Format of the records; auto looks at the columns of the first one."
    )
    prompt_column: str = Field("prompt", description="Column that holds the prompt.")
    completion_column: str = Field("completion", description="Column that holds the completion.")
    dataset_text_field: str = Field(
        "text", description="Column that holds the text; .txt files have no columns."
    )
    completion_only_loss: bool = Field(True, description="Do not train on the prompt.")
    assistant_only_loss: bool = Field(
        True, description="Train on the assistant's turns only (TRL's default is false)."
    )
    chat_template_path: str | None = Field(
        None, description="A .jinja file to use (and to save) instead of the model's chat template."
    )
    max_length: int = Field(
        1024, ge=2, description="Tokens per row; a longer text becomes several rows."
    )
    excess_length_strategy: Literal["truncate", "drop", "error"] = Field(
        "truncate",
        description="What becomes of rows longer than max_length: the rest is cut off, they are"
        " left out (both are counted), or they are an error.",
    )
    dataset_cache_dir: str | None = Field(
        None,
        description="Where tokenised rows are kept; default: ~/.cache/megatrain/tokens, or"
        " megatrain/tokens in $XDG_CACHE_HOME.",
    )
    dataset_num_proc: int | None = Field(
        None,
        ge=1,
        description="Processes that tokenise; default: one for 4 MiB of files, up to 16 or the"
        " number of cores.",
    )
    packing: bool = Field(
        False,
        description="Fill rows with whole samples, best-fit, each kept apart from the others; batch"
        " sizes then count packed rows. Held-out rows are not packed.",
    )
    shuffle: bool = Field(True, description="Permute the rows in each epoch, by seed.")

    @field_validator("eval_split")
    @classmethod
    def _split_is_a_count_or_a_share(cls, value: float) -> float:
        return check_count_or_share(value)

    @field_validator("max_length", mode="before")
    @classmethod
    def _is_a_length(cls, value: object) -> object:
        if value is None:
            raise ValueError("rows have a longest length here, without which TRL can do: give one")
        return value

    @field_validator("chat_template_path")
    @classmethod
    def _is_a_template_file(cls, value: str | None) -> str | None:
        if value is not None and not value.endswith(".jinja"):
            raise ValueError(
                "give a file whose name ends in .jinja (what a tokenizer's chat_template.jinja"
                " needs beside it: add_special_tokens)"
            )
        return value

    @model_validator(mode="after")
    def _names_its_data_once(self) -> "DataKeys":
        named = [key for key in TRAIN if getattr(self, key)]
        if len(named) != 1:
            found = f"there is {' and '.join(named)}" if named else "there is none"
            raise ValueError(f"one of {', '.join(TRAIN)} is needed: {found}")
        held_out = [key for key in HELD_OUT if getattr(self, key)]
        if len(held_out) > 1:
            raise ValueError(f"{' and '.join(held_out)} exclude each other")
        return self

    @model_validator(mode="after")
    def _has_use_for_every_data_key(self) -> "DataKeys":
        changed = {
            name
            for name, info in DataKeys.model_fields.items()
            if getattr(self, name) != info.get_default(call_default_factory=True)
        }
        said = changed & {
            "dataset_format",
            "prompt_column",
            "completion_column",
            "dataset_text_field",
        }
        if self.dataset and said:
            raise ValueError(f"{min(said)} is what dataset_info.json says of a dataset: remove it")
        if self.dataset_name is None:
            for key in ("dataset_config", "dataset_train_split", "dataset_test_split"):
                if key in changed:
                    raise ValueError(f"{key} needs dataset_name")
        if "dataset_dir" in changed and not (self.dataset or self.eval_dataset):
            raise ValueError("dataset_dir needs dataset or eval_dataset")
        mixes = isinstance(self.train_files, dict) or isinstance(self.dataset, dict)
        if "stopping_strategy" in changed and not mixes:
            raise ValueError("stopping_strategy needs weights in train_files or dataset")
        return self

    @model_validator(mode="after")
    def _packed_rows_have_room_for_their_mask(self) -> "DataKeys":
        if self.packing and self.max_length > LONGEST_PACKED_ROW:
            mib = self.max_length**2 / 2**20
            raise ValueError(
                f"packing keeps samples apart with a mask, of {mib:,.0f} MiB for a row of"
                f" {self.max_length} tokens: set max_length to {LONGEST_PACKED_ROW} or less, or"
                " packing: false"
            )
        return self
