"""The figures of a run with interruptions (process.py says what happens in it)."""

from dataclasses import dataclass


def segments_within(limit_s: float, lead_s: float, segment_s: float) -> int:
    """Segments that a job of `limit_s` completes and uploads after its restart."""
    return int((limit_s - lead_s) / segment_s * (1 + 1e-12))


@dataclass(frozen=True)
class Process:
    """One run on one cluster; seconds, and rates per second of the whole cluster.

    `segment_s` includes the blocking time of its save.
    """

    segments: int
    segment_s: float
    upload_s: float
    restart_s: float
    failure_rate: float = 0.0
    preemption_rate: float = 0.0
    capacity_wait_s: float = 0.0
    repair_s: float = 0.0
    spare_nodes: int = 0
    job_limit_s: float | None = None
    queue_s: float = 0.0
    peer_copies: bool = False

    @property
    def rate(self) -> float:
        """Interruptions per second while the machines run."""
        return self.failure_rate + self.preemption_rate

    @property
    def segments_a_job(self) -> int:
        """Segments within a job's limit; all of them without one."""
        if self.job_limit_s is None:
            return self.segments
        return segments_within(self.job_limit_s, self.restart_s + self.upload_s, self.segment_s)
