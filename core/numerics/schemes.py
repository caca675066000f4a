"""Named number formats of a Linear's weight, in the words of compressed-tensors.

  w4a16  4-bit integers, a scale for each group of columns     pack-quantized
  w8a16  8-bit integers, a scale for each row                  pack-quantized
  w8a8   the same weights as w8a16; the server quantizes the activations of each token to 8 bits
                                                               int-quantized
  fp8    E4M3, a scale for each row; activations of each token to E4M3 by the server
                                                               float-quantized
  bf16   not quantized
Presets and JSON keys follow compressed-tensors 0.19 (`quantization_config` of config.json).
"""

from dataclasses import dataclass
from typing import Any

from sabia.core.errors import UsageError

VERSION = "0.19.0"  # of the compressed-tensors format written here


@dataclass(frozen=True)
class Scheme:
    """A format; `group`: number of columns that share a scale, None for one scale per row."""

    name: str
    bits: int
    type: str  # int or float
    format: str
    group: int | None = None
    dynamic_activations: bool = False

    @property
    def quantizes(self) -> bool:
        """False for bf16."""
        return self.format != "dense"

    def label(self) -> str:
        """`w4a16 g64`, `w8a16`."""
        return f"{self.name} g{self.group}" if self.group else self.name

    def config_group(self, targets: list[str]) -> dict[str, Any]:
        """The entry of `config_groups` for the modules named in `targets`."""
        strategy = "group" if self.group else "channel"
        activations = self._arguments("token", None, True) if self.dynamic_activations else None
        return {
            "format": self.format,
            "targets": targets,
            "weights": self._arguments(strategy, self.group, False),
            "input_activations": activations,
            "output_activations": None,
        }

    def _arguments(self, strategy: str, group: int | None, dynamic: bool) -> dict[str, Any]:
        return {
            "num_bits": self.bits,
            "type": self.type,
            "symmetric": True,
            "strategy": strategy,
            "group_size": group,
            "block_structure": None,
            "dynamic": dynamic,
            "actorder": None,
            "scale_dtype": None,
            "zp_dtype": None,
            "observer": None,
            "observer_kwargs": {},
        }


DEFAULT_GROUP = 128
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("bf16", 16, "float", "dense"),
        Scheme("w8a16", 8, "int", "pack-quantized"),
        Scheme("w8a8", 8, "int", "int-quantized", dynamic_activations=True),
        Scheme("w4a16", 4, "int", "pack-quantized", DEFAULT_GROUP),
        Scheme("fp8", 8, "float", "float-quantized", dynamic_activations=True),
    )
}


def scheme_named(name: str) -> Scheme:
    """The scheme of that name; UsageError lists the names."""
    if name not in SCHEMES:
        raise UsageError(f"no number format {name!r} (expected one of {', '.join(SCHEMES)})")
    return SCHEMES[name]


def quantization_config(groups: dict[Scheme, list[str]], ignore: list[str]) -> dict[str, Any]:
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
