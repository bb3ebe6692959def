"""Checks of the host: shared memory, ports, file system, CPUs. Small, bounded, and leaves nothing behind."""

import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from lit_gpt_dist.doctor.check import Check, Light
from lit_gpt_dist.doctor.topology import Topology

MIB, GIB = 2**20, 2**30
DOCKER_DEFAULT = 64 * MIB  # of /dev/shm, as containers get it unless told otherwise
DEFAULT_PORT = 29_500  # torch.distributed's
CHUNK_BYTES = 4 * MIB
WRITE_CHUNKS = 16
WRITE_SECONDS = 0.5  # stop writing after so long: a slow disk shows itself before that
SLOW_WRITE = 200e6  # bytes/s: a 1.2B model's 14 GB of state would block for more than a minute


def shared_memory_check(path: str = "/dev/shm") -> Check:
    try:
        size = shutil.disk_usage(path)
    except OSError as error:
        return Check(
            "shared memory", Light.UNKNOWN, f"{path}: {error.strerror}", "loader workers and NCCL want /dev/shm"
        )
    found = f"{path} {size.total / GIB:.1f} GiB, {size.free / GIB:.1f} free"
    if size.free <= DOCKER_DEFAULT:
        return Check("shared memory", Light.RED, found, "start the container with --shm-size=8g or --ipc=host")
    if size.free < GIB:
        return Check(
            "shared memory",
            Light.YELLOW,
            found,
            "enough without loader workers; give the container more with --shm-size",
        )
    return Check("shared memory", Light.GREEN, found)


def port_is_free(port: int, address: str = "127.0.0.1") -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def port_check(environment: dict[str, str]) -> Check:
    """Whether the port that the ranks meet at is free: MASTER_PORT, or torch's default."""
    given = environment.get("MASTER_PORT", "")
    if given and not (given.isdigit() and 0 <= int(given) < 65_536):
        return Check("port", Light.RED, f"MASTER_PORT={given}", "give a port number from 1024 to 65535")
    port = int(given or DEFAULT_PORT)
    if port_is_free(port):
        return Check("port", Light.GREEN, f"{port} is free")
    name = "MASTER_PORT" if given else "torch's default"
    return Check(
        "port", Light.YELLOW, f"{port} ({name}) is taken", "set MASTER_PORT to a free one, or use torchrun --standalone"
    )


def loopback_check() -> Check:
    """Whether this host's own name leads back to it: ranks on one node meet that way."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return Check(
            "host name",
            Light.YELLOW,
            f"{name} does not resolve",
            "set MASTER_ADDR=127.0.0.1, or add the name to /etc/hosts",
        )
    return Check("host name", Light.GREEN, f"{name} is {address}")


def write_speed(folder: Path) -> float:
    """Bytes/s of writing up to 64 MiB and flushing them to the disk. The file is gone afterwards."""
    chunk = os.urandom(CHUNK_BYTES)  # random: a file system that compresses must not look fast
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        start, written = time.perf_counter(), 0
        for _ in range(WRITE_CHUNKS):
            written += file.write(chunk)
            if time.perf_counter() - start > WRITE_SECONDS:
                break
        file.flush()
        os.fsync(file.fileno())
        return written / (time.perf_counter() - start)


def file_system_check(folder: Path) -> Check:
    try:
        speed, free = write_speed(folder), shutil.disk_usage(folder).free
    except OSError as error:
        return Check(
            "checkpoints", Light.RED, f"{folder}: {error.strerror}", "choose a folder that can be written: --folder"
        )
    found = f"{folder}: {speed / 1e9:.2f} GB/s written and flushed, {free / GIB:.0f} GiB free"
    if free < 10 * GIB:
        return Check("checkpoints", Light.YELLOW, found, "little room: 12 bytes a parameter are kept per checkpoint")
    if speed < SLOW_WRITE:
        return Check(
            "checkpoints", Light.YELLOW, found, "slow: save less often (`plan --mtbf_hours`) or to another disk"
        )
    return Check("checkpoints", Light.GREEN, found)


def parse_cpu_list(text: str) -> set[int]:
    """{0, 1, 2, 8} from "0-2,8"."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def pinning_check(topology: Topology | None, allowed: set[int], numa_nodes: int) -> Check:
    """Whether this process may run on the CPUs near the GPUs, and whether it is bound to them."""
    name, count = "CPUs", f"{len(allowed)} CPUs, {numa_nodes} NUMA node{'' if numa_nodes == 1 else 's'}"
    if numa_nodes <= 1:
        return Check(name, Light.GREEN, f"{count}: nothing to pin")
    near = {gpu: parse_cpu_list(cpus) for gpu, cpus in topology.cpus.items() if cpus} if topology else {}
    if not near:
        return Check(
            name, Light.UNKNOWN, f"{count}; which are near a GPU is not reported", "see `lscpu` and pin with numactl"
        )
    cut_off = [gpu for gpu, cpus in near.items() if not cpus & allowed]
    if cut_off:
        advice = "this process may not run near them: change its CPU set, or CUDA_VISIBLE_DEVICES"
        return Check(name, Light.RED, f"{count}; none near {', '.join(cut_off)}", advice)
    if all(allowed <= cpus for cpus in near.values()):
        return Check(name, Light.GREEN, f"{count}; pinned near the GPUs")
    advice = "pin each rank near its GPU: torchrun --numa-binding=node, or numactl --cpunodebind"
    return Check(name, Light.YELLOW, f"{count}; not pinned, so memory may be on the far side", advice)


def load_check(load: float, cpus: int, threads: str) -> Check:
    """Whether other work on this machine holds the CPUs, where training runs on them.

    Threads of one operation wait for one another in a loop, for a CPU that other work holds: two threads on two busy CPUs
    were seen to take 3 to 19 times as long as on idle ones, and up to 12 times as long as one thread.

    Args:
        load: the machine's mean number of runnable processes over the last minute.
        threads: OMP_NUM_THREADS, or nothing.
    """
    found = f"load {load:.1f} over the last minute, {cpus} CPUs"
    if load < cpus / 2 or threads == "1":
        return Check("other work", Light.GREEN, found)
    advice = "training may be many times slower: end what else runs, or set OMP_NUM_THREADS=1"
    return Check("other work", Light.YELLOW, found, advice)


def count_numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> int:
    """NUMA nodes that the kernel lists; 1 where it lists none."""
    return max(1, len(list(folder.glob("node[0-9]*"))))
