"""Named number formats of a Linear's weight, in the words of compressed-tensors.

A format is a record: the element of a code, the tile of the matrix that shares a scale, the stored
form of the scale, and how the server rounds the inputs of the product. SCHEMES is the table of
those that are written. Names that end in a16 keep the inputs in BF16; the others round them.
  w4a16, w4a16-asym    4-bit integers, a scale for each group of columns, and a zero point
  w8a16, w8a8          8-bit integers, a scale for each row
  fp8, fp8-static      E4M3, a scale for each row and each token, or for each matrix and its inputs
  fp8-block            E4M3, a scale for 128 by 128 weights and for 128 inputs (DeepSeek-V3)
  mxfp8[a16]           E4M3, a power of two for each 32 columns (OCP Microscaling Formats 1.0)
  mxfp4[a16]           E2M1, a power of two for each 32 columns
  nvfp4[a16]           E2M1, an E4M3 scale for each 16 columns, and a float32 scale for the matrix
  nf4, nf4-double      16 quantiles of the normal distribution, a float32 scale for each 64 values;
                       an 8-bit one with double quantization (see `nf4`)
  bf16                 not quantized
Presets and JSON keys follow compressed-tensors 0.19 (`quantization_config` of config.json), but for
NF4 those of transformers with bitsandbytes.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sabia.core.errors import BadData, UsageError
from sabia.core.numerics.floats import E2M1, E4M3, SmallFloat
from sabia.core.numerics.integers import Integers

VERSION = "0.19.0"  # of the compressed-tensors format written here
ELEMENTS: dict[str, Integers | SmallFloat] = {"int2": Integers(2), "int4": Integers(4)}
ELEMENTS |= {"int8": Integers(8), "e4m3": E4M3, "e2m1": E2M1}
ScaleKind = Literal["bf16", "e4m3", "e8m0", "f16", "f32", "u8"]
_SCALE_DTYPES = {"bf16": None, "e4m3": "torch.float8_e4m3fn", "e8m0": "torch.uint8"}
_SCALE_OF_FORMAT: dict[str, ScaleKind] = {"nvfp4-pack-quantized": "e4m3"}
_SCALE_OF_FORMAT |= {"mxfp4-pack-quantized": "e8m0", "mxfp8-quantized": "e8m0"}
DEFAULT_GROUP = 128
SERVED_TOGETHER = tuple(
    frozenset(names.split()) for names in ("q k v", "gate up", "q_down kv_down")
)  # matrices with the same inputs, whose rows servers join: they need one scale as wholes
BLOCK = (128, 128)


@dataclass(frozen=True)
class Inputs:
    """How the inputs of a product are rounded by the server.

    strategy: what shares a scale: a token, a group of columns of a token, or all (tensor).
    dynamic: False if the scale is stored; `local` if the groups' scales are computed and that of
    all is stored.
    """

    element: str
    strategy: Literal["token", "tensor", "group", "tensor_group"]
    dynamic: bool | Literal["local"] = True
    group: int | None = None
    scale: ScaleKind = "bf16"

    @property
    def part(self) -> str | None:
        """The suffix of the stored scale; None if there is none."""
        names = {False: "input_scale", "local": "input_global_scale"}
        return names.get(self.dynamic)

    def label(self) -> str:
        """`int8 by token`."""
        return f"{self.element}{'' if self.dynamic else ', static,'} by {self.strategy}"

    def arguments(self) -> dict[str, object]:
        """The entry `input_activations`."""
        made = _arguments(self.element, self.strategy, self.group, self.scale)
        return made | {"dynamic": self.dynamic}


@dataclass(frozen=True)
class Scheme:
    """A format; tile: rows and columns that share a scale, None for all of them."""

    name: str
    element: str
    format: str
    tile: tuple[int | None, int | None] = (1, None)
    scale: ScaleKind = "bf16"
    symmetric: bool = True
    inputs: Inputs | None = None

    @property
    def quantizes(self) -> bool:
        """False for bf16."""
        return self.format != "dense"

    @property
    def bitsandbytes(self) -> bool:
        """Whether it is a form of bitsandbytes: rounded to nearest, scaled by the largest value."""
        return self.format == "bitsandbytes"

    @property
    def codes(self) -> Integers | SmallFloat:
        """The element of a code."""
        return ELEMENTS[self.element]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        if self.bitsandbytes:
            return 4
        return self.codes.bits if self.quantizes else 16

    @property
    def group(self) -> int | None:
        """Columns that share a scale in one row; None for a scale per row, block or matrix."""
        return self.tile[1] if self.tile[0] == 1 else None

    @property
    def sizes_groups(self) -> bool:
        """Whether the number of columns of a group is a choice."""
        return self.element.startswith("int") and self.group is not None and self.format != "gguf"

    @property
    def searches(self) -> bool:
        """Whether scales are searched: those of integers and of 4 bits."""
        return self.element.startswith("int") or (self.bits == 4 and not self.bitsandbytes)

    def with_group(self, group: int | None) -> "Scheme":
        """The format with other groups; None for one scale per row."""
        return replace(self, tile=(1, group))

    def tiles(self, rows: int, columns: int) -> tuple[int, int]:
        """How many scales a matrix has, down and across."""
        height, width = self.tile[0] or rows, self.tile[1] or columns
        return -(-rows // max(height, 1)), -(-columns // max(width, 1))

    def label(self) -> str:
        """`w4a16 g64`, `w8a16`."""
        return f"{self.name} g{self.group}" if self.sizes_groups else self.name

    @property
    def strategy(self) -> str:
        """What shares a scale, in the words of compressed-tensors."""
        if self.tile == (None, None):
            return "tensor"
        if self.tile[0] != 1:
            return "block"
        if self.group is None:
            return "channel"
        return "tensor_group" if self.scale == "e4m3" else "group"

    def config_group(self, targets: list[str]) -> dict[str, object]:
        """The entry of `config_groups` for the modules named in `targets`."""
        weights = _arguments(self.element, self.strategy, self.group, self.scale)
        weights |= {"symmetric": self.symmetric, "dynamic": False}
        if not self.symmetric:
            weights["zp_dtype"] = "torch.int8"
        if self.strategy == "block":
            weights["block_structure"] = list(self.tile)
        return {
            "format": self.format,
            "targets": targets,
            "weights": weights,
            "input_activations": self.inputs.arguments() if self.inputs else None,
            "output_activations": None,
        }


def _arguments(
    element: str, strategy: str, group: int | None, scale: ScaleKind
) -> dict[str, object]:
    return {
        "num_bits": ELEMENTS[element].bits,
        "type": "int" if element.startswith("int") else "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": group,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "scale_dtype": _SCALE_DTYPES[scale],
        "zp_dtype": None,
        "observer": None,
        "observer_kwargs": {},
    }


INT8_TOKENS, FP8_TOKENS = Inputs("int8", "token"), Inputs("e4m3", "token")
_FP4 = Inputs("e2m1", "tensor_group", "local", 16, "e4m3")
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("bf16", "bf16", "dense"),
        Scheme("w8a16", "int8", "pack-quantized"),
        Scheme("w8a8", "int8", "int-quantized", inputs=INT8_TOKENS),
        Scheme("w4a16", "int4", "pack-quantized", (1, DEFAULT_GROUP)),
        Scheme("w4a16-asym", "int4", "pack-quantized", (1, DEFAULT_GROUP), symmetric=False),
        Scheme("fp8", "e4m3", "float-quantized", inputs=FP8_TOKENS),
        Scheme("fp8-static", "e4m3", "float-quantized", (None, None),
               inputs=Inputs("e4m3", "tensor", dynamic=False)),
        Scheme("fp8-block", "e4m3", "float-quantized", BLOCK,
               inputs=Inputs("e4m3", "group", group=128)),
        Scheme("mxfp8", "e4m3", "mxfp8-quantized", (1, 32), "e8m0",
               inputs=Inputs("e4m3", "group", group=32, scale="e8m0")),
        Scheme("mxfp8a16", "e4m3", "mxfp8-quantized", (1, 32), "e8m0"),
        Scheme("mxfp4", "e2m1", "mxfp4-pack-quantized", (1, 32), "e8m0",
               inputs=Inputs("e2m1", "group", group=32, scale="e8m0")),
        Scheme("mxfp4a16", "e2m1", "mxfp4-pack-quantized", (1, 32), "e8m0"),
        Scheme("nvfp4", "e2m1", "nvfp4-pack-quantized", (1, 16), "e4m3", inputs=_FP4),
        Scheme("nvfp4a16", "e2m1", "nvfp4-pack-quantized", (1, 16), "e4m3"),
    )
}  # fmt: skip

# in directories of their own: they have one method, bitsandbytes
BITSANDBYTES = {
    "nf4": Scheme("nf4", "nf4", "bitsandbytes", scale="f32"),
    "nf4-double": Scheme("nf4-double", "nf4", "bitsandbytes", scale="u8"),
}

# what a GGUF file holds for a matrix in one of these formats: blocks of 32 columns (ggml_blocks)
GGUF = {
    "bf16": SCHEMES["bf16"],  # F16
    "w8a16": Scheme("q8_0", "int8", "gguf", (1, 32), "f16"),
    "w4a16": Scheme("q4_0", "int4", "gguf", (1, 32), "f16"),
    "mxfp4a16": Scheme("mxfp4", "e2m1", "gguf", (1, 32), "e8m0"),
}


def served_together(name: str) -> tuple[str, frozenset[str]]:
    """What the matrices that servers join with the one named have in common: the name of the part
    (`layers.0.attn`), and the last names."""
    part, _, last = name.rpartition(".")
    return part, next((group for group in SERVED_TOGETHER if last in group), frozenset({last}))


def scheme_named(name: str) -> Scheme:
    """The scheme of that name; UsageError lists the names."""
    known = SCHEMES | BITSANDBYTES
    if name not in known:
        raise UsageError(f"no number format {name!r} (expected one of {', '.join(known)})")
    return known[name]


def read_scheme(group: Mapping[str, Any], format: str) -> Scheme:
    """The format of an entry of `config_groups`; format: that of the configuration as a whole.

    Its name is that of its elements. Raises BadData for what is not read here.
    """
    weights, form = group["weights"], group.get("format") or format
    tiles: dict[Any, tuple[int | None, int | None]] = {
        "tensor": (None, None),
        "channel": (1, None),
        "group": (1, weights.get("group_size")),
        "tensor_group": (1, weights.get("group_size")),
        "block": tuple(weights.get("block_structure") or BLOCK),
    }
    element, strategy = _element(weights), weights.get("strategy")
    if strategy is None:
        size = weights.get("group_size")
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if element is None or strategy not in tiles:
        raise BadData(
            f"weights of {weights.get('type')}{weights.get('num_bits')} by {strategy} are not read "
            f"(expected {', '.join(ELEMENTS)} by {', '.join(tiles)})"
        )
    scale, symmetric = _SCALE_OF_FORMAT.get(form, "bf16"), weights.get("symmetric", True)
    inputs = read_inputs(group.get("input_activations") or {})
    return Scheme(element, element, form, tiles[strategy], scale, symmetric, inputs)


def read_inputs(arguments: Mapping[str, Any]) -> Inputs | None:
    """The rule of an entry `input_activations`; None for one that is not computed here."""
    element, strategy = _element(arguments), arguments.get("strategy")
    dynamic, group = arguments.get("dynamic", False), arguments.get("group_size")
    kind = str(arguments.get("scale_dtype"))
    scales = {"torch.uint8": "e8m0", "torch.float8_e4m3fn": "e4m3"}
    scale: Any = scales.get(kind, "e4m3" if strategy == "tensor_group" else "bf16")
    rule = Inputs(element or "", strategy, dynamic, group, scale)  # type: ignore[arg-type]
    known = {"token": (True,), "tensor": (False, True), "group": (True,)}
    allowed = (known | {"tensor_group": ("local",)}).get(str(strategy), ())
    fits = element in ("int8", "e4m3", "e2m1") and dynamic in allowed
    return rule if fits and arguments.get("symmetric", True) else None


def _element(arguments: Mapping[str, Any]) -> str | None:
    bits, kind = arguments.get("num_bits"), arguments.get("type", "int")
    name = f"int{bits}" if kind == "int" else {4: "e2m1", 8: "e4m3"}.get(bits or 0, "")
    return name if name in ELEMENTS else None


def group_of(config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """The entry of `config_groups` for a Linear by its module's name; None if it is not quantized.

    A group that has the very name comes before one with a pattern, and that before `Linear`.
    """
    if matches(module, config.get("ignore") or ()) is not None:
        return None
    named: list[tuple[int, Mapping[str, Any]]] = []
    for group in (config.get("config_groups") or {}).values():
        rank = matches(module, group.get("targets") or ())
        if rank is not None:
            named.append((rank, group))
    return min(named, key=lambda pair: pair[0])[1] if named else None


def matches(module: str, targets: Sequence[str]) -> int | None:
    """How `targets` name a module: 0 by its name, 1 by `re:PATTERN`, 2 as a Linear; None: not."""
    if module in targets:
        return 0
    if any(t.startswith("re:") and re.match(t[3:], module) for t in targets):
        return 1
    return 2 if "Linear" in targets else None


def bitsandbytes_config(schemes: Collection[Scheme], skipped: list[str]) -> dict[str, object]:
    """`quantization_config` as transformers writes that of 4 bits of bitsandbytes; skipped: modules
    that stay in BF16."""
    return {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": BITSANDBYTES["nf4-double"] in schemes,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": skipped,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }


def quantization_config(groups: dict[Scheme, list[str]], ignore: list[str]) -> dict[str, object]:
    """`quantization_config` for modules by scheme; `ignore`: Linears that stay in BF16."""
    formats = {scheme.format for scheme in groups}
    entries = (scheme.config_group(targets) for scheme, targets in groups.items())
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "version": VERSION,
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "config_groups": {f"group_{number}": entry for number, entry in enumerate(entries)},
    }
