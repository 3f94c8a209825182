"""Which nodes memory is dealt out over, and what the kernel makes of it."""

import ctypes
import errno
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch import Tensor

from megatrain.memory import HostSlab, numa
from megatrain.memory.numa import NODES, interleave, usable_nodes

TWO_SOCKETS = {"has_memory": "0-1", "node0/cpulist": "0-3,8-11", "node1/cpulist": "4-7,12-15"}
EVERY_CORE = range(16)
SIZE = 4 * 2**20


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def policy_of(memory: Tensor) -> str:
    """As the kernel tells it: of the last mapping that begins at this memory or before."""
    lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    starts = (line for line in lines if int(line[0], 16) <= memory.data_ptr())
    return max(starts, key=lambda line: int(line[0], 16))[1]


def test_both_sockets_are_used(tmp_path: Path) -> None:
    assert usable_nodes(tree(tmp_path, TWO_SOCKETS), EVERY_CORE) == (0, 1)


def test_a_process_that_is_bound_to_a_socket_keeps_to_it(tmp_path: Path) -> None:
    assert usable_nodes(tree(tmp_path, TWO_SOCKETS), {4, 12}) == (1,)


def test_memory_without_cores_is_left_out(tmp_path: Path) -> None:
    """A GH200: node 0 is the host's, the others are the GPU's, most of them without memory."""
    files = {"has_memory": "0-1", "node0/cpulist": "0-71", "node1/cpulist": ""}
    assert usable_nodes(tree(tmp_path, files), EVERY_CORE) == (0,)


def test_cores_without_memory_are_left_out(tmp_path: Path) -> None:
    files = TWO_SOCKETS | {"has_memory": "1"}
    assert usable_nodes(tree(tmp_path, files), EVERY_CORE) == (1,)


def test_a_kernel_without_numa_has_no_nodes(tmp_path: Path) -> None:
    assert usable_nodes(tmp_path, EVERY_CORE) == ()
    assert interleave(0, SIZE, ()) is None


def test_on_one_node_nothing_is_asked_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*arguments: object) -> None:
        raise AssertionError("a system call")

    monkeypatch.setattr(numa, "_system_call", unwanted)
    assert interleave(0, SIZE, (1,)) is None


def test_this_machine_is_described() -> None:
    if not NODES.is_dir():
        pytest.skip("a kernel without NUMA")
    assert usable_nodes()


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As slabs see this machine; the kernel leaves out the node that it does not have."""
    if interleave_is_refused():
        pytest.skip("the kernel or the container refuses mbind")
    monkeypatch.setattr("megatrain.memory.slab.usable_nodes", lambda: (0, 1))


def interleave_is_refused() -> bool:
    slab = HostSlab(SIZE, pin=False).take(SIZE)
    return interleave(slab.data_ptr(), SIZE, (0, 1)) is not None


@pytest.mark.usefixtures("two_nodes")
def test_the_kernel_deals_a_slab_out() -> None:
    slab = HostSlab(SIZE, pin=False)
    assert slab.notices == ()
    memory = slab.take(SIZE)
    assert memory.sum() == 0
    assert policy_of(memory.fill_(1)).startswith("interleave:0")


@pytest.mark.usefixtures("two_nodes")
def test_a_policy_of_the_process_stays() -> None:
    """A policy is a thread's own and goes with it."""

    def policy() -> str:
        nodes = ctypes.c_ulong(1)
        set_mempolicy, preferred = {"x86_64": 238, "aarch64": 237}, 1
        numa._system_call(set_mempolicy, preferred, ctypes.addressof(nodes), 64)
        slab = HostSlab(SIZE, pin=False)
        assert slab.notices == ()
        return policy_of(slab.take(SIZE).fill_(1))

    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(policy).result().startswith("interleave")


def test_a_slab_of_a_machine_with_one_node_has_no_policy() -> None:
    if len(usable_nodes()) > 1:
        pytest.skip("several nodes")
    assert policy_of(HostSlab(SIZE, pin=False).take(SIZE).fill_(1)) == "default"


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_refusal_is_one_notice_and_the_slab_works(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """EPERM: what a container's filter of system calls answers; ENOSYS: a kernel without them."""

    def refuse(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(numa, "_system_call", refuse)
    monkeypatch.setattr("megatrain.memory.slab.usable_nodes", lambda: (0, 1))
    first, second = HostSlab(SIZE, pin=False), HostSlab(2 * SIZE, pin=False)
    (said,) = {*first.notices, *second.notices}
    assert os.strerror(code) in said and "SYS_NICE" in said and "numactl" in said
    assert first.take(SIZE).fill_(1).sum() == SIZE


def test_what_the_kernel_itself_refuses_is_told() -> None:
    """Nodes that no machine here has: EINVAL."""
    memory = HostSlab(SIZE, pin=False).take(SIZE)
    said = interleave(memory.data_ptr(), SIZE, (1000, 1001))
    assert said is not None and "2 NUMA nodes" in said


def test_an_unknown_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "riscv64 is not known" in str(interleave(0, SIZE, (0, 1)))
