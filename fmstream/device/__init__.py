"""Everything that touches a device, a file or pinned memory."""
