"""The host: memory, nodes, what may be pinned, the model's disk."""

from __future__ import annotations

from pathlib import Path

from fmstream.doctor.measured import Pinned
from fmstream.doctor.system import Wanted
from tests.doctor.machine import GIB, MIB, Machine, write
from tests.doctor.scenario import expect


@expect({27: ("FAIL", "leaves 14.0 GiB of 16.0 GiB.*20.0 GiB to be pinned.*pinned= less")})
def a_group_limit_below_the_pins(m: Machine) -> None:
    m.gpu()
    m.wanted = Wanted(pinned_bytes=20 * GIB)
    group = m.sysfs / "fs/cgroup/user.slice"
    write(group / "memory.max", f"{16 * GIB}\n")
    write(group / "memory.current", f"{12 * GIB}\n")
    write(group / "memory.stat", f"anon {2 * GIB}\ninactive_file {9 * GIB}\nactive_file {GIB}\nbroken\n")


@expect(
    {27: ("WARN", 'leaves 15.0 GiB of 16.0 GiB.*44.8 GiB, which pinned="auto" may take.*the kernel ends the process')}
)
def a_group_limit_of_the_first_version(m: Machine) -> None:
    m.gpu()
    write(m.proc / "self/cgroup", "4:memory:/docker/abc\n3:cpu:/\n0::/\n")
    group = m.sysfs / "fs/cgroup/memory/docker/abc"
    write(group / "memory.limit_in_bytes", f"{16 * GIB}\n")
    write(group / "memory.usage_in_bytes", f"{3 * GIB}\n")
    write(group / "memory.stat", f"inactive_file 0\ntotal_inactive_file {2 * GIB}\n")


@expect({27: ("OK", "the control group leaves 60.0 GiB")})
def a_wide_group_above_a_group_that_is_not_there(m: Machine) -> None:
    m.gpu()
    write(m.proc / "self/cgroup", "0::/../../elsewhere/job.scope\n")
    write(m.sysfs / "fs/cgroup/memory.max", f"{62 * GIB}\n")
    write(m.sysfs / "fs/cgroup/memory.current", f"{2 * GIB}\n")


@expect({27: ("FAIL", "48.0 GiB available.*60.0 GiB to be pinned")})
def a_model_larger_than_memory(m: Machine) -> None:
    m.gpu()
    m.wanted = Wanted(model_bytes=60 * GIB)


@expect({27: ("UNKNOWN", "meminfo"), 28: ("UNKNOWN", "meminfo")})
def no_meminfo(m: Machine) -> None:
    m.gpu()
    (m.proc / "meminfo").unlink()


@expect({28: ("WARN", "4.00 GiB may still be promised.*20.0 GiB of weights")})
def strict_overcommit(m: Machine) -> None:
    m.gpu()
    write(m.proc / "sys/vm/overcommit_memory", "2\n")
    m.set_memory(64 * GIB, 48 * GIB, CommitLimit=40 * GIB, Committed_AS=36 * GIB)
    m.wanted = Wanted(model_bytes=20 * GIB)


@expect({29: ("WARN", "the card is at node 1, this process runs on others only.*numactl --cpunodebind=1")})
def numa_mismatch(m: Machine) -> None:
    m.gpu(files={"numa_node": "1"})
    write(m.sysfs / "devices/system/node/node0/cpulist", "0-7\n")
    write(m.sysfs / "devices/system/node/node1/cpulist", "8-15\n")
    m.cpus = frozenset(range(8))


@expect({29: ("OK", "card and process at node 1")})
def numa_bound(m: Machine) -> None:
    m.gpu(files={"numa_node": "1"})
    write(m.sysfs / "devices/system/node/node0/cpulist", "0-7\n")
    write(m.sysfs / "devices/system/node/node1/cpulist", "8-11,12,13-15\n")
    m.cpus = frozenset({8, 15})


@expect({29: ("INFO", "may run on all of 2 nodes")})
def numa_not_bound(m: Machine) -> None:
    m.gpu(files={"numa_node": "0"})
    write(m.sysfs / "devices/system/node/node0/cpulist", "0-7\n")
    write(m.sysfs / "devices/system/node/node1/cpulist", "8-15\n")


@expect({29: ("UNKNOWN", "the firmware does not say")})
def numa_unknown(m: Machine) -> None:
    m.gpu()
    write(m.sysfs / "devices/system/node/node1/cpulist", "16-31\n")


@expect({12: ("WARN", "64.0 MiB pinned, then refused; ulimit -l is 64.0 MiB.*raising ulimit -l may help")})
def a_limit_on_locked_memory(m: Machine) -> None:
    m.gpu()
    m.locked = 64 * MIB
    m.probes.pinned = lambda num_bytes: Pinned(64 * MIB, was_refused=True)


@expect({12: ("OK", "1.00 GiB pinned, then refused.*512 MiB to be pinned")})
def pins_within_what_is_allowed(m: Machine) -> None:
    m.gpu()
    m.wanted = Wanted(pinned_bytes=512 * MIB)
    m.probes.pinned = lambda num_bytes: Pinned(GIB, was_refused=True)


@expect({30: ("OK", "ext4 on /, 10.0 GiB of weights"), 12: ("OK", "2.00 GiB tried")})
def a_model_on_a_fast_disk(m: Machine) -> None:
    m.gpu()
    m.wanted = Wanted(path=Path("/models/m"), model_bytes=10 * GIB)


@expect({30: ("INFO", "on a disk that turns")})
def a_model_on_a_disk_that_turns(m: Machine) -> None:
    m.gpu()
    m.mount("/data\\040store", "ext4", "/dev/sda1", "8:1")
    write(m.sysfs / "devices/sda/queue/rotational", "1\n")
    write(m.sysfs / "devices/sda/sda1/partition", "1\n")
    (m.sysfs / "dev/block/8:1").symlink_to(m.sysfs / "devices/sda/sda1")
    m.wanted = Wanted(path=Path("/data store/m"))


@expect({30: ("OK", "ext4 on /data store(?!, on a disk)")})
def a_model_on_a_virtual_disk_that_says_that_it_turns(m: Machine) -> None:
    m.gpu()
    m.mount("/data\\040store", "ext4", "/dev/vda1", "254:1")
    write(m.sysfs / "devices/pci0000:00/virtio1/block/vda/queue/rotational", "1\n")
    write(m.sysfs / "devices/pci0000:00/virtio1/block/vda/vda1/partition", "1\n")
    (m.sysfs / "dev/block/254:1").symlink_to(m.sysfs / "devices/pci0000:00/virtio1/block/vda/vda1")
    m.wanted = Wanted(path=Path("/data store/m"))


@expect({30: ("INFO", "nfs4 on /srv.*network file system")})
def a_model_on_the_network(m: Machine) -> None:
    m.gpu()
    m.mount("/srv", "nfs4", "server:/srv", "0:50")
    m.wanted = Wanted(path=Path("/srv/m"))


@expect({30: ("INFO", "tmpfs on /dev/shm.*count twice")})
def a_model_in_memory(m: Machine) -> None:
    m.gpu()
    m.mount("/dev/shm", "tmpfs", "tmpfs")
    m.wanted = Wanted(path=Path("/dev/shm/m"))
