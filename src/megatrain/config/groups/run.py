"""Keys of a run: what it writes and when, what it may use."""

from typing import Any, Literal

from pydantic import Field, field_validator

from megatrain.config.groups.keys import Keys, check_count_or_share, check_size
from megatrain.units import parse_bytes

LEAST_CHECKPOINT_MEMORY = 2**20
"""Bytes."""


class RunKeys(Keys):
    """Output, records, memory, devices."""

    output_dir: str = Field(description="Where checkpoints, the model and the log go.")
    overwrite_output_dir: bool = Field(False, description="Write over an earlier run there.")
    save_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="dtype of the saved model; auto: the compute dtype."
    )
    max_shard_size: str = Field("5GB", description="Largest weights file.")
    save_strategy: Literal["steps", "epoch", "no"] = Field(
        "steps",
        description="When checkpoints are written: every save_steps, or after each epoch, and in"
        " both cases after the last step; or never (the final model is written all the same).",
    )
    save_steps: float = Field(
        500.0, gt=0, description="Steps between checkpoints; below 1: a share of all steps."
    )
    save_total_limit: int | None = Field(
        None,
        ge=1,
        description="Checkpoints to keep, the best one among them; 1: the last and the best;"
        " default: all.",
    )
    save_only_model: bool = Field(
        False, description="Checkpoints without training state: only the weights, no resuming."
    )
    save_on_signal: Literal["auto"] | bool = Field(
        "auto",
        description="Write a checkpoint when SIGTERM or SIGINT ends the run; auto: for SIGTERM only"
        " if it is written within the 30 s that schedulers commonly leave.",
    )
    checkpoint_memory: str | None = Field(
        None,
        description="Memory for what is copied and not written yet while training goes on, such as"
        " 8GiB; default: the state of two blocks; more than holds a checkpoint is not taken.",
    )
    resume_from_checkpoint: bool | str | None = Field(
        None,
        description="auto: go on from the last whole checkpoint in output_dir, if there is one;"
        " true: the same, and it must be there; or a checkpoint's directory.",
    )
    seed: int = Field(42, ge=0, description="Key of order, initialisation and dropout.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where blocks are computed.")
    host_memory: str | None = Field(
        None, description="Host memory that the run may use, such as 100GiB; default: what is free."
    )
    disk_path: str | None = Field(
        None,
        description="Directory on a fast disk for the state of layers that host memory has no room"
        " for; nothing is left there. Default: no state lives on a disk.",
    )
    disk_memory: str | None = Field(
        None, description="Room that the run may use there, such as 2TiB; default: what is free."
    )
    gpu_memory: str | None = Field(
        None,
        description="GPU memory that the run may use, such as 24GiB; default: what is free. What is"
        " to spare holds state and activations that then need not be moved or computed again.",
    )
    offload: dict[str, Any] = Field(
        default_factory=dict,
        description="What to put where, in place of the planner's choice: resident, saved, spilled,"
        " disk, put_off, each all, a count or a list such as [embed, 0-3, head]; weight_slots,"
        " gradient_slots, waiting_slots, disk_slots. See [memory.md](memory.md#placing-by-hand).",
    )
    trace: str | None = Field(
        None,
        description="Write a trace of trace_steps steps to this file, which"
        " https://ui.perfetto.dev opens: what each lane did when.",
    )
    trace_steps: int | None = Field(
        None,
        ge=1,
        description="Steps in the trace, by default 2; a run's first steps are left out.",
    )
    torch_compile: bool | None = Field(
        None, description="Compile layers and loss; default: on a GPU, unless there is dropout."
    )
    full_determinism: bool = Field(
        False, description="Deterministic kernels on the GPU: the same bits in every run."
    )

    @field_validator(
        "max_shard_size", "host_memory", "disk_memory", "gpu_memory", "checkpoint_memory"
    )
    @classmethod
    def _is_a_size(cls, value: str | None) -> str | None:
        return check_size(value)

    @field_validator("save_strategy", mode="before")
    @classmethod
    def _names_no_choice_of_checkpoints(cls, value: object) -> object:
        if value == "best":
            raise ValueError("use load_best_model_at_end: true, which keeps the best checkpoint")
        return value

    @field_validator("checkpoint_memory")
    @classmethod
    def _holds_a_few_buffers(cls, value: str | None) -> str | None:
        if value is not None and parse_bytes(value) < LEAST_CHECKPOINT_MEMORY:
            raise ValueError("at least 1MiB")
        return value

    @field_validator("save_steps")
    @classmethod
    def _saves_by_a_count_or_a_share(cls, value: float) -> float:
        return check_count_or_share(value)
