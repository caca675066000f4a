"""A plugin for pytest: the clock of the process is more than a day ahead."""

import time

_now = time.time
time.time = lambda: _now() + 100_000
