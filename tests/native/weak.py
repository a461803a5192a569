"""Exhaustive runs of the ring's shipped source under a weak memory model: release and acquire views, with fences.

Each thread has a *view*: for each location the newest message (value stored there) that it knows of, and how often each
thread is known to have read it.  A release store takes the view along, an acquire load of that message joins it in; a
sequentially consistent fence joins with one view that all fences share (Kang et al., "A promising semantics for
relaxed-memory concurrency", POPL 2017, without promises).  An atomic load may read any message that is not older than
what the thread knows.  A plain access must know the newest message, and a plain store all reads of it: else it is a
race.  A thread that waits for ever is a lost wake-up.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from fmstream.core import _native

View = dict[Any, int]
Thread = Callable[["Recorder"], Any]
PRIVATE = 1 << 20
"""Addresses from here on are another thread's memory for each thread."""
SHIPPED = ("push", "room", "push_many", "peek_many", "release", "pop_many", "must_wake", "park", "push_all")


class Broken(Exception):
    """A run that must not be possible."""


class Pending(Exception):
    """The operation at which a thread stands."""


class Recorder:
    """What a thread does.  Operations that are in its log are answered from there, plain ones after it at once."""

    def __init__(self, state: State, thread: int) -> None:
        self._state = state
        self._thread = thread
        self._log = state.logs[thread]
        self._position = 0

    def do(self, *operation: Any) -> Any:
        """Carry out an operation, or stand there."""
        if self._position == len(self._log):
            if operation[0] not in {"read", "write"}:
                raise Pending(operation)
            # In a run without races it does not matter when plain accesses are made.
            self._log += (self._state.plain(self._thread, operation),)
        self._position += 1
        return self._log[self._position - 1]

    def log(self) -> tuple[Any, ...]:
        """All answers so far."""
        return self._log


def shipped(recorder: Recorder, mutate: Callable[[str], str] = str) -> dict[str, Any]:
    """The functions of the ring from their source, changed by ``mutate``, over memory that the recorder stands for."""
    do = recorder.do

    def memcpy(target: int, source: int, num_bytes: int) -> None:
        for done in range(0, num_bytes, 8):
            do("write", target + done, do("read", source + done))

    scope: dict[str, Any] = _constants() | {
        "ld": lambda a: do("read", a),
        "st": lambda a, v: do("write", a, v),
        "ld_rlx": lambda a: do("load", a, False),
        "ld_acq": lambda a: do("load", a, True),
        "st_rlx": lambda a, v: do("store", a, v, False),
        "st_rel": lambda a, v: do("store", a, v, True),
        "xchg": lambda a, v: do("xchg", a, v),
        "fence": lambda: do("fence"),
        "memcpy": memcpy,
    }
    exec(_code(mutate), scope)
    return scope


@cache
def source() -> str:
    """The source of the ring's functions, without their decorators."""
    functions = (textwrap.dedent(inspect.getsource(getattr(_native, name).py_func)) for name in SHIPPED)
    return "\n".join(text[text.index("def ") :] for text in functions)


@cache
def _code(mutate: Callable[[str], str]) -> Any:
    return compile(mutate(source()), "ring", "exec")


@cache
def _constants() -> dict[str, Any]:
    return {name: value for name, value in vars(_native).items() if isinstance(value, int)}


class Message:
    """A value at a location, and the view that came with it.  Two are equal if both are."""

    def __init__(self, value: int, view: View) -> None:
        self.value = value
        self.view = view
        self._key = value, frozenset(view.items())
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self._key == other._key


class State:
    """Memory, views and logs at some moment of a run."""

    def __init__(self, num_threads: int, memory: dict[int, int]) -> None:
        self.logs: list[tuple[Any, ...]] = [()] * num_threads
        self.stands: list[tuple[Any, ...]] = [()] * num_threads
        self.private: list[dict[int, int]] = [{} for _ in range(num_threads)]
        self.views: list[View] = [{} for _ in range(num_threads)]
        self.loaded: list[View] = [{} for _ in range(num_threads)]  # by relaxed loads: joined by the next fence
        self.fenced: list[View] = [{} for _ in range(num_threads)]  # at the last fence: goes with relaxed stores
        self.shared: View = {}
        self.memory = {address: [Message(value, {})] for address, value in memory.items()}
        self.reads: View = {}
        self.signal: View | None = None

    def copy(self) -> State:
        """A state that changes on its own."""
        other = State.__new__(State)
        other.logs, other.stands = list(self.logs), list(self.stands)
        other.private = [dict(memory) for memory in self.private]
        for name in ("views", "loaded", "fenced"):
            setattr(other, name, [dict(view) for view in getattr(self, name)])
        other.shared = dict(self.shared)
        other.memory = {address: list(messages) for address, messages in self.memory.items()}
        other.reads = dict(self.reads)
        other.signal = self.signal
        return other

    def key(self) -> Any:
        """What tells this state from others.  Private memory and reads follow from the logs."""
        memory = frozenset((address, tuple(messages)) for address, messages in self.memory.items())
        views = tuple(frozenset(view.items()) for view in (*self.views, *self.loaded, *self.fenced, self.shared))
        signal = None if self.signal is None else frozenset(self.signal.items())
        return tuple(self.logs), memory, views, signal

    def step(self, thread: int, body: Thread) -> None:
        """Let a thread run on to its next operation that others may come between."""
        recorder = Recorder(self, thread)
        try:
            self.stands[thread] = ("done", body(recorder))
        except Pending as pending:
            self.stands[thread] = pending.args[0]
        self.logs[thread] = recorder.log()

    def at(self, address: int) -> list[Message]:
        """The messages at a location, oldest first; memory is zero at first."""
        return self.memory.setdefault(address, [Message(0, {})])

    def answer(self, thread: int, value: Any) -> None:
        """Let a thread go on."""
        self.logs[thread] += (value,)

    def plain(self, thread: int, operation: tuple[Any, ...]) -> int | None:
        """Carry out a plain access; raises `Broken` if it is a race."""
        kind, address = operation[:2]
        if address >= PRIVATE:
            if kind == "read":
                return self.private[thread].get(address, 0)
            self.private[thread][address] = operation[2]
            return None
        view, messages = self.views[thread], self.at(address)
        known = view.get(address, 0)
        if known != len(messages) - 1:
            raise Broken(f"thread {thread}: plain {kind} at {address} races with a store")
        if kind == "read":
            view[address, thread] = self.reads[address, thread] = self.reads.get((address, thread), 0) + 1
            return messages[-1].value
        for other in range(len(self.logs)):
            if other != thread and self.reads.get((address, other), 0) != view.get((address, other), 0):
                raise Broken(f"thread {thread}: plain write at {address} races with a read")
        messages.append(Message(operation[2], {}))
        view[address] = known + 1
        return None

    def load(self, thread: int, address: int, index: int, acquire: bool) -> int:
        """Read one message."""
        message = self.at(address)[index]
        _join(self.views[thread], {address: index})
        _join(self.views[thread] if acquire else self.loaded[thread], message.view)
        return message.value

    def store(self, thread: int, address: int, value: int, release: bool, inherited: View | None = None) -> None:
        """Append a message."""
        self.views[thread][address] = len(self.at(address))
        view = dict(self.views[thread] if release else self.fenced[thread])
        _join(view, inherited or {})
        self.memory[address].append(Message(value, view))

    def fence(self, thread: int) -> None:
        """A sequentially consistent fence."""
        view = self.views[thread]
        _join(view, self.loaded[thread])
        _join(view, self.shared)
        self.shared, self.fenced[thread] = dict(view), dict(view)


def _join(view: View, other: View) -> None:
    for key, index in other.items():
        view[key] = max(view.get(key, 0), index)


def explore(threads: Sequence[Thread], memory: dict[int, int], limit: int = 400_000) -> tuple[int, list[Any]]:
    """Run threads in every way that the model allows.

    Returns:
        How many states there were, and all distinct results, each a tuple of what the threads returned.

    Raises:
        Broken: a run with a race, or one in which all threads wait.
    """
    start = State(len(threads), memory)
    for thread, body in enumerate(threads):
        start.step(thread, body)
    stack, seen, results = [start], {start.key()}, []
    while stack:
        state = stack.pop()
        num_following = 0
        for thread, body in enumerate(threads):
            for new in _following(state, thread, state.stands[thread]):
                num_following += 1
                new.step(thread, body)
                if (key := new.key()) not in seen:
                    seen.add(key)
                    stack.append(new)
        assert len(seen) < limit, "too many states: make the case smaller"
        if num_following == 0:
            if any(operation[0] != "done" for operation in state.stands):
                raise Broken(f"all wait: {[operation[0] for operation in state.stands]}")
            results.append(tuple(operation[1] for operation in state.stands))
    return len(seen), list(dict.fromkeys(results))


def _following(state: State, thread: int, operation: tuple[Any, ...]) -> Iterator[State]:
    """The states that an operation may lead to."""
    kind, *rest = operation
    if kind == "load":
        address, acquire = rest
        for index in range(state.views[thread].get(address, 0), len(state.at(address))):
            new = state.copy()
            new.answer(thread, new.load(thread, address, index, acquire))
            yield new
        return
    new = state.copy()
    if kind == "store":
        new.store(thread, *rest)
        new.answer(thread, None)
    elif kind == "xchg":
        address, value = rest
        last = len(new.at(address)) - 1
        found = new.at(address)[last]
        new.answer(thread, new.load(thread, address, last, acquire=True))
        new.store(thread, address, value, release=True, inherited=found.view)
    elif kind == "fence":
        new.fence(thread)
        new.answer(thread, None)
    elif kind == "signal":
        view = dict(new.views[thread])
        _join(view, new.signal or {})
        new.signal = view
        new.answer(thread, None)
    elif kind == "sleep" and new.signal is not None:
        _join(new.views[thread], new.signal)
        new.signal = None
        new.answer(thread, None)
    elif kind == "changed" and len(new.at(rest[0])) - 1 > new.views[thread].get(rest[0], 0):
        new.views[thread][rest[0]] = len(new.at(rest[0])) - 1  # looking again and again ends with the newest
        new.answer(thread, None)
    else:
        return
    yield new
