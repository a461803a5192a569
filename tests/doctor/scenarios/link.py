"""The link: its lanes, the ports above the card, errors on it, copies over it."""

from __future__ import annotations

from fmstream.core.reading import Unread
from fmstream.doctor.measured import LinkRates
from fmstream.doctor.nvml import NO_PACKAGE
from tests.doctor.machine import MIB, Machine, NVMLError, write
from tests.doctor.scenario import expect, no_load


@expect({9: ("WARN", "x4 of x16.*the slot has x4.*move the card"), 10: ("OK", "gen 4")})
def x4_slot(m: Machine) -> None:
    m.gpu(now=(4, 4), slot=(4, 4))


@expect({9: ("WARN", "x4 of x16.*which the card has and the slot too.*reseat")})
def x4_in_an_x16_slot(m: Machine) -> None:
    m.gpu(now=(4, 4), slot=(4, 16))


@expect({9: ("WARN", "x8 of x16.*the slot has x8")})
def x8_by_bifurcation(m: Machine) -> None:
    m.gpu(now=(4, 8), slot=(4, 8))


@expect({9: ("OK", "x16"), 10: ("UNKNOWN", "gen 1 of 4 while idle in state P8")})
def idle_at_gen_1(m: Machine) -> None:
    m.gpu(now=(1, 16), state=8)
    no_load(m)


@expect({9: ("OK", "x16"), 10: ("OK", "gen 4 under load")})
def idle_at_gen_1_and_full_under_load(m: Machine) -> None:
    m.gpu(now=(1, 16), state=8, busy={"CurrPcieLinkGeneration": 4, "PerformanceState": 0})


@expect({10: ("WARN", "gen 1 of 4 under load"), 13: ("WARN", "3.90 GB/s")})
def gen_1_under_load(m: Machine) -> None:
    m.gpu(now=(1, 16))
    m.probes.rates = LinkRates(1.9e9, 3.9e9)


@expect({10: ("OK", "gen 3, for the slot; the card could do gen 4"), 9: ("OK", "x16")})
def a_slot_of_gen_3(m: Machine) -> None:
    m.gpu(slot=(3, 16), now=(3, 16))


@expect(
    {
        9: ("UNKNOWN", "all bits set: the device does not answer"),
        10: ("UNKNOWN", "not readable"),
        11: ("UNKNOWN", "not told"),
    }
)
def a_device_of_ones(m: Machine) -> None:
    unread = {
        "current_link_speed": "Unknown",
        "current_link_width": "63",
        "max_link_speed": "Unknown",
        "max_link_width": "255",
    }
    m.gpu(has_nvml=False, files=unread)
    m.nvml = NO_PACKAGE


@expect(
    {9: ("UNKNOWN", "powered off.*put the card to work"), 19: ("UNKNOWN", "suspended"), 10: ("UNKNOWN", "powered off")}
)
def a_card_that_sleeps(m: Machine) -> None:
    m.gpu(has_nvml=False, files={"power/runtime_status": "suspended", "current_link_width": "63"})
    m.nvml = NO_PACKAGE
    no_load(m)


@expect({11: ("WARN", r"limited at 0000:03:00.0: gen 4 x4, 7.88 GB/s.*gen 4 x16, 31.5 GB/s"), 9: ("OK", "x16")})
def a_switch_behind_four_lanes(m: Machine) -> None:
    root = m.port("0000:00:05.0", width=16, now=(4, 4))
    inner = m.port("0000:03:00.0", now=(4, 4), under=root)
    m.gpu(address="0000:05:00.0", under=m.port("0000:04:00.0", under=inner))


@expect({11: ("OK", "2 ports further up, none slower")})
def a_switch_with_all_lanes(m: Machine) -> None:
    root = m.port("0000:00:05.0", now=(1, 16))
    m.gpu(address="0000:05:00.0", now=(1, 16), under=m.port("0000:04:00.0", under=m.port("0000:03:00.0", under=root)))


@expect({11: ("INFO", "outside the case.*2.5 GT/s whatever they carry"), 9: ("OK", "x4")})
def a_card_in_a_dock(m: Machine) -> None:
    root = m.port("0000:00:07.0", generation=1, width=4)
    outer = m.port("0000:05:00.0", generation=1, width=4, under=root)
    m.gpu(address="0000:06:00.0", now=(1, 4), width=4, files={"removable": "removable"}, under=outer)
    no_load(m)


@expect(
    {20: ("INFO", "256 MiB: resizable BAR is off; the card could map 32.0 GiB. It is a window, not the card's memory")}
)
def a_small_window(m: Machine) -> None:
    m.gpu(bar1=256 * MIB, files={"resource1_resize": f"{1 << 15 | 1 << 8:016x}"})


@expect({20: ("OK", "32.0 GiB")})
def a_window_by_sysfs(m: Machine) -> None:
    m.gpu(BAR1MemoryInfo=NVMLError(3))


@expect({18: ("INFO", "powersave")})
def links_save_power(m: Machine) -> None:
    m.gpu()
    write(m.sysfs / "module/pcie_aspm/parameters/policy", "default performance [powersave] powersupersave\n")


@expect({16: ("WARN", "400 in .* under load, 1400 in all.*16 a minute.*reseat")})
def replays_under_load(m: Machine) -> None:
    card = m.gpu(PcieReplayCounter=1000)
    m.probes.during = lambda: card.answers.update(PcieReplayCounter=1400)


@expect({16: ("INFO", "1000 since the driver was loaded; whether they rise")})
def replays_long_ago(m: Machine) -> None:
    m.gpu(PcieReplayCounter=1000)
    no_load(m)


@expect({17: ("WARN", "50 at 0000:00:01.0 while it was under load")})
def errors_that_rise_at_the_port(m: Machine) -> None:
    m.gpu()
    counters = m.folders[0].parent / "aer_dev_correctable"
    write(counters, "RxErr 10\nTOTAL_ERR_COR 10\n")
    m.probes.during = lambda: write(counters, "RxErr 60\nTOTAL_ERR_COR 60\n")


@expect({17: ("INFO", "10 at 0000:00:01.0 since boot, corrected; none of them under load")})
def errors_long_ago(m: Machine) -> None:
    m.gpu()
    write(m.folders[0].parent / "aer_dev_correctable", "RxErr 10\nTOTAL_ERR_COR 10\n")


@expect({17: ("FAIL", "2 MalfTLP at 0000:01:00.0 since boot, fatal")})
def fatal_errors(m: Machine) -> None:
    m.gpu(files={"aer_dev_fatal": "DLP 0\nMalfTLP 2\nTOTAL_ERR_FATAL 2"})


@expect({17: ("OK", "none")})
def a_question_for_what_is_not_there(m: Machine) -> None:
    m.gpu(files={"aer_dev_nonfatal": "UnsupReq 4\nTOTAL_ERR_NONFATAL 4"})


@expect({17: ("WARN", "3 CmpltTO at 0000:01:00.0 since boot, not corrected")})
def completion_timeouts(m: Machine) -> None:
    m.gpu(files={"aer_dev_nonfatal": "UnsupReq 4\nCmpltTO 3\nTOTAL_ERR_NONFATAL 7"})


@expect({13: ("WARN", r"12.0 GB/s in.*38 % of it"), 14: ("INFO", "67 % of pinned")})
def copies_at_a_third(m: Machine) -> None:
    m.gpu()
    m.probes.rates = LinkRates(12e9, 12.5e9, 8e9, 8e9)


@expect({13: ("INFO", "73 % of it"), 14: ("UNKNOWN", "not measured"), 15: ("UNKNOWN", "not measured")})
def copies_in_between(m: Machine) -> None:
    m.gpu()
    m.probes.rates = LinkRates(23e9, 24e9)


@expect({13: ("UNKNOWN", "out of memory"), 14: ("UNKNOWN", "."), 15: ("UNKNOWN", "."), 33: ("UNKNOWN", "no room")})
def a_card_that_is_full(m: Machine) -> None:
    m.gpu()
    m.probes.rates = Unread("out of memory")
    m.probes.memory = Unread("no room")
