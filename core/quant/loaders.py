"""What loads a quantized directory as it was measured, what refuses it, what loads other values.

transformers 5.19 to 5.23 with compressed-tensors 0.19 hold the experts of a layer in one parameter,
which a conversion of the checkpoint's tensors fills: it decodes packed integers, E4M3 and E2M1, all
experts by one group of the configuration, without scales of whole matrices (NVFP4), zero points or
scales of E4M3 in powers of two, and rounds no inputs of experts. GPT-OSS has no such conversion:
its experts are read in the published form (`export`), or in BF16. Packed zero points fit no
parameter of other modules. `dequantize=True` decodes all other matrices by one group, zero points
included.

bitsandbytes in transformers replaces Linear modules: experts in NF4, one by one, do not fit the one
parameter of a layer. The kernel of bitsandbytes 0.50 for CPUs with AVX-512 takes each row to begin
a block, also where 64 does not divide the columns.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sabia.core.numerics import nf4
from sabia.core.quant.recipe import Linear
from sabia.core.spec import ModelSpec

WITHOUT_CONVERSION = ("gpt_oss",)
WITHOUT_EXPERTS = ("int-quantized", "mxfp8-quantized")


@dataclass(frozen=True)
class Loader:
    """The result of a loader with a directory, and the reason for it ('' if there is nothing to
    say)."""

    loader: str
    result: Literal["loads", "refuses", "loads wrongly", "refuses or loads wrongly"]
    why: str = ""


def loaders(
    spec: ModelSpec, linears: Sequence[Linear], config: Mapping[str, Any]
) -> tuple[Loader, ...]:
    """The results of transformers, by default and with dequantize=True, which is not for NF4.

    config: the `quantization_config` that is written for `linears`.
    """
    if config["quant_method"] == "mxfp4":
        return Loader("transformers", "loads"), Loader("transformers dequantize=True", "loads")
    if config["quant_method"] == "bitsandbytes":
        if any(x.index is not None and x.scheme.quantizes for x in linears):
            why = "it has no modules for single experts (expected experts in bf16)"
            return (Loader("transformers", "refuses", why),)
        usual = Loader("transformers", "loads", "with bitsandbytes and accelerate")
        if all(x.matrix[1] % nf4.BLOCK == 0 for x in linears if x.scheme.quantizes):
            return (usual,)
        why = f"bitsandbytes decodes rows that blocks of {nf4.BLOCK} do not divide by other scales"
        return usual, Loader("transformers on a CPU", "loads wrongly", why)
    usual = _experts(spec, linears, config)
    dense = {x.scheme for x in linears if x.index is None and x.scheme.quantizes}
    decoded = Loader("transformers dequantize=True", usual.result, usual.why)
    if usual.result == "loads" and not all(scheme.symmetric for scheme in dense):
        usual = Loader(usual.loader, "refuses", "it has no place for packed zero points")
    if decoded.result == "loads" and len(dense) > 1:
        why = f"it decodes matrices of {_labels(dense)} by one of these formats"
        decoded = Loader(decoded.loader, "refuses or loads wrongly", why)
    return usual, decoded


def _experts(spec: ModelSpec, linears: Sequence[Linear], config: Mapping[str, Any]) -> Loader:
    name = "transformers"
    schemes = {x.scheme for x in linears if x.index is not None}
    quantized = [scheme for scheme in schemes if scheme.quantizes]
    if not schemes:
        return Loader(name, "loads")
    if spec.family in WITHOUT_CONVERSION:
        why = (
            f"it reads no single experts of {spec.family} models; theirs get random values "
            "(expected experts in mxfp4a16 and all else in bf16, or experts in bf16)"
        )
        return Loader(name, "loads wrongly", why)
    # the group that it takes for all experts
    groups = list(config["config_groups"].values())
    named = [g for g in groups if any("experts" in t for t in g["targets"] if t[:3] == "re:")]
    chosen = (named or groups)[0]
    if chosen["weights"]["type"] != "float" and len(quantized) < len(schemes):
        why = "it reads no experts in bf16 beside matrices in packed integers"
        return Loader(name, "refuses", why)
    if len(quantized) > 1:
        why = f"it reads experts of one format, not {_labels(quantized)}"
        return Loader(name, "refuses or loads wrongly", why)
    if quantized and quantized[0].config_group(chosen["targets"]) != chosen:
        why = f"it decodes experts of {_labels(quantized)} as {chosen['targets'][0]}"
        return Loader(name, "refuses or loads wrongly", why)
    if quantized and (not quantized[0].symmetric or quantized[0].format in WITHOUT_EXPERTS):
        return Loader(name, "refuses", f"it reads no experts of {_labels(quantized)}")
    if quantized and quantized[0].scale == "e4m3":
        why = f"it drops the scales of whole matrices of experts in {_labels(quantized)}"
        return Loader(name, "loads wrongly", why)
    rounds = any(scheme.inputs is not None for scheme in quantized)
    return Loader(name, "loads", "without rounding the inputs of experts" if rounds else "")


def _labels(schemes: Iterable[Any]) -> str:
    return " and ".join(sorted(scheme.label() for scheme in schemes))
