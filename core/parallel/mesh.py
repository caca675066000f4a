"""The mesh: the number of devices along each named axis, as `--mesh fsdp=8,tensor=4` gives it.

  data     copies of the model, each with its own rows of a batch
  fsdp     rows likewise, parameters and optimizer state split (ZeRO-3, arXiv 1910.02054)
  expert   rows likewise, experts split; tokens are sent to their experts and back
  context  the tokens of a row split
  tensor   heads, inner widths and vocabulary split (Megatron-LM, arXiv 1909.08053)
  pipe     layers split into stages (torch only)
Ranks count along tensor fastest, then context, expert, fsdp, data, and pipe slowest, so that the
axes that communicate most are on neighbouring devices.

The axes say by logical names what they split, for both backends: a weight's dimension is split over
one mesh axis or is whole; an activation's over one or several. `check_fits` refuses meshes that
would cut heads, experts or widths unevenly and names the sizes that fit. A vocabulary that cannot
be divided (that of an open checkpoint is fixed) is whole on every device of `tensor`. The
up-projection of a latent has no dimension of the residual stream: there fsdp splits the latent, if
it divides that. `stage_layers` and `stages_of` divide the layers over a pipeline.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.spec.layers import GatedDeltaNet
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec


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


WHOLE_IF_UNEVEN = ("vocab", "latent")  # sizes that a mesh need not divide
Split = tuple[str | None, ...]


def weight_split(tensor: TensorSpec, mesh: Mesh) -> Split:
    """The mesh axis that splits each dimension of a weight, None where it is whole."""
    return tuple(
        None if name == "latent" and "embed" in tensor.axes else _axis(name, size, mesh)
        for name, size in zip(tensor.axes, tensor.shape, strict=True)
    )


def _axis(name: str, size: int, mesh: Mesh) -> str | None:
    axis = WEIGHTS.get(name)
    if axis is None or mesh.along(axis) == 1:
        return None
    return None if name in WHOLE_IF_UNEVEN and size % mesh.along(axis) else axis


def activation_split(axes: tuple[str | None, ...], mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """The mesh axes (of size above 1) that split each dimension of an activation."""
    splits = (ACTIVATIONS.get(name or "", ()) for name in axes)
    return tuple(tuple(axis for axis in split if mesh.along(axis) > 1) for split in splits)


def axis_sizes(spec: ModelSpec, mesh: Mesh) -> dict[str, frozenset[int]]:
    """The sizes that activations may have along logical axes on one device of a mesh."""
    whole: dict[str, set[int]] = {"embed": {spec.hidden_size}}
    for part in dict.fromkeys(layer.mixer for layer in spec.layers):
        units: dict[str, int] = part.split_units()
        for name, count in units.items():
            whole.setdefault(name, set()).add(count)
        if isinstance(part, GatedDeltaNet):
            whole["heads"].add(part.value_heads)
    heads = whole.get("heads", set()) | whole.get("kv_heads", set())
    whole |= {"heads": heads, "kv_heads": heads, "split_heads": heads}
    parts = {n: math.prod(mesh.along(axis) for axis in ACTIVATIONS.get(n, ())) for n in whole}
    return {name: frozenset(n // parts[name] for n in sizes) for name, sizes in whole.items()}


def shard_slices(shape: tuple[int, ...], split: Split, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """The part of a whole array that device `rank` holds."""
    position = mesh.coordinates(rank)
    slices = []
    for size, axis in zip(shape, split, strict=True):
        part = size // mesh.along(axis) if axis else size
        start = position[axis] * part if axis else 0
        slices.append(slice(start, start + part))
    return tuple(slices)


def owns(split: Split, mesh: Mesh, rank: int) -> bool:
    """Whether `rank` is the first of the devices that hold the same shard of a weight."""
    position = mesh.coordinates(rank)
    # along `pipe` devices hold different weights, so it does not count
    return all(not n for axis, n in position.items() if axis not in split and axis != "pipe")


def check_fits(spec: ModelSpec, mesh: Mesh, rows: int = 0, length: int = 0) -> None:
    """Raise UsageError unless every split is even; rows and length (0: unknown) of a step."""
    counts: dict[str, list[tuple[str, int]]] = {}
    if rows % mesh.rows:
        sizes = ", ".join(f"{axis}={mesh.along(axis)}" for axis in ROW_AXES)
        raise UsageError(
            f"--batch: {rows} rows over {sizes} (expected a multiple of {mesh.rows}, such as "
            f"{-(-rows // mesh.rows) * mesh.rows})"
        )
    row = [("context", "the tokens of a row", length)] if length else []
    for axis, what, count in (*_counts(spec), *row):
        counts.setdefault(axis, []).append((what, count))
    for axis, pairs in counts.items():
        size = mesh.along(axis)
        uneven = next((pair for pair in pairs if pair[1] % size), None)
        if uneven:
            # what fits divides all counts; suggest the three sizes next to the one given
            common = math.gcd(*(count for _, count in pairs))
            fits = [n for n in range(1, common + 1) if common % n == 0]
            near = sorted(fits, key=lambda n: (abs(n - size), n))[:3]
            raise UsageError(
                f"--mesh: {axis}={size} does not divide {uneven[0]} ({uneven[1]:,}); sizes that "
                "fit: " + ", ".join(str(n) for n in sorted(near))
            )
    for part in dict.fromkeys(layer.mixer for layer in spec.layers):
        # the recurrence runs along whole rows, so both axes split its heads
        ways = mesh.tensor * mesh.context
        if isinstance(part, GatedDeltaNet) and part.key_heads % ways:
            raise UsageError(
                f"--mesh: context={mesh.context} times tensor={mesh.tensor} does not divide the "
                f"key-heads of delta nets ({part.key_heads}), each of which runs along whole rows"
            )
    if mesh.pipe > len(spec.layers):
        layers = f"{len(spec.layers)} layers (expected at most {len(spec.layers)})"
        raise UsageError(f"--mesh: pipe={mesh.pipe} with {layers}")
    if mesh.expert > 1 and not any(axis == "expert" for axis, _, _ in _counts(spec)):
        raise UsageError(f"--mesh: expert={mesh.expert} with a {spec.family} model without experts")


def _counts(spec: ModelSpec) -> Iterator[tuple[str, str, int]]:
    """(mesh axis, what it splits, how many) for every count that must divide."""
    for part in dict.fromkeys(p for layer in spec.layers for p in (layer.mixer, layer.mlp)):
        units: dict[str, int] = getattr(part, "split_units", dict)()
        yield from ((WEIGHTS[name], name.replace("_", "-"), n) for name, n in units.items())
    for tensor in spec.tensors():
        for name, size in zip(tensor.axes, tensor.shape, strict=True):
            if name in WEIGHTS and name not in (*WHOLE_IF_UNEVEN, "heads", "kv_heads"):
                yield WEIGHTS[name], f"{name} of {tensor.name}", size


def stage_layers(spec: ModelSpec, stages: int) -> list[range]:
    """Contiguous layers per stage so that the largest stage has the fewest parameters.

    Embedding and head count as part of the first and the last layer.
    """
    sizes = [0] * len(spec.layers)
    for tensor in spec.tensors():
        layer = tensor.layer
        if layer is None:
            layer = 0 if tensor.component == "embedding" or tensor.name == "embed_norm" else -1
        sizes[layer] += tensor.size
    if spec.tied and stages > 1:  # the last stage holds a copy of the embedding as its head
        sizes[-1] += spec.tensors()[0].size
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    # the most even division of the layers into `stages` non-empty runs, by dynamic programming:
    # best(n, p) = min over m of max(best(m, p - 1), sums[n] - sums[m]); sums[n]: of the first n
    count = len(sizes)
    best = [(sums[n], [n]) for n in range(count + 1)]  # size and ends of the first n, in one run
    for part in range(2, stages + 1):
        longer: list[Any] = [None] * (count + 1)  # best of the first n layers, in `part` runs
        for n in range(part, count + 1):
            tries = ((max(best[m][0], sums[n] - sums[m]), m) for m in range(part - 1, n))
            largest, cut = min(tries)
            longer[n] = (largest, [*best[cut][1], n])
        best = longer
    ends = best[count][1]
    return [range(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def stages_of(
    spec: ModelSpec, table: Mapping[str, TensorSpec], layers: Sequence[range]
) -> dict[str, tuple[int, ...]]:
    """Tensor → the stages that hold it: one, or the first and the last for a tied embedding."""
    last = len(layers) - 1
    by_layer = {layer: number for number, run in enumerate(layers) for layer in run}
    stages: dict[str, tuple[int, ...]] = {}
    for name, tensor in table.items():
        if tensor.layer is not None:
            stages[name] = (by_layer[tensor.layer],)
        elif name == "embed":
            stages[name] = (0, last) if spec.tied and last else (0,)
        elif name == "embed_norm":
            stages[name] = (0,)
        else:
            stages[name] = (last,)
    return stages
