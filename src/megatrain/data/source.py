"""One data set as it is named: its files, or what else it is read from, and its format."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.data.files import Record, read_records


@dataclass(frozen=True, kw_only=True)
class Source:
    """Records that become rows together."""

    name: str
    """For people."""
    files: tuple[Path, ...]
    """What it is read from; their content and `variant` are all that the records depend on."""
    weight: str | None = None
    """Share of a mixture, as written; None if it is no part of one."""
    format: str | None = None
    """One of `formats.FORMATS`; None: as the options say."""
    variant: Any = None
    """What else the records depend on, as JSON."""
    adapt: Callable[[Record], Record] | None = None
    """From a record as it stands in the file to one of the format."""
    read: Callable[[], Iterable[dict[str, Any]]] | None = None
    """Records that are read in another way than `read_records` does."""

    def records(self) -> Iterator[Record]:
        """All of them, in their order."""
        for record in self._as_they_stand():
            yield record if self.adapt is None else self.adapt(record)

    def _as_they_stand(self) -> Iterator[Record]:
        if self.read is None:
            for file in self.files:
                yield from read_records(file)
            return
        for number, value in enumerate(self.read()):
            yield Record(value=value, place=f"{self.name}:row {number}")


def files_source(name: str, files: Iterable[Path], weight: str | None = None) -> Source:
    """Files whose format the options say or their first record shows."""
    return Source(name=name, files=tuple(files), weight=weight)
