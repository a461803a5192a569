"""Model libraries must not look for a hub: everything here is random and made on the spot."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
