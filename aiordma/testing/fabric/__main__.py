"""Entry point of ``python -m aiordma.testing.fabric``."""

from __future__ import annotations

import sys

from aiordma_fabric import main

if __name__ == "__main__":
    sys.exit(main())
