"""CUDA sources, read with ``importlib.resources.files("fmstream.cuda")``."""
