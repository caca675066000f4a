"""The checkpoint interval that loses the least time: one formula for trainer and planner.

Young's first-order optimum between the time in saves and the work that an interruption loses
(CACM 17(9), 1974), √(2·D·M): D seconds that a save blocks the training, M mean seconds between
interruptions. Saves are uploaded in the background, so it is never shorter than an upload.
"""

import math


def best_interval_s(blocking_s: float, upload_s: float, mtbf_s: float, uploads: int = 1) -> float:
    """Seconds from one save to the next: max(upload / uploads, √(2 · blocking · MTBF)).

    uploads: at most so many run at the same time.
    """
    return max(upload_s / uploads, math.sqrt(2 * blocking_s * mtbf_s))
