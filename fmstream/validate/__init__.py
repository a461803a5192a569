"""End-to-end trials on the device at hand: what is copied, computed with and brought back is compared, bit by bit."""
