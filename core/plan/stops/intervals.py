"""How often to save: the interval between checkpoints that loses least time.

D is the time that the chips stand still for a save, M the mean time between stops, U the time
that a save needs to reach storage in the background.

- `young`: τ = √(2DM), first order (Young, CACM 17(9), 1974).
- `daly`: τ = √(2DM)·(1 + ⅓√(D/2M) + D/18M) − D for D < 2M, else M: higher order (Daly, FGCS
  22(3), 2006, equation 37); the chips wait until a synchronous save is done.
- `asynchronous`: max(U / copies, √(2DM)): as many uploads are under way as host memory holds
  copies; a second one helps only where storage takes both at full rate.
"""

import math


def young(offload_s: float, mean_s: float) -> float:
    """First-order optimum, seconds."""
    return math.sqrt(2 * offload_s * mean_s)


def daly(offload_s: float, mean_s: float) -> float:
    """Higher-order optimum for a save that the chips wait for, seconds."""
    if offload_s >= 2 * mean_s:
        return mean_s
    part = offload_s / (2 * mean_s)
    return young(offload_s, mean_s) * (1 + math.sqrt(part) / 3 + part / 9) - offload_s


def asynchronous(offload_s: float, upload_s: float, mean_s: float, copies: int = 1) -> float:
    """Optimum with background uploads, of which `copies` may be under way."""
    return max(upload_s / copies, young(offload_s, mean_s))


def copies_held(upload_s: float, interval_s: float) -> int:
    """Checkpoints in host memory at once: ⌈U/τ⌉."""
    return max(1, math.ceil(upload_s / interval_s * (1 - 1e-12)))
