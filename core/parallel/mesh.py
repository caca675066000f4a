"""The mesh: the number of devices along each named axis, as `--mesh fsdp=8,tensor=4` gives it.

  data     copies of the model, each with its own rows of a batch
  fsdp     rows likewise, parameters and optimizer state split (ZeRO-3, arXiv 1910.02054)
  expert   rows likewise, experts split; tokens are sent to their experts and back
  context  the tokens of a row split
  tensor   heads, inner widths and vocabulary split (Megatron-LM, arXiv 1909.08053)
  pipe     layers split into stages (torch only)
Ranks count along tensor fastest, then context, expert, fsdp, data, and pipe slowest, so that the
axes that communicate most are on neighbouring devices.
"""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sabia.core.errors import UsageError


def axis(splits: str = "", weights: tuple[str, ...] = (), activations: tuple[str, ...] = ()) -> Any:
    """A field of Mesh. splits: what of a batch the axis splits (rows, or the tokens of a row), or
    layers. weights, activations: the logical axes of parameters and of activations that it splits.
    """
    return field(default=1, metadata={"splits": splits, "weights": weights, "within": activations})


_HEADS = ("heads", "kv_heads")


@dataclass(frozen=True)
class Mesh:
    """Devices along each axis; this is the only place that lists the axes and what they split.

    `split_heads` is a whole sequence of some heads: it is split over both tensor and context.
    """

    data: int = axis("rows")
    fsdp: int = axis("rows", weights=("embed", "latent"))
    expert: int = axis("rows", weights=("expert",))
    context: int = axis("tokens", activations=("sequence", "split_heads"))
    tensor: int = axis(
        weights=("vocab", *_HEADS, "mlp"), activations=(*_HEADS, "mlp", "vocab", "split_heads")
    )
    pipe: int = axis("layers")

    @property
    def size(self) -> int:
        """The number of all devices."""
        return math.prod(asdict(self).values())

    @property
    def rows(self) -> int:
        """The number of parts into which the rows of a batch are split."""
        return math.prod(self.along(axis) for axis in ROW_AXES)

    def along(self, axis: str) -> int:
        """Devices along `axis`."""
        return int(getattr(self, axis))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in RANK_ORDER: reshape a list of devices to this."""
        return tuple(self.along(axis) for axis in RANK_ORDER)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of device `rank` along each axis."""
        position = {}
        # the digits of the rank in mixed radix, from the fastest axis to the slowest
        for axis in reversed(RANK_ORDER):
            rank, position[axis] = divmod(rank, self.along(axis))
        return position

    def row_part(self, rank: int) -> int:
        """Which part of a batch's rows device `rank` works on."""
        at, part = self.coordinates(rank), 0
        for axis in ROW_AXES:
            part = part * self.along(axis) + at[axis]
        return part

    def peers(self, axes: tuple[str, ...]) -> list[list[int]]:
        """Groups of ranks that differ only along `axes`, each in rank order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            # peers have the same coordinates along all other axes
            at = self.coordinates(rank)
            key = tuple(at[axis] for axis in RANK_ORDER if axis not in axes)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def __str__(self) -> str:
        given = [f"{axis}={n}" for axis, n in asdict(self).items() if n > 1]
        return ",".join(given) or "data=1"


_SPLITS = {each.name: each.metadata["splits"] for each in fields(Mesh)}
AXES = tuple(_SPLITS)
# ranks count along the last axis fastest
RANK_ORDER = tuple(sorted(AXES, key=lambda name: _SPLITS[name] != "layers"))
ROW_AXES = tuple(name for name in AXES if _SPLITS[name] == "rows")
TOKEN_AXES = tuple(name for name in AXES if _SPLITS[name] in ("rows", "tokens"))
# logical axis of a weight → the mesh axis that splits it; of an activation → one or several
WEIGHTS = {name: each.name for each in fields(Mesh) for name in each.metadata["weights"]}
ACTIVATIONS: dict[str, tuple[str, ...]] = {"batch": ROW_AXES}
for each in reversed(fields(Mesh)):  # tensor before context
    for logical in each.metadata["within"]:
        ACTIVATIONS[logical] = (*ACTIVATIONS.get(logical, ()), each.name)


def parse_mesh(text: str) -> dict[str, int]:
    """'fsdp=4,tensor=2' → {"fsdp": 4, "tensor": 2}; '' → {}; raises UsageError."""
    mesh: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdigit() or int(size) < 1 or axis in mesh:
            raise UsageError(
                f"--mesh: {part!r} (expected AXIS=N, each axis of {', '.join(AXES)} at most once)"
            )
        mesh[axis] = int(size)
    return mesh


def make_mesh(text: str, devices: int, how: str = "") -> Mesh:
    """The mesh that `--mesh` describes over `devices`; the rest of them is along `data`.

    Raises UsageError if the product is not the number of devices; `how` explains how to get more.
    """
    sizes = parse_mesh(text)
    given = math.prod(sizes.values())
    if "data" not in sizes and devices % given == 0:
        sizes["data"] = devices // given
    mesh = Mesh(**sizes)
    if mesh.size != devices:
        raise UsageError(
            f"--mesh: {text} needs {mesh.size} devices, there are {devices}" + (how and f" ({how})")
        )
    return mesh
