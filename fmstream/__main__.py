"""``python -m fmstream``."""

import sys

from fmstream.cli import main

sys.exit(main())
