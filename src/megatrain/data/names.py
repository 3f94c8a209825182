"""From what a config names to sources: files, names of a registry, a Hugging Face dataset.

Promise: takes milliseconds, and what is not there is told before anything is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.data.files import find_files
from megatrain.data.hub import HubDataset, check_hub, hub_source
from megatrain.data.registry import Registry
from megatrain.data.source import Source, files_source
from megatrain.errors import UserError

Shares = Sequence[str] | Mapping[str, float]
"""Names, or names with the weights of a mixture."""


@dataclass(frozen=True, kw_only=True)
class DataNames:
    """Data of one purpose; exactly one of the three is there."""

    files: Shares = ()
    """Files, folders, globs."""
    registered: Shares = ()
    """Entries of the registry."""
    registry_dir: str = "data"
    """Where dataset_info.json lies."""
    hub: HubDataset | None = None

    def __bool__(self) -> bool:
        return bool(self.files or self.registered or self.hub)


def check_names(names: DataNames) -> None:
    """See that everything is there, as far as that can be known without reading it.

    Raises:
        UserError: for a file, a name or a package that is not.
    """
    if names.hub is not None:
        check_hub(names.hub)
    elif names.registered:
        Registry(names.registry_dir).check([name for name, _ in _weighted(names.registered)])
    elif isinstance(names.files, Mapping):
        find_files([name for name, _ in _weighted(names.files)])
    else:
        find_files(names.files)


def find_sources(names: DataNames) -> list[Source]:
    """What to read, in the order of the names.

    Raises:
        UserError: for what is not there, or a dataset that cannot be loaded.
    """
    if names.hub is not None:
        return [hub_source(names.hub)]
    if names.registered:
        registry = Registry(names.registry_dir)
        return [registry.source(name, weight) for name, weight in _weighted(names.registered)]
    if not isinstance(names.files, Mapping):
        files = find_files(names.files)
        return [files_source(", ".join(map(str, files)), files)]
    return [files_source(name, find_files(name), weight) for name, weight in _weighted(names.files)]


def _weighted(names: Shares) -> list[tuple[str, str | None]]:
    if not isinstance(names, Mapping):
        twice = next((name for name in names if list(names).count(name) > 1), None)
        if twice is not None:
            raise UserError(
                asked=f"the data set '{twice}'",
                found="its name twice",
                change="name it once, or give weights: {NAME: 2, OTHER: 1}",
            )
        return [(name, None) for name in names]
    for name, weight in names.items():
        if not 0 < weight < float("inf"):
            raise UserError(
                asked=f"{name} with a weight of {weight}",
                found="no share of a mixture",
                change="give a number above 0, or leave it out",
            )
    return [(name, str(weight)) for name, weight in names.items()]
