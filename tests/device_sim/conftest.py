"""What needs the simulated device is collected only where it is there: in `make device-sim`, and a part of it in
`make quick`."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("DEVICE_SIM") == "1" else ["test_on_device_*.py"]
