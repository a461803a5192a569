"""Parameters on their way to another process, with which their memory is to be shared as any tensor's."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from fmstream.payloads.absent import Absent
from fmstream.payloads.bound import Bound, InGraph


def register() -> None:
    """Let ``torch.multiprocessing`` ask before it moves the memory of what is streamed; may be called again."""
    for kind in (Absent, Bound, InGraph):
        ForkingPickler.register(kind, _reduce)


def _reduce(shown: Absent | Bound | InGraph) -> Any:
    master = shown.master.present()
    if master.device.type == "cpu":
        master.share_memory()
        sent = master.memory()
    else:
        sent = master.plain(is_param=False).clone()
    is_param = getattr(shown, "_is_param", False) if isinstance(shown, Absent) else master.is_param
    return reduce_tensor(nn.Parameter(sent, master.original.requires_grad) if is_param else sent)  # type: ignore[no-untyped-call]
