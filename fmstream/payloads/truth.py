"""Where the truth of one parameter lies: the user's own object, its memory, or a file that this shows."""

from __future__ import annotations

import ctypes

import torch

from fmstream.core.plan import ALIGNMENT
from fmstream.device.files import Staging
from fmstream.device.homes import Home, MemoryHome
from fmstream.payloads.views import bytes_of, outline, same_view

STAGING_BYTES = 1 << 20
"""For reads on the calling thread."""


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last, gaps included."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class Truth:
    """The bytes of a parameter.

    ``original`` is the user's own ``nn.Parameter``, or a plain tensor within one that is a wrapper.  Its memory is the
    truth where ``home`` is a `MemoryHome`, and shows it (a private mapping of the file) where that is a `FileHome`.

    Attributes:
        device: where the parameter is computed with.
        size, stride, dtype, address: the parameter's, as it was looked at last.
        span: bytes from its first element to the end of its last, gaps included.
        num_bytes: bytes in fast memory, a multiple of 64.
    """

    __slots__ = ("address", "device", "dtype", "home", "num_bytes", "original", "size", "span", "stride")

    def __init__(self, original: torch.Tensor, device: torch.device) -> None:
        self.original = original
        self.device = device
        self.size = original.shape
        self.stride = original.stride()
        self.dtype = original.dtype
        self.span = span_bytes(original)
        self.num_bytes = -(-self.span // ALIGNMENT) * ALIGNMENT
        self.address = original.data_ptr()
        self.home: Home = self._memory_home()

    @property
    def is_outdated(self) -> bool:
        """Whether the user's own parameter object has come to hold other data."""
        return outline(self.original) != (self.address, self.dtype, self.size, self.stride)

    def memory(self) -> torch.Tensor:
        """A plain tensor over the master's own memory."""
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return self.original.detach()

    def former(self) -> torch.Tensor:
        """A plain tensor of host memory with what the user's parameter held when it was looked at last.

        It is the master's own memory, or what is in the file that it shows.
        """
        home = self.home
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if isinstance(home, MemoryHome):
                assert isinstance(home.keep, torch.Tensor)
                return home.keep.detach()
            return self._copied().view(self.dtype).as_strided(self.size, self.stride)

    def value(self) -> torch.Tensor:
        """The true value as a plain tensor on the execution device, aligned to 64 bytes.

        On the CPU it is the master's own memory where that is aligned.
        """
        if self.device.type == "cpu":
            return self.host_value()
        with torch.inference_mode(False), torch.no_grad():
            flat = self.host_bytes().to(self.device)
            return flat.view(self.dtype).as_strided(self.size, self.stride)

    def host_value(self) -> torch.Tensor:
        """The true value as a plain tensor of host memory, aligned to 64 bytes."""
        home = self.home
        if isinstance(home, MemoryHome) and home.address % ALIGNMENT == 0:
            return self.former()
        with torch.inference_mode(False), torch.no_grad():
            return self._copied().view(self.dtype).as_strided(self.size, self.stride)

    def value_like(
        self, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], byte_offset: int
    ) -> torch.Tensor:
        """A view of the true value."""
        return same_view(self.value(), self.span, dtype, size, stride, byte_offset)

    def copy_to(self, address: int) -> None:
        """Bring the master's bytes to a host address, on the calling thread."""
        home = self.home
        if isinstance(home, MemoryHome):
            ctypes.memmove(address, home.address, self.span)
            return
        staging = Staging(STAGING_BYTES)
        try:
            home.file.read_into(address, home.offset, self.span, staging)
        finally:
            staging.close()

    def host_bytes(self) -> torch.Tensor:
        """The true bytes as a flat tensor of host memory: a view of the master's own where the truth lies there."""
        with torch.inference_mode(False), torch.no_grad():
            if isinstance(self.home, MemoryHome):
                flat = self.former().as_strided((self.span // self.dtype.itemsize,), (1,))
                return flat.view(torch.uint8)
            return self._copied()

    def _copied(self) -> torch.Tensor:
        buffer = torch.empty(self.span, dtype=torch.uint8, device="cpu")
        self.copy_to(buffer.data_ptr())
        return buffer

    def differs(self, value: torch.Tensor) -> bool:
        """Whether the bytes of a tensor of the same size and strides are others."""
        return not torch.equal(bytes_of(value, self.span), self.host_bytes())

    def version(self) -> int:
        """Autograd's count of in-place writes to the user's parameter; 0 where it keeps none."""
        return 0 if self.original.is_inference() else self.original._version

    def take_memory(self) -> None:
        """The master's own memory was written: it is the truth, and no file is read over it."""
        self.address = self.original.data_ptr()
        self.home = self._memory_home()

    def _memory_home(self) -> MemoryHome:
        # An alias keeps the memory, should the user's parameter come to hold other data.
        return MemoryHome(self.original.data_ptr(), self.span, self.memory())
