"""Cutting a request into chunks: what one worker does in one go."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from fmstream.device.files import SourceFile, Staging
from fmstream.device.homes import Home, MemoryHome

GAP_BYTES: Final = 64 << 10
"""Bytes of a file that are read and thrown away rather than paying for another read."""

DIRECT_BYTES: Final = 1 << 20
"""The least that is worth a read of its own, straight to its destination."""


class Piece(NamedTuple):
    """``num_bytes`` at ``home_offset`` of a home, wanted at the host address ``dst``."""

    home: Home
    home_offset: int
    dst: int
    num_bytes: int


class Part(NamedTuple):
    """``num_bytes`` from a place in a file, or from a host address, to the host address ``dst``."""

    source: int
    dst: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MoveChunk:
    """Copies from memory to memory."""

    parts: tuple[Part, ...]
    num_bytes: int

    def carry_out(self, extent: Staging, staging: Staging) -> None:
        """Copy; uses no staging."""
        for part in self.parts:
            ctypes.memmove(part.dst, part.source, part.num_bytes)


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """A range of a file whose destination lies as the disk wants it."""

    file: SourceFile
    part: Part

    @property
    def num_bytes(self) -> int:
        """Bytes that arrive."""
        return self.part.num_bytes

    def carry_out(self, extent: Staging, staging: Staging) -> None:
        """Read straight to the destination."""
        self.file.read_into(self.part.dst, self.part.source, self.part.num_bytes, staging)


@dataclass(frozen=True, slots=True)
class ScatterChunk:
    """An extent of a file that is read at once and copied from there to its destinations."""

    file: SourceFile
    parts: tuple[Part, ...]
    num_bytes: int

    def carry_out(self, extent: Staging, staging: Staging) -> None:
        """Read the extent, then copy its parts; parts are in order of their place in the file."""
        alignment = self.file.alignment
        first = self.parts[0].source
        start = first - first % alignment
        end = max(part.source + part.num_bytes for part in self.parts)
        # A whole number of blocks, except at the end of the file.
        stop = max(end, min(end + -end % alignment, self.file.num_bytes))
        self.file.read_into(extent.address, start, stop - start, staging)
        for part in self.parts:
            ctypes.memmove(part.dst, extent.address + part.source - start, part.num_bytes)


Chunk = MoveChunk | ReadChunk | ScatterChunk


def split(pieces: Iterable[Piece], chunk_bytes: int) -> Iterator[Chunk]:
    """Chunks of at most ``chunk_bytes`` (a multiple of the page size) that together carry out all pieces.

    Pieces of a file are taken in the order in which they lie in it; small neighbours share one read.
    """
    moves: list[Part] = []
    reads: dict[SourceFile, list[Part]] = {}
    for piece in pieces:
        home = piece.home
        assert 0 <= piece.home_offset <= piece.home_offset + piece.num_bytes <= home.num_bytes
        if piece.num_bytes == 0:
            continue
        if isinstance(home, MemoryHome):
            moves.append(Part(home.address + piece.home_offset, piece.dst, piece.num_bytes))
        else:
            part = Part(home.offset + piece.home_offset, piece.dst, piece.num_bytes)
            reads.setdefault(home.file, []).append(part)
    for file, parts in reads.items():
        yield from _split_reads(file, _joined(sorted(parts)), chunk_bytes)
    yield from _split_moves(_joined(moves), chunk_bytes)


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Parts, those made one that follow each other in both source and destination."""
    joined: list[Part] = []
    for part in parts:
        if joined:
            before = joined[-1]
            if (before.source + before.num_bytes, before.dst + before.num_bytes) == part[:2]:
                joined[-1] = before._replace(num_bytes=before.num_bytes + part.num_bytes)
                continue
        joined.append(part)
    return joined


def _split_reads(file: SourceFile, parts: Sequence[Part], chunk_bytes: int) -> Iterator[Chunk]:
    small: list[Part] = []
    for part in parts:
        if part.num_bytes >= DIRECT_BYTES and (part.dst - part.source) % file.alignment == 0:
            for piece in _cut(part, chunk_bytes, file.alignment):
                yield ReadChunk(file, piece)
        else:
            small.append(part)
    yield from _split_scattered(file, small, chunk_bytes)


def _split_scattered(file: SourceFile, parts: Sequence[Part], chunk_bytes: int) -> Iterator[ScatterChunk]:
    extent: list[Part] = []
    start = end = 0
    for part in parts:
        rest = part
        while rest.num_bytes:
            # Parts may overlap in the file, so the next one may also begin before an extent that was just begun.
            if extent and not start <= rest.source < min(start + chunk_bytes, end + GAP_BYTES + 1):
                yield _scatter(file, extent)
                extent = []
            if not extent:
                start = rest.source - rest.source % file.alignment
                end = start
            taken, rest = _take(rest, start + chunk_bytes - rest.source)
            extent.append(taken)
            end = max(end, taken.source + taken.num_bytes)
    if extent:
        yield _scatter(file, extent)


def _scatter(file: SourceFile, parts: list[Part]) -> ScatterChunk:
    return ScatterChunk(file, tuple(parts), sum(part.num_bytes for part in parts))


def _split_moves(parts: Sequence[Part], chunk_bytes: int) -> Iterator[MoveChunk]:
    chunk: list[Part] = []
    room = chunk_bytes
    for part in parts:
        rest = part
        while rest.num_bytes:
            taken, rest = _take(rest, room)
            chunk.append(taken)
            room -= taken.num_bytes
            if room == 0:
                yield MoveChunk(tuple(chunk), chunk_bytes)
                chunk, room = [], chunk_bytes
    if chunk:
        yield MoveChunk(tuple(chunk), chunk_bytes - room)


def _cut(part: Part, chunk_bytes: int, alignment: int) -> Iterator[Part]:
    """Cuts of a part, all but the first beginning at a place that is a multiple of the alignment."""
    rest = part
    while rest.num_bytes:
        taken, rest = _take(rest, chunk_bytes - rest.source % alignment)
        yield taken


def _take(part: Part, limit: int) -> tuple[Part, Part]:
    """The first ``limit`` bytes of a part, and the rest of it."""
    taken = min(part.num_bytes, limit)
    rest = Part(part.source + taken, part.dst + taken, part.num_bytes - taken)
    return part._replace(num_bytes=taken), rest
