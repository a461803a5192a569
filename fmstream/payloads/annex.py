"""What a session has only where it computes on an accelerator."""

from __future__ import annotations

from fmstream.actors.compute import Executor
from fmstream.actors.prefetch import PrefetchActor
from fmstream.actors.tape import Timeline
from fmstream.actors.uploads import Uploads
from fmstream.config import StreamConfig
from fmstream.core.plan import Costs
from fmstream.core.telemetry import Telemetry
from fmstream.device.accelerator import Accelerator, DeviceSlab
from fmstream.device.homes import FileHome
from fmstream.payloads import budget
from fmstream.payloads.pinning import PinnedHomes
from fmstream.payloads.placement import Placement
from fmstream.payloads.room import Room
from fmstream.payloads.weights import Weights


class Annex:
    """Pinned masters, the place of what is not streamed, the device's timeline, and the room for activations."""

    def __init__(self, device: Accelerator, telemetry: Telemetry, floor_bytes: int) -> None:
        self.device = device
        self.room = Room(device, floor_bytes)
        self._telemetry = telemetry
        self._timeline = Timeline(device.mark(timed=True), telemetry.started)
        self._placement = Placement(device.torch_device)
        self._pinned = PinnedHomes(device.pins)

    @property
    def pinned_bytes(self) -> int:
        """Host memory that is pinned for weights."""
        return self._pinned.num_bytes

    def loads(self, weights: Weights, prefetch: PrefetchActor) -> Uploads:
        """Loads that are enqueued."""
        return Uploads(weights, self.device, prefetch, self._telemetry, self._timeline)

    def learn_costs(self, executor: Executor, known: Costs | None) -> Costs:
        """What the link does: as is known, or from copies into the executor's memory, which nothing uses yet."""
        if known is not None:
            self.device.costs = known
            return known
        slab = executor.take_memory()
        assert isinstance(slab, DeviceSlab)
        return self.device.probe(slab.memory)

    def pin(self, weights: Weights, config: StreamConfig) -> None:
        """Bring masters to pinned memory, as far as the options and the system allow."""
        limit = budget.pinned_bytes(config)
        bound = [master for master in weights.masters if master.index not in weights.unbound]
        movable = [master for master in bound if not weights.is_watched(master)]
        in_ram = [master for master in movable if not isinstance(master.home, FileHome)]
        refused = self._pinned.take(in_ram, limit - self.pinned_bytes)
        if refused == 0 and config.spill_dir is None:
            in_files = [master for master in movable if isinstance(master.home, FileHome)]
            left = min(limit - self.pinned_bytes, budget.file_bytes_to_keep())
            refused = self._pinned.take(in_files, left)
        if refused:
            self._telemetry.notes.append(
                f"the system refused to pin {refused} bytes of host memory: those weights are copied through staging, "
                "which is slower and changes no result (raise the limit of locked memory, or close what else pins it)"
            )

    def place(self, weights: Weights) -> None:
        """Bring what is not streamed to the device."""
        streamed = {id(master.original) for master in weights.masters} | {id(shell.wrapper) for shell in weights.shells}
        moved = self._placement.place([m for root in weights.roots.values() for m in root.modules()], streamed)
        if moved:
            self._telemetry.notes.append(f"{moved} bytes of buffers and parameters are on the device beside the memory")

    def bring_back(self) -> None:
        """Undo `place`."""
        self._placement.give_back()

    def unpin(self) -> None:
        """Undo `pin`; no copy may be on its way."""
        self._pinned.give_back()
