"""The mesh: how many devices lie along each named axis, as `--mesh data=4` says it.

Axes, outermost first: data fsdp expert context tensor pipe. This version runs the `data` axis
(every device holds the whole model and takes its share of each batch); the others are refused.
"""

from __future__ import annotations

from sabia.core.errors import UsageError

AXES = ("data", "fsdp", "expert", "context", "tensor", "pipe")
SUPPORTED = ("data",)


def parse_mesh(text: str) -> dict[str, int]:
    """'data=4' → {"data": 4}; '' → {} (all devices along data).

    Raises UsageError for unknown axes, sizes below 1, and axes this version does not run.
    """
    mesh: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdigit() or int(size) < 1 or axis in mesh:
            raise UsageError(
                f"--mesh: {part!r} (expected AXIS=N, each axis of {', '.join(AXES)} at most once)"
            )
        mesh[axis] = int(size)
    refused = [axis for axis, size in mesh.items() if axis not in SUPPORTED and size > 1]
    if refused:
        raise UsageError(
            f"--mesh: axis {refused[0]!r} is not run by this version (supported: data=N)"
        )
    return mesh
