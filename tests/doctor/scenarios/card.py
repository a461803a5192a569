"""The card: its memory, its clocks, its heat, and what streams to it."""

from __future__ import annotations

from fmstream.core.reading import Unread
from fmstream.doctor.measured import MemoryCheck, RoundTrip
from fmstream.doctor.system import Wanted
from fmstream.doctor.torch_facts import TorchDevice, TorchFacts
from tests.doctor.machine import ARCHITECTURES, GIB, MIB, Machine, NVMLError
from tests.doctor.scenario import expect


@expect({23: ("FAIL", "2 uncorrected since the driver.*memory tests do not tell which part")})
def uncorrected_errors(m: Machine) -> None:
    m.gpu(EccMode=[1, 1], TotalEccErrors=lambda kind, since: 2 if kind == 1 else 9)


@expect({23: ("WARN", "4 uncorrected in its life")})
def uncorrected_errors_of_old(m: Machine) -> None:
    m.gpu(EccMode=[1, 1], TotalEccErrors=lambda kind, since: 4 if (kind, since) == (1, 1) else 0)


@expect({23: ("INFO", "off")})
def ecc_off(m: Machine) -> None:
    m.gpu(EccMode=[0, 0])


@expect({24: ("WARN", "one waits to be.*reset the card")})
def row_remap_pending(m: Machine) -> None:
    m.gpu(RemappedRows=(0, 1, 1, 0))


@expect({24: ("FAIL", "could not be replaced")})
def row_remap_failed(m: Machine) -> None:
    m.gpu(RemappedRows=(3, 5, 0, 1))


@expect({24: ("WARN", "pages wait to be retired")})
def retired_pages_pending(m: Machine) -> None:
    m.gpu(capability=(7, 5), RetiredPagesPendingStatus=1)


@expect({25: ("WARN", "power brake by the supply, under load")})
def power_brake_under_load(m: Machine) -> None:
    m.gpu(busy={"CurrentClocksEventReasons": 0x80})


@expect({25: ("INFO", "power limit, under load")})
def at_the_power_limit(m: Machine) -> None:
    m.gpu(busy={"CurrentClocksEventReasons": 0x4})


@expect({26: ("WARN", "94 C.*93 C")})
def too_hot_under_load(m: Machine) -> None:
    m.gpu(busy={"Temperature": 94})


@expect({26: ("INFO", "45 C; where it slows down is not told")})
def no_threshold(m: Machine) -> None:
    m.gpu(TemperatureThreshold=NVMLError(3))


@expect({21: ("WARN", "30.0 GiB, as --memory says")})
def more_memory_than_is_free(m: Machine) -> None:
    m.gpu()
    m.wanted = Wanted(memory_bytes=30 * GIB)


@expect({33: ("FAIL", "17 wrong words in 512 MiB.*bit 3.*a fault on the memory path")})
def memory_that_forgets(m: Machine) -> None:
    m.gpu()
    m.probes.memory = MemoryCheck(512 * MIB, 17, 1.0, "bit 3 stays at 1")


@expect({34: ("FAIL", "differs from the unstreamed run")})
def wrong_bytes(m: Machine) -> None:
    m.gpu()
    m.probes.trip = RoundTrip(is_equal=False, streamed_bytes=MIB)


@expect({34: ("UNKNOWN", "did not stream on the CPU: no folder")})
def streaming_fails_on_the_cpu(m: Machine) -> None:
    m.probes.trip = Unread("no folder")


@expect(
    {
        1: ("INFO", "torch drives an AMD card"),
        5: ("INFO", r"Radeon 8060S Graphics \(gfx1151\) shares the host's memory.*gains little"),
        6: ("INFO", "gfx1151, not an NVIDIA card"),
        7: ("INFO", "drives it"),
        21: ("INFO", "shares the host's memory"),
        23: ("INFO", "no NVIDIA card"),
    }
)
def a_unified_memory_apu(m: Machine) -> None:
    apu = TorchDevice(0, "Radeon 8060S Graphics", None, None, "gfx1151", is_integrated=True, total_bytes=96 * GIB)
    m.torch = TorchFacts("2.11.0+rocm7", hip="7.0", architectures=("gfx1151",), devices=(apu,))


@expect({5: ("INFO", "GB10 shares the host's memory"), 21: ("INFO", "shares")})
def a_unified_memory_nvidia_board(m: Machine) -> None:
    card = m.gpu(name="NVIDIA GB10", capability=(12, 1), has_torch=False)
    card.answers["MemoryInfo"] = NVMLError(3)
    device = TorchDevice(0, "NVIDIA GB10", "0000:01:00.0", (12, 1), is_integrated=True, total_bytes=119 * GIB)
    m.torch = TorchFacts("2.13.0", cuda="13.0", architectures=ARCHITECTURES, devices=(device,))
