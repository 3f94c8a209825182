"""A dataset by its Hugging Face name, through the `datasets` library.

Names, configs and splits are those of `datasets.load_dataset`; a local directory of a dataset is
a name, too.  The rows depend on the arrow files that the library made and on the split.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatrain.data.source import Source
from megatrain.errors import UserError


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """What to load; the fields are `load_dataset`'s."""

    name: str
    config: str | None = None
    split: str = "train"

    @property
    def words(self) -> str:
        """For people."""
        config = "" if self.config is None else f", config {self.config}"
        return f"{self.name}{config}, split {self.split}"


def check_hub(dataset: HubDataset) -> None:
    """See that the library is there.

    Raises:
        UserError: if it is not.
    """
    if find_spec("datasets") is None:
        raise UserError(
            asked=f"the dataset {dataset.name}",
            found="no datasets package, which loads it",
            change="install it (pip install 'megatrain[datasets]'), or name files in train_files",
        )


def hub_source(dataset: HubDataset) -> Source:
    """Load it, from the network or from the library's own cache.

    Raises:
        UserError: without the library, or with what the library says of a name, config or split
            that is not there.
    """
    check_hub(dataset)
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        loaded: Any = datasets.load_dataset(dataset.name, dataset.config, split=dataset.split)
    except (DatasetsError, OSError, ValueError, ImportError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            asked=f"the dataset {dataset.words}",
            found=" ".join(lines[:2]).strip().rstrip("."),
            change="check dataset_name, dataset_config and the split, and the network"
            " (HF_HUB_OFFLINE=1 takes what was loaded before)",
        ) from error
    return Source(
        name=dataset.words,
        files=tuple(Path(each["filename"]) for each in loaded.cache_files),
        variant={"split": dataset.split, "rows": len(loaded), "columns": loaded.column_names},
        read=lambda: loaded,
    )
