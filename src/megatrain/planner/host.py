"""How much host memory this process can still get, and what sets that bound.

The least of: what the machine has free (MemAvailable: other processes' memory is gone, the page
cache is not); what each control group that the process is in, and each above it, leaves (v1 and
v2); what `ulimit` leaves of address space or data.  Swap does not count.

Not here: the limit of page-locked memory (`ulimit -l`).  NVIDIA's driver does not look at it
(docs/log.md); what it refuses is told before the first step.  Nor memory that a virtual machine
shows only once it is used: nothing here tells of it, so `host_memory` may ask for more.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatrain.units import format_bytes

ROOT = Path("/")
LIMITS = {"Max address space": ("VmSize", "ulimit -v"), "Max data size": ("VmData", "ulimit -d")}
"""Line of /proc/self/limits -> (what counts against it in /proc/self/status, how it is set)."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes that are to be had, and why not more."""

    nbytes: int
    bound: str
    """In words, such as "the memory limit of control group /jobs/7"."""

    def in_words(self) -> str:
        """Behind a size."""
        return "is free" if self.bound == FREE else f"is left by {self.bound}"


FREE = "the machine's free memory"


def host_memory(root: Path = ROOT) -> HostMemory:
    """What this process can still get.

    Args:
        root: where /proc and /sys are.
    """
    bounds = (_machine(root), *_process_limits(root), *_control_groups(root))
    least = min(bounds, key=lambda bound: bound.nbytes)
    return HostMemory(nbytes=max(least.nbytes, 0), bound=least.bound)


def available_host_bytes() -> int:
    """The same, without why."""
    return host_memory().nbytes


def more_than_there_is(nbytes: int, root: Path = ROOT) -> str | None:
    """What to say of a run that `host_memory` allows, and for which this much is not to be seen.

    It is not refused: a virtual machine may be given its memory only as it uses it.
    """
    there = host_memory(root)
    if nbytes <= there.nbytes:
        return None
    return (
        f"note: {format_bytes(nbytes)} of host memory, and {format_bytes(there.nbytes)}"
        f" {there.in_words()} now: if no more comes while the run takes it, the system will kill it"
    )


def _machine(root: Path) -> HostMemory:
    found = _fields(root / "proc/meminfo").get("MemAvailable")
    if found is None:  # such as on macOS
        return HostMemory(nbytes=int(psutil.virtual_memory().available), bound=FREE)
    return HostMemory(nbytes=found, bound=FREE)


def _process_limits(root: Path) -> Iterator[HostMemory]:
    used = _fields(root / "proc/self/status")
    for line in _lines(root / "proc/self/limits"):
        name, soft = line[:26].strip(), line[26:].split()[:1]
        counted, how = LIMITS.get(name, ("", ""))
        if counted in used and soft != ["unlimited"]:
            bound = f"the limit of the process ({how})"
            yield HostMemory(nbytes=int(soft[0]) - used[counted], bound=bound)


def _control_groups(root: Path) -> Iterator[HostMemory]:
    """Of every group from the process's own to the one at the mount point."""
    groups = {}  # controllers -> path of the group
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        groups[controllers] = path
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        top, mount = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2" and "" in groups:
            group = groups[""]
        elif kind == "cgroup" and "memory" in options.split(","):
            group = next((g for names, g in groups.items() if "memory" in names.split(",")), "/")
        else:
            continue
        inside = Path(group)
        # Of a container that sees the machine's path but not its groups: the top is its own.
        known = inside.is_relative_to(top) and ".." not in inside.parts
        relative = inside.relative_to(top) if known else Path()
        for each in (relative, *relative.parents):
            yield from _group(root / mount.lstrip("/") / each, name=f"/{each}".rstrip("."))


def _group(folder: Path, *, name: str) -> Iterator[HostMemory]:
    """One of either version; its page cache that nobody uses can be had, as for kubelet."""
    for limit, used, idle in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.high", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        text, current = ("".join(_lines(folder / file)).strip() for file in (limit, used))
        if not text.isdigit() or not current.isdigit():  # "max", or no such file
            continue
        stat = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
        yield HostMemory(
            nbytes=int(text) - int(current) + int(stat.get(idle, 0)),
            bound=f"{limit} of control group {name}",
        )


def _fields(path: Path) -> dict[str, int]:
    """Bytes by name, of lines such as `MemAvailable:  24037960 kB`."""
    found = {}
    for line in _lines(path):
        name, _, rest = line.partition(":")
        match rest.split():
            case [number, "kB"]:
                found[name] = int(number) * 1024
    return found


def _lines(path: Path) -> list[str]:
    """None where there is no such file."""
    return path.read_text().splitlines() if path.is_file() else []
