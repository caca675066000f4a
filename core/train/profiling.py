"""Profiler traces: `--profile 100:105` writes a trace of steps 100 to 105 into DIR/profile/.

torch: a Chrome trace (chrome://tracing, Perfetto) of each process, `trace-RANK.json.gz`, and its
costliest operations as text. JAX: the format of XProf and TensorBoard.
"""

import contextlib
from pathlib import Path
from typing import Any

from sabia.core import notes
from sabia.core.errors import UsageError

TABLE_ROWS = 30


def parse_steps(text: str) -> tuple[int, int]:
    """'100:105' → (100, 105), steps counted from 1, both traced."""
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise UsageError(f"--profile: {text!r} (expected steps from:to, such as 100:105)")
    return int(first), int(last)


class Profile:
    """Traces the steps `first` to `last` of this process."""

    def __init__(self, steps: tuple[int, int], backend: str, run: Path, rank: int) -> None:
        self.first, self.last = steps
        self.backend, self.directory, self.rank = backend, run / "profile", rank
        self._torch: Any = None
        self._running = False

    def before(self, step: int) -> None:
        """Call before step `step`, counted from 1."""
        if self.first <= step <= self.last and not self._running:
            self._running = True
            self.directory.mkdir(parents=True, exist_ok=True)
            if self.backend == "jax":
                import jax

                jax.profiler.start_trace(str(self.directory))
            else:
                from torch import profiler

                self._torch = profiler.profile(record_shapes=True, profile_memory=True)
                self._torch.start()

    def after(self, step: int) -> None:
        """Call after step `step`."""
        if self._running and step >= self.last:
            self.close()

    def close(self) -> None:
        """Write the trace, if one is being recorded."""
        if not self._running:
            return
        self._running, self.first, self.last = False, 0, 0
        with contextlib.suppress(OSError):
            self._stop()
            notes.note(f"trace of this process in {self.directory}")

    def _stop(self) -> None:
        if self.backend == "jax":
            import jax

            jax.profiler.stop_trace()
            return
        import torch

        self._torch.stop()
        self._torch.export_chrome_trace(str(self.directory / f"trace-{self.rank:04d}.json.gz"))
        averages = self._torch.key_averages()
        on_gpu = torch.cuda.is_available()
        key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = averages.table(sort_by=key, row_limit=TABLE_ROWS)
        (self.directory / f"operations-{self.rank:04d}.txt").write_text(table)
