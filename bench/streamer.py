"""A process that does nothing but stream: what it needs of memory is what streaming needs.

It is started by `weights_disk` as ``python -m bench.streamer CASE`` and prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PASSES = 8


@dataclass(frozen=True, slots=True)
class Case:
    """What to stream.

    Attributes:
        checkpoint: the safetensors file.
        expected: file that holds the output of the resident model.
        width, hidden, num_blocks: shape of the model.
        num_tokens: rows of the input.
        memory: as in `fmstream.StreamConfig`.
        threads: of torch.
        group: folder of the control group to join first, None for none.
    """

    checkpoint: str
    expected: str
    width: int
    hidden: int
    num_blocks: int
    num_tokens: int
    memory: str
    threads: int
    group: str | None = None

    def to_json(self) -> str:
        """As the process takes it."""
        return json.dumps(asdict(self))


def main(text: str) -> None:
    """Stream, and print what it took."""
    case = Case(**json.loads(text))
    if case.group is not None:
        # Before torch is imported, so that its memory counts too.
        (Path(case.group) / "cgroup.procs").write_text(str(os.getpid()))
    print(json.dumps(measure(case)))


def measure(case: Case) -> dict[str, Any]:
    """Seconds of each pass, resident memory before and during, and whether the output was the expected one."""
    import torch

    import fmstream
    from bench.disk import Shape, build, tokens

    torch.set_num_threads(case.threads)
    shape = Shape(case.width, case.hidden, case.num_blocks)
    x = tokens(case.num_tokens, case.width)
    with torch.inference_mode():
        _stream_a_little(build(Shape(64, 64, 4)), x[:, :64])
        model = fmstream.load(lambda: build(shape), case.checkpoint)
        before = memory_of_this_process()
        forget_peak()
        seconds = []
        with fmstream.stream(model, memory=case.memory) as handle:
            for _ in range(PASSES):
                began = time.perf_counter()
                output = handle(x)
                seconds.append(time.perf_counter() - began)
            during = memory_of_this_process()
    equal = torch.equal(output, torch.load(case.expected))
    return {"before": before, "during": during, "seconds": seconds, "equal": equal}


def _stream_a_little(module: Any, x: Any) -> None:
    """Bring in all code and start all that the first pass starts: none of it is memory for weights."""
    import fmstream

    with fmstream.stream(module, memory="50%") as handle:
        for _ in range(3):
            handle(x)


def memory_of_this_process() -> dict[str, int]:
    """Bytes that are resident now, those of them that show files, and the peak of all."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"rss": "VmRSS", "file": "RssFile", "anonymous": "RssAnon", "peak": "VmHWM"}
    return {name: int(fields[field].split()[0]) << 10 for name, field in names.items()}


def forget_peak() -> None:
    """Let the peak be counted from now on."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main(sys.argv[1])
