"""Checks 27 to 32: the host's memory, its nodes, the model's file, and what Windows adds."""

from __future__ import annotations

from typing import Final

from fmstream.core.reading import Unread, read_int
from fmstream.device.control_groups import GroupLimit, group_limit
from fmstream.doctor.checks.check import per_card, per_machine
from fmstream.doctor.gpus import Gpu
from fmstream.doctor.host import Mount, is_rotational, meminfo, mount_of, numa_nodes
from fmstream.doctor.system import System
from fmstream.doctor.verdict import Result, fail, info, not_here, ok, unknown, warn
from fmstream.doctor.windows import WindowsFacts
from fmstream.report.units import format_bytes

TOPIC: Final = "host"

AUTO_PINNED_SHARE: Final = 0.7
"""Share of the host's memory that ``pinned="auto"`` may pin."""
STRICT: Final = 2
"""``vm.overcommit_memory``: no more may be promised than there is."""

REMOTE: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "fuse.sshfs", "fuse.gcsfuse", "fuse.s3fs"})
SHARED_WITH_WINDOWS: Final = frozenset({"9p", "drvfs", "virtiofs"})
IN_RAM: Final = frozenset({"tmpfs", "ramfs"})


@per_machine(27, "host memory", TOPIC)
def host_memory(system: System) -> Result:
    """Whether what is to be pinned fits in what the host and the process's control group leave."""
    memory = system.free_memory
    if isinstance(memory, Unread):
        return unknown(str(memory))
    total, available = memory
    group = group_limit(system.proc, system.sysfs) if system.is_linux else None
    headroom = available if group is None else min(available, group.headroom)
    read = f"{format_bytes(available)} available of {format_bytes(total)}"
    if group is not None:
        read += f"; the control group leaves {format_bytes(group.headroom)} of {format_bytes(group.limit)}"
    pins = system.wanted.pins
    if pins is not None:
        limit = f"{format_bytes(pins)} to be pinned"
        if pins > headroom:
            return fail(read, limit, "give pinned= less: the rest is then copied through staging; or raise the limit")
        return ok(read, limit)
    if group is not None and group.limit < AUTO_PINNED_SHARE * total:
        return _tight_group(read, group, total)
    return ok(read)


def _tight_group(read: str, group: GroupLimit, total: int) -> Result:
    return warn(
        read,
        f'{format_bytes(AUTO_PINNED_SHARE * total)}, which pinned="auto" may take of this machine',
        f"for models above {format_bytes(group.headroom)} give pinned= less than that, or the kernel ends the process",
    )


@per_machine(28, "commit and swap", TOPIC)
def commit(system: System) -> Result:
    """Whether the system can promise the model's size of memory."""
    if system.is_windows:
        return _windows_commit(system)
    if not system.is_linux:
        return not_here("of Linux and Windows only")
    sizes = meminfo(system.proc)
    mode = read_int(system.proc / "sys/vm/overcommit_memory")
    swap = sizes.get("SwapTotal")
    if swap is None or isinstance(mode, Unread):
        return unknown("meminfo tells nothing of swap" if swap is None else str(mode))
    swaps = f"{format_bytes(swap)} of swap" if swap else "no swap"
    more = "the size of WSL2 is set in .wslconfig, in Windows" if system.is_wsl else ""
    if mode != STRICT:
        return ok(f"{swaps}; memory is promised freely (overcommit {mode})", advice=more)
    if "CommitLimit" not in sizes or "Committed_AS" not in sizes:
        return unknown("meminfo tells no commit limit")
    left = max(0, sizes["CommitLimit"] - sizes["Committed_AS"])
    read = f"{swaps}; {format_bytes(left)} may still be promised (overcommit 2)"
    model = system.wanted.model_bytes
    if model is not None and left < model:
        return warn(read, f"{format_bytes(model)} of weights", "add swap, or set vm.overcommit_memory to 0")
    return ok(read) if model is None else ok(read, f"{format_bytes(model)} of weights")


def _windows_commit(system: System) -> Result:
    facts = system.windows
    if isinstance(facts, Unread):
        return unknown(str(facts))
    if isinstance(facts.commit_free_bytes, Unread) or isinstance(facts.commit_limit_bytes, Unread):
        return unknown(str(facts.commit_free_bytes))
    free, limit = format_bytes(facts.commit_free_bytes), format_bytes(facts.commit_limit_bytes)
    read = f"{free} of {limit} may still be promised; {_page_file(facts)}"
    model = system.wanted.model_bytes
    if model is not None and facts.commit_free_bytes < model:
        return warn(
            read,
            f"{format_bytes(model)} of weights",
            "let Windows size the page file, on a disk with room: error 1455 is about what is promised, not used",
        )
    return ok(read) if model is None else ok(read, f"{format_bytes(model)} of weights")


def _page_file(facts: WindowsFacts) -> str:
    size, is_managed = facts.page_file_bytes, facts.has_managed_page_file
    text = "page file of unknown size" if isinstance(size, Unread) else f"page file {format_bytes(size)}"
    return (
        text if isinstance(is_managed, Unread) else f"{text}, {'sized by Windows' if is_managed else 'of fixed size'}"
    )


@per_card(29, "NUMA", TOPIC)
def numa(system: System, gpu: Gpu) -> Result:
    """Whether the process runs on the processor that the card is plugged into."""
    if not system.is_linux:
        return not_here("of Linux only")
    nodes = {node: cpus for node, cpus in numa_nodes(system.sysfs).items() if cpus}
    if len(nodes) < 2:
        return ok("one node")
    node = Unread("the card is not on a bus that can be read") if gpu.pci is None else gpu.pci.numa_node
    if isinstance(node, Unread) or node not in nodes:
        why = node if isinstance(node, Unread) else "the firmware does not say"
        return unknown(f"{len(nodes)} nodes; the card's is not known: {why}")
    allowed = system.allowed_cpus()
    if isinstance(allowed, Unread):
        return unknown(str(allowed))
    bind = f"numactl --cpunodebind={node} --membind={node}"
    if not allowed & nodes[node]:
        return warn(f"the card is at node {node}, this process runs on others only", f"CPUs of node {node}", bind)
    if allowed - nodes[node]:
        return info(
            f"the card is at node {node}; this process may run on all of {len(nodes)} nodes", "", f"to bind: {bind}"
        )
    return ok(f"card and process at node {node}")


@per_machine(30, "model's files", TOPIC)
def model_files(system: System) -> Result:
    """Whether the weights lie where they can be read fast."""
    path = system.wanted.path
    if path is None:
        return not_here("no --path given")
    if system.is_windows:
        return _scanned(system)
    if not system.is_linux:
        return not_here("of Linux and Windows only")
    mount = mount_of(system.proc, path)
    if isinstance(mount, Unread):
        return unknown(str(mount))
    size = system.wanted.model_bytes
    read = f"{mount.kind} on {mount.point}" + ("" if size is None else f", {format_bytes(size)} of weights")
    return _by_kind(system, mount, read)


def _by_kind(system: System, mount: Mount, read: str) -> Result:
    if mount.kind in SHARED_WITH_WINDOWS:
        where = "the Linux side (ext4), such as your home folder" if system.is_wsl else "a disk of this machine"
        return warn(read, "a file system of this machine's own", f"move the model to {where}: reads are slow here")
    if mount.kind in REMOTE:
        return info(read, "", "a network file system: fmstream bandwidth --path MODEL tells how fast it is")
    if mount.kind in IN_RAM:
        return info(read, "", "it takes the host's memory: weights there count twice once they are pinned")
    turns = is_rotational(system.sysfs, mount.device)
    if turns is True:
        return info(f"{read}, on a disk that turns", "", "streaming from it is bound to about 0.2 GB/s")
    return ok(read)


def _scanned(system: System) -> Result:
    facts = system.windows
    if isinstance(facts, Unread) or isinstance(facts.has_defender, Unread):
        return unknown("whether files are scanned is not told")
    if not facts.has_defender:
        return ok("files are not scanned when they are opened")
    excluded = "" if isinstance(facts.exclusions, Unread) else f", {len(facts.exclusions)} folders excluded"
    return info(f"Defender scans files when they are opened{excluded}", advice="the first read of a file may be slower")


@per_machine(31, "VC runtime", TOPIC)
def vc_runtime(system: System) -> Result:
    """Whether the C++ runtime that torch needs on Windows is there."""
    if not system.is_windows:
        return not_here("of Windows only")
    missing = [name for name in ("msvcp140.dll", "vcruntime140.dll") if not system.loads_library(name)]
    if missing:
        return fail(f"{', '.join(missing)} missing", "installed", "install the Visual C++ redistributable of Microsoft")
    return ok("msvcp140 and vcruntime140 load")


@per_machine(32, "memory compression", TOPIC)
def compression(system: System) -> Result:
    """Whether Windows compresses pages that were not used for a while."""
    if not (system.is_windows or system.is_wsl):
        return not_here("of Windows only")
    value = system.windows if isinstance(system.windows, Unread) else system.windows.has_compression
    if isinstance(value, Unread):
        return unknown(str(value))
    if value:
        return info("on: weights in RAM that are not pinned may be compressed, and read more slowly after")
    return ok("off")
