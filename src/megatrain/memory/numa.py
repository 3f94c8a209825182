"""Host memory on a machine of several NUMA nodes (sockets): pages dealt out over them in turn.

By default a page lies on the node of the thread that touches it first: whole blocks, or all of
them if one thread loads the model, lie on one node, and their update waits for that node's memory
alone.  Dealt out, an update reads and writes every node's memory, whichever threads run it, so none
is bound.  Price: of two nodes half of the accesses cross between sockets.

On one node nothing is done, nor where the process has a policy of its own (`numactl`).
See mbind(2) and the kernel's Documentation/admin-guide/mm/numa_memory_policy.rst.
"""

import ctypes
import errno
import os
import platform
from collections.abc import Collection
from pathlib import Path

NODES = Path("/sys/devices/system/node")
MBIND = {"x86_64": 237, "aarch64": 235}
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
"""Numbers of system calls, for which the C library has no functions."""
MPOL_DEFAULT, MPOL_INTERLEAVE = 0, 3
LONG_BITS = 64


def usable_nodes(root: Path = NODES, cores: Collection[int] | None = None) -> tuple[int, ...]:
    """Nodes with memory and with cores that this process may use.

    Memory without cores is left out: it is a GPU's (GH200) or slower (CXL).

    Args:
        root: where the kernel describes nodes.
        cores: those that may be used; None for this thread's affinity.
    """
    ours = os.sched_getaffinity(0) if cores is None else cores
    with_memory = root / "has_memory"
    nodes = _numbers(with_memory) if with_memory.is_file() else set()  # none: no NUMA in the kernel
    return tuple(
        node
        for node in sorted(nodes)
        if not _numbers(root / f"node{node}" / "cpulist").isdisjoint(ours)
    )


def interleave(address: int, nbytes: int, nodes: Collection[int]) -> str | None:
    """Have the kernel deal out a mapping's pages over nodes as they are touched.

    Args:
        address: of a page; nothing has been touched so far.
        nodes: if there is but one, nothing is done.

    Returns:
        What a user should hear if the kernel refuses: pages then lie where they are first touched.
    """
    if len(nodes) < 2:
        return None
    mask = (ctypes.c_ulong * (max(nodes) // LONG_BITS + 1))()
    for node in nodes:
        mask[node // LONG_BITS] |= 1 << node % LONG_BITS
    where = (ctypes.addressof(mask), len(mask) * LONG_BITS + 1)  # the kernel takes one bit off
    try:
        if _own_policy() == MPOL_DEFAULT:
            _system_call(MBIND, address, nbytes, MPOL_INTERLEAVE, *where, 0)
    except OSError as error:
        return (
            f"this machine has {len(nodes)} NUMA nodes and the kernel refused to spread memory over"
            f" them ({error.strerror}): updates may wait for one node's memory. In a container,"
            " allow mbind (docker run --cap-add SYS_NICE); elsewhere start with numactl"
            " --interleave=all"
        )
    return None


def _own_policy() -> int:
    """What `numactl` or a parent process has set for this thread."""
    mode = ctypes.c_int(MPOL_DEFAULT)
    _system_call(GET_MEMPOLICY, ctypes.addressof(mode), 0, 0, 0, 0)
    return mode.value


def _system_call(numbers: dict[str, int], *arguments: int) -> None:
    number = numbers.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"its number on {platform.machine()} is not known here")
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    if call(*map(ctypes.c_long, (number, *arguments))) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _numbers(path: Path) -> set[int]:
    """Of a list such as `0-3,8`; it may be empty."""
    found: set[int] = set()
    for part in filter(None, path.read_text().strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
