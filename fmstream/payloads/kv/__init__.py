"""The KV cache in pages: a pool of fixed size on the device, host memory and a file behind it."""
