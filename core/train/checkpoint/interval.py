"""When to save: every N steps, every N seconds, or at the optimal interval.

`auto` uses core.save_interval with the blocking and upload times that are measured in the run; the
latter with a tenth more, so that a save never begins before the last upload has ended. The default
mean time between failures is that of the published Llama 3 405B run (arXiv 2407.21783, section
3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs, so 50,700 device-hours each) divided
by the number of devices, and at most a week.
"""

from dataclasses import dataclass

from sabia.core import units
from sabia.core.save_interval import best_interval_s

DEVICE_MTBF_S = 54 * 86400 * 16384 / 419
LONGEST_MTBF_S = 7 * 86400.0
FIRST_SAVE_S = 120.0
UPLOAD_SLACK = 1.1


def default_mtbf_s(devices: int) -> float:
    """Expected seconds between failures of a run on this number of devices."""
    return min(DEVICE_MTBF_S / max(1, devices), LONGEST_MTBF_S)


@dataclass(frozen=True)
class Interval:
    """One of `steps`, `seconds` or `auto` (none of them: never); mtbf_s: 0 for the default."""

    steps: int = 0
    seconds: float = 0.0
    auto: bool = False
    mtbf_s: float = 0.0
    devices: int = 1

    def due(
        self, step: int, waited_s: float, blocking_s: float | None = None, upload_s: float = 0.0
    ) -> bool:
        """Whether to save after step `step` (counted from 1), `waited_s` after the last save.

        blocking_s: of the last save; None before the first. upload_s: see Saver.upload_s; 0
        without a URL.
        """
        if self.steps:
            return step % self.steps == 0
        wanted = self.wanted_s(blocking_s, upload_s)
        return bool(wanted) and waited_s >= wanted

    def wanted_s(self, blocking_s: float | None, upload_s: float = 0.0) -> float:
        """Seconds from the last save to the next; 0 if there is no limit of time."""
        if not self.auto:
            return self.seconds
        if blocking_s is None:
            return FIRST_SAVE_S
        mtbf_s = self.mtbf_s or default_mtbf_s(self.devices)
        return best_interval_s(blocking_s, UPLOAD_SLACK * upload_s, mtbf_s)


def parse_interval(text: str, mtbf_s: float = 0.0, devices: int = 1) -> Interval:
    """'500' steps, '10m' by time, 'auto' (0 `mtbf_s`: not known). Raises UsageError for others."""
    if text == "auto":
        return Interval(auto=True, mtbf_s=mtbf_s, devices=devices)
    if text.isdigit():
        return Interval(steps=int(text))
    return Interval(seconds=units.parse_duration(text, "--save-every"))
