"""Operators on device tensors: the CPU's kernels on CPU aliases of the same bytes, charged to a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

import torch

from fmstream.emulator.cost import kernel_seconds
from fmstream.emulator.current import current
from fmstream.emulator.dry import DryValueError
from fmstream.emulator.generators import REAL_GENERATOR, owner_of, seeded
from fmstream.emulator.picking import spans_used
from fmstream.emulator.shapes import Operator, Schema, Shape, forecast, schema_of, with_tensors
from fmstream.emulator.tensors import (
    CPU_KEYS,
    NAME,
    Span,
    is_device,
    num_bytes_touched,
    num_elements_spanned,
    span_of,
)

aten = torch.ops.aten
Run = Callable[[], Any]


PICKING: Final = frozenset({"aten::embedding", "aten::index_select", "aten::gather", "aten::index"})
"""Operators that read no more of their first argument than they write."""


class Call:
    """One call of an operator, its device tensors sorted by what is done to them.

    Attributes:
        reads, writes: device tensors, those written not among those read.
        args, kwargs: the arguments with CPU aliases in place of device tensors.
        targets: CPU aliases of what ``out=`` names; the kernel writes beside them.
    """

    __slots__ = ("args", "deferred", "host", "kwargs", "op", "reads", "schema", "targets", "writes")

    def __init__(self, op: Operator, schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.op, self.schema = op, schema
        self.reads: list[torch.Tensor] = []
        self.writes: list[torch.Tensor] = []
        self.host: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []
        self.deferred = not current.machine.immediate
        writes, by_name = schema.writes, schema.writes_by_name
        self.args = [self._convert(value, writes[i]) for i, value in enumerate(args)]
        self.kwargs = {name: self._convert(value, by_name[name]) for name, value in kwargs.items()}
        if self.host:
            self._check_devices(args)

    def _convert(self, value: Any, written: bool) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type == NAME:
                (self.writes if written else self.reads).append(value)
                return current.memory.alias(value)
            return self._convert_host(value)
        if isinstance(value, (list, tuple)):
            return [self._convert(one, written) for one in value] if _may_hold_tensors(value) else value
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, REAL_GENERATOR):
            return owner_of(value).fork()
        return value

    def _convert_host(self, value: torch.Tensor) -> torch.Tensor:
        self.host.append(value)
        # A kernel takes the value that a number has at its launch.
        return value.clone() if self.deferred and value.device.type == "cpu" else value

    def _check_devices(self, args: Sequence[Any]) -> None:
        if not self.reads and not self.writes:
            return
        indices = args[self.schema.indices] if self.schema.indices >= 0 else ()
        for tensor in self.host:
            if any(tensor is index for index in indices):
                continue
            if tensor.dim() or tensor.device.type != "cpu":
                raise RuntimeError(
                    f"{self.schema.name}: expected all tensors to be on the same device, but found at least two "
                    f"devices, {NAME}:0 and {tensor.device}: move the tensor of shape {tuple(tensor.shape)} first"
                )

    def kernel(self) -> Run:
        """The CPU's kernel on the converted arguments."""
        op, args, kwargs = self.op, self.args, self.kwargs
        if not self.schema.is_random:
            return partial(_run_kernel, op, args, kwargs)
        if not self.schema.takes_generator:
            generator = current.generator.fork()
            return lambda: seeded(lambda: op(*args, **kwargs), generator)
        index = self.schema.names.index("generator")
        given = args[index] if index < len(args) else kwargs.get("generator")
        if given is None:
            if index < len(args):
                args[index] = current.generator.fork()
            else:
                kwargs["generator"] = current.generator.fork()
        return lambda: op(*args, **kwargs)


def _run_kernel(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return op(*args, **kwargs)
    except NotImplementedError:  # of a dtype that CUDA's kernel has and the CPU's has not
        if torch.float32 in (arg.dtype for arg in args if isinstance(arg, torch.Tensor)):
            raise
        return op(*map(_widen, args), **{name: _widen(value) for name, value in kwargs.items()})


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype != torch.bool else value


def _may_hold_tensors(values: Sequence[Any]) -> bool:
    return any(isinstance(value, (torch.Tensor, list, tuple)) for value in values)


def run_operator(op: Operator, *args: Any, **kwargs: Any) -> Any:
    """The fallback for every operator that the device has no kernel of its own for."""
    schema = schema_of(op)
    if schema.is_view:
        return op.redispatch(CPU_KEYS, *args, **kwargs)
    if schema.tensors:
        args = with_tensors(schema, args)
    call = Call(op, schema, args, kwargs)
    if call.writes and not schema.makes:
        return _run_in_place(call, args, kwargs)
    expected = forecast(op, schema, args, kwargs)
    if expected is None:
        return _run_at_once(call)
    tree = [_allocate(given) for given in expected.given]
    places = _flat(tree)
    outputs = [place for place in places if place is not None]
    _submit(call, [*outputs, *call.writes], expected.flops, lambda run: _fill(run, list(map(_alias, places))))
    return tuple(tree) if expected.is_tuple else tree[0]


def _alias(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else current.memory.alias(tensor)


def _allocate(given: Any) -> Any:
    if given is None:
        return None
    if isinstance(given, Shape):
        return current.memory.new(given.size, given.stride, given.dtype)
    return [_allocate(one) for one in given]


def _flat(value: Any) -> list[torch.Tensor | None]:
    """The tensors of nested lists in order, and None for those that are not there."""
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _flat(one)]
    return [value] if value is None or isinstance(value, torch.Tensor) else []


def _fill(run: Run, targets: Sequence[torch.Tensor | None]) -> Run:
    """Run a kernel and put what it gives at the places made for it.

    Some kernels of the CPU leave out what only their backward pass would need.
    """

    def fill() -> None:
        for target, result in zip(targets, _flat(run()), strict=True):
            if target is not None and result is not None and (result.numel() or not target.numel()):
                target.copy_(result)

    return fill


def _submit(
    call: Call, outputs: list[torch.Tensor], flops: int, wrap: Callable[[Run], Run], *, blocking: bool = False
) -> None:
    """Enqueue a call that reads and writes these device tensors."""
    knowledge = current.knowledge
    overwrites = not call.writes or call.schema.overwrites
    run: Run | None = None
    if knowledge is None or knowledge.learn(call.reads, outputs, call.host, overwrites=overwrites):
        run = wrap(call.kernel())
    enqueue(
        call.schema.name,
        run,
        call.reads,
        outputs,
        gemm_flops=0 if call.schema.is_attention else flops,
        attention_flops=flops if call.schema.is_attention else 0,
        blocking=blocking,
    )


def enqueue(
    name: str,
    run: Run | None,
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
    *,
    gemm_flops: int = 0,
    attention_flops: int = 0,
    blocking: bool = False,
) -> None:
    """Put a kernel on this thread's current stream."""
    machine = current.machine
    read, written = list(map(_spans_of, reads)), list(map(_spans_of, writes))
    read_bytes = list(map(_num_bytes, reads, read))
    written_bytes = sum(map(_num_bytes, writes, written))
    if read_bytes and name.partition(".")[0] in PICKING:
        read_bytes[0] = min(read_bytes[0], written_bytes)
    num_bytes = sum(read_bytes) + written_bytes
    machine.submit(
        machine.current_stream,
        name,
        "compute",
        kernel_seconds(machine.card, num_bytes, gemm_flops, attention_flops),
        run,
        list(chain.from_iterable(read)),
        list(chain.from_iterable(written)),
        launch_seconds=machine.card.launch_seconds,
        blocking=blocking,
    )


def _spans_of(tensor: torch.Tensor) -> list[Span]:
    return [span_of(tensor)] if (used := spans_used(tensor)) is None else used


def _num_bytes(tensor: torch.Tensor, spans: list[Span]) -> int:
    return num_bytes_touched(tensor, (0, sum(num_bytes for _, num_bytes in spans)))


def _run_in_place(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    schema = call.schema
    flops = 0
    outputs = [name for name in kwargs if schema.writes_by_name[name]]
    if outputs:
        flops = _prepare_outputs(call, outputs, args, kwargs)
    elif schema.flops is not None:
        expected = forecast(call.op, schema, args, kwargs)
        flops = expected.flops if expected else 0
    _submit(call, call.writes, flops, lambda run: run if not outputs else _fill(run, call.targets))
    written = [args[i] if i < len(args) else kwargs[schema.names[i]] for i in schema.written]
    if not schema.num_returns:
        return None
    return written[0] if schema.num_returns == 1 else tuple(written)


def _prepare_outputs(call: Call, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Give the tensors of ``out=`` their sizes, and the kernel others to fill; returns the FLOPs of the call."""
    expected = forecast(call.op, call.schema, args, kwargs)
    outputs = [output for output in _flat([kwargs[name] for name in names]) if output is not None]
    shapes: Sequence[Any] = expected.given if expected is not None else _shapes_by_running(call, names)
    for output, shape in zip(outputs, shapes, strict=False):
        if isinstance(shape, Shape) and tuple(output.size()) != tuple(shape.size):
            resize(output, shape.size)
    call.targets = [current.memory.alias(output) for output in outputs]
    call.kwargs.update((name, _scratch(kwargs[name])) for name in names)
    return expected.flops if expected else 0


def _scratch(value: Any) -> Any:
    """Empty CPU tensors, which a kernel resizes as it likes."""
    if isinstance(value, torch.Tensor):
        return torch.empty(0, dtype=value.dtype, device="cpu")
    return [_scratch(one) for one in value]


def _shapes_by_running(call: Call, names: Sequence[str]) -> list[Shape]:
    _settle(call)
    results = _flat(call.op(*call.args, **{**call.kwargs, **{name: _scratch(call.kwargs[name]) for name in names}}))
    return [Shape(result.size(), result.stride(), result.dtype) for result in results if result is not None]


def _settle(call: Call) -> None:
    """Have the values that a call reads, and nothing virtual happen."""
    if current.knowledge is not None and not current.knowledge.knows(call.reads, call.host):
        raise DryValueError(
            f"{call.schema.name}: what it gives depends on values that a dry run does not have: run it for real, or "
            "make the values on the host"
        )
    current.machine.settle(current.machine.current_stream)


def _run_at_once(call: Call) -> Any:
    """Run a call whose result's shape only running it can tell; the host waits for it, as on CUDA."""
    _settle(call)
    result = call.kernel()()
    is_tuple = isinstance(result, (list, tuple))
    results: list[torch.Tensor] = []
    made: list[Any] = []
    for value in result if is_tuple else (result,):
        if isinstance(value, torch.Tensor):
            results.append(value)
            made.append(current.memory.new(value.size(), _dense_stride(value), value.dtype))
        else:
            made.append(value)
    outputs = [value for value in made if is_device(value)]
    fill = _fill(lambda: results, [current.memory.alias(output) for output in outputs])
    kept = fill if current.knowledge is None else current.knowledge.keep(outputs, fill)
    enqueue(call.schema.name, kept, call.reads, [*outputs, *call.writes], blocking=True)
    return tuple(made) if is_tuple else made[0]


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if nothing lies between its elements, else those of a copy."""
    if num_elements_spanned(tensor.size(), tensor.stride()) == tensor.numel():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def resize(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Give a device tensor another size, and new memory if its storage is too small; what it held is lost then."""
    stride = torch.empty(tuple(size), device="meta").stride()
    end = tensor.storage_offset() + num_elements_spanned(size, stride)
    if end * tensor.element_size() <= tensor.untyped_storage().nbytes():
        return tensor.set_(tensor.untyped_storage(), tensor.storage_offset(), size, stride)
    fresh = current.memory.new(size, stride, tensor.dtype)
    old = tensor.detach()
    tensor.set_(fresh.untyped_storage(), 0, size, stride)
    if old.numel():
        fresh.view(-1)[: old.numel()].copy_(old.reshape(-1))
    return tensor
