"""What a process can get of the host, read from files of /proc and /sys as systems have them."""

from pathlib import Path

import pytest

from megatrain.planner.host import host_memory, more_than_there_is

GIB = 2**30
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max data size             {data:<20} unlimited            bytes
Max locked memory         65536                65536                bytes
Max address space         {space:<20} unlimited            bytes
"""
V2 = "31 23 0:28 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}".rstrip("\n") + "\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """64 GiB, 40 of them free; no limits."""
    write(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {40 * 2**20} kB",
            "proc/self/limits": LIMITS.format(data="unlimited", space="unlimited"),
            "proc/self/status": f"Name:\tpython\nVmSize:\t{6 * 2**20} kB\nVmData:\t{2 * 2**20} kB",
            "proc/self/mountinfo": V2.format(top="/"),
            "proc/self/cgroup": "0::/",
        },
    )
    return tmp_path


def group(limit: object, used: int, cache: int = 0, *, v1: bool = False) -> dict[str, object]:
    idle = "total_inactive_file" if v1 else "inactive_file"
    names = ("limit_in_bytes", "usage_in_bytes") if v1 else ("max", "current")
    return {
        f"memory.{names[0]}": limit,
        f"memory.{names[1]}": used,
        "memory.stat": f"anon 1\n{idle} {cache}",
    }


def place(root: Path, folder: str, files: dict[str, object]) -> None:
    write(root / "sys/fs/cgroup" / folder, files)


def test_without_limits_it_is_what_other_processes_leave(root: Path) -> None:
    found = host_memory(root)
    assert (found.nbytes, found.in_words()) == (40 * GIB, "is free")
    place(root, "", {"cgroup.procs": 1})
    assert host_memory(root) == found


@pytest.mark.parametrize("outer", [9, 30])
def test_own_group_and_those_above_it(root: Path, outer: int) -> None:
    write(root, {"proc/self/cgroup": "0::/jobs/7"})
    place(root, "jobs/7", group(12 * GIB, 5 * GIB, 3 * GIB))
    place(root, "jobs", group(outer * GIB, 5 * GIB))
    place(root, "", {"memory.max": "max", "memory.current": 1})
    found = host_memory(root)
    expected = {9: (4 * GIB, "/jobs"), 30: (10 * GIB, "/jobs/7")}[outer]
    assert (found.nbytes, found.bound.rpartition(" ")[2]) == expected
    assert found.in_words().startswith("is left by memory.max of control group /jobs")


def test_a_group_that_is_slowed_down_is_full(root: Path) -> None:
    place(root, "", group("max", 5 * GIB) | {"memory.high": 8 * GIB})
    assert host_memory(root).nbytes == 3 * GIB


@pytest.mark.parametrize(
    ("top", "own"),
    [("/", "/slurm/job"), ("/docker/ab", "/docker/ab/slurm/job"), ("/docker/ab", "/elsewhere")],
)
def test_version_1_and_containers_that_see_the_machines_paths(
    root: Path, top: str, own: str
) -> None:
    mounts = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n" + V1.format(top=top)
    write(
        root,
        {
            "proc/self/cgroup": f"4:cpu,memory:{own}\n1:name=systemd:/\n0::/",
            "proc/self/mountinfo": mounts,
        },
    )
    place(root, "memory", group(20 * GIB, 4 * GIB, GIB, v1=True))
    place(root, "memory/slurm/job", group(9223372036854771712, GIB, v1=True))
    assert host_memory(root).nbytes == 17 * GIB
    place(root, "memory/slurm/job", group(6 * GIB, GIB, v1=True))
    inside = own != "/elsewhere"
    assert host_memory(root).nbytes == (5 * GIB if inside else 17 * GIB)


def test_a_group_over_its_limit_has_nothing_left(root: Path) -> None:
    place(root, "", group(2 * GIB, 3 * GIB))
    assert host_memory(root).nbytes == 0


@pytest.mark.parametrize(
    ("limits", "expected", "how"),
    [
        ({"data": "unlimited", "space": 10 * GIB}, 4 * GIB, "ulimit -v"),
        ({"data": 10 * GIB, "space": 100 * GIB}, 8 * GIB, "ulimit -d"),
    ],
)
def test_limits_of_the_process(
    root: Path, limits: dict[str, object], expected: int, how: str
) -> None:
    write(root, {"proc/self/limits": LIMITS.format(**limits)})
    found = host_memory(root)
    assert found.nbytes == expected and how in found.in_words()


def test_where_there_is_no_proc(tmp_path: Path) -> None:
    assert host_memory(tmp_path).nbytes > 0


def test_this_machine_is_read() -> None:
    assert 0 < host_memory().nbytes < 2**50


def test_more_than_can_be_seen_is_told_and_not_refused(root: Path) -> None:
    assert more_than_there_is(40 * GIB, root) is None
    said = more_than_there_is(50 * GIB, root)
    assert said is not None and "50.00 GiB of host memory, and 40.00 GiB is free now" in said
