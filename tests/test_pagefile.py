"""The file of pages of keys and values."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from fmstream.device.pagefile import PageFile
from fmstream.errors import ConfigError


def test_a_file_that_cannot_be_opened_again_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed = [], []
    real_open, real_close = os.open, os.close

    def refuse_reading(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if not flags & os.O_CREAT:
            raise OSError(errno.EMFILE, "too many open files", path)
        opened.append(real_open(path, flags, *args, **kwargs))
        return opened[-1]

    def close(fd: int) -> None:
        closed.append(fd)
        real_close(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse_reading)
        patch.setattr(os, "close", close)
        with pytest.raises(ConfigError, match="too many open files"):
            PageFile(tmp_path, 4096)
    assert opened
    assert opened == closed
    assert not list(tmp_path.iterdir())
