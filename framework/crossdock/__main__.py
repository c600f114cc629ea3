"""``python -m crossdock`` is the ``crossdock`` command."""

from __future__ import annotations

import sys

from crossdock.cli.main import main

sys.exit(main())
