"""On processors with a weak memory order the ring's cursors compile to ordered instructions."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import pytest

from fmstream.core import _native
from tests.native.weak import SHIPPED

TRIPLE = "aarch64-unknown-linux-gnu"
ORDERED = ("ldar", "stlr", "ldaxr", "stlxr", "dmb")
WANTED = {
    "push": Counter(ldar=1, stlr=1),
    "push_many": Counter(ldar=1, stlr=1),
    "peek_many": Counter(ldar=1),
    "release": Counter(stlr=1),
    "pop_many": Counter(ldar=1, stlr=1),
    "must_wake": Counter(ldaxr=1, stlxr=1, dmb=1),
    "park": Counter(ldar=1, ldaxr=1, stlxr=1, dmb=1),
    "push_all": Counter(ldar=1, stlr=1, ldaxr=1, stlxr=1, dmb=1),
}


@cache
def build(changes: tuple[tuple[str, str], ...] = ()) -> dict[str, Any]:
    """The ring's functions compiled anew, from the source up to the gather, with replacements."""
    text = inspect.getsource(_native)
    text = text[: text.index("# The gather\n")]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    scope: dict[str, Any] = {"__name__": "ring_for_another_processor"}
    exec(compile(text, "<the ring, changed>", "exec"), scope)
    return {name: scope[name] for name in SHIPPED}


def listing(function: Any) -> Counter[str]:
    """How many ordered instructions a function has when it is compiled for aarch64."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    (code,) = function.inspect_llvm().values()
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(opt=3)
    code = re.sub(r'target triple = ".*"', f'target triple = "{TRIPLE}"', code)
    code = re.sub(r'target datalayout = ".*"', f'target datalayout = "{machine.target_data}"', code)
    # What this processor is called means nothing to the other one.
    code = re.sub(r'"target-(cpu|features)"="[^"]*"', "", code)
    assembly = machine.emit_assembly(llvm.parse_assembly(code))
    body = re.search(r"^(_ZN\S+):.*?\.cfi_endproc", assembly, re.MULTILINE | re.DOTALL)
    assert body is not None
    return Counter(re.findall(rf"\b({'|'.join(ORDERED)})\b", body[0]))


def short_of(functions: dict[str, Any]) -> set[str]:
    """Functions with fewer ordered instructions than they need."""
    return {name for name, wanted in WANTED.items() if not wanted <= listing(functions[name])}


def test_the_shipped_source_has_them() -> None:
    assert short_of(build()) == set()


@pytest.mark.parametrize(
    ("old", "new", "caught_in"),
    [
        ("st_rel(ring", "st(ring", {"push", "push_many", "release", "pop_many", "push_all"}),
        ("ld_acq(ring", "ld_rlx(ring", {"push", "push_many", "peek_many", "pop_many", "park", "push_all"}),
        ("    fence()\n", "", {"must_wake", "park", "push_all"}),
    ],
)
def test_a_relaxed_one_is_caught(old: str, new: str, caught_in: set[str]) -> None:
    assert short_of(build(((old, new),))) == caught_in
