"""The figures of a run with interruptions (process.py says what happens in it)."""

from dataclasses import dataclass


def segments_within(limit_s: float, lead_s: float, segment_s: float) -> int:
    """Segments that a job of `limit_s` completes and uploads after its restart."""
    return int((limit_s - lead_s) / segment_s * (1 + 1e-12))


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Waits for machines, and job limits; seconds.

    After a preemption of the whole cluster its machines are away for `capacity_wait_s` on average,
    not billed. The repair of a failed node takes `repair_s` on average; `spare_nodes` replace it
    and are billed. A job ends after `job_limit_s` (None: never) and the next one waits `queue_s`.
    With `peer_copies` each node's share of a save is also in another node's memory, so that the
    failure of one node loses nothing of an upload (Gemini, SOSP 2023); a preemption of all does.
    """

    capacity_wait_s: float = 0.0
    repair_s: float = 0.0
    spare_nodes: int = 0
    job_limit_s: float | None = None
    queue_s: float = 0.0
    peer_copies: bool = False


@dataclass(frozen=True)
class Process(Waits):
    """One run on one cluster; seconds, and rates per second of the whole cluster.

    `segment_s` includes the blocking time of its save.
    """

    segments: int
    segment_s: float
    upload_s: float
    restart_s: float
    failure_rate: float = 0.0
    preemption_rate: float = 0.0

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
