"""`python -m aiordma ...`: the same as the command `aiordma ...`."""

from __future__ import annotations

import sys

from aiordma.cli.__main__ import main

sys.exit(main())
