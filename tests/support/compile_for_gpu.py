"""Compile the Triton kernels for GPUs that are not here; print name and shared memory in bytes.

`python compile_for_gpu.py 90` (capability × 10). Needs no driver: triton brings its assembler.
"""

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sabia.kernels.attention import triton_impl as attention
from sabia.kernels.grouped_matmul import triton_impl as grouped_matmul
from sabia.kernels.quantize import triton_impl as quantize
from sabia.kernels.quantize.definitions import (
    FP8,
    FP8_GRADIENT,
    FP8_TILES,
    FP8_WEIGHT_TILES,
    NVFP4,
    NVFP4_WEIGHT,
    Layout,
)
from sabia.kernels.rms_norm import triton_impl as rms_norm
from sabia.kernels.vocabulary_loss import triton_impl as vocabulary_loss

FLOATS = {"lse", "nll", "grad_nll", "grad_lse", "sinks", "inverse", "shares"}
FLOATS |= {"lse_base", "delta_base"}
INTEGERS = {"first_base", "until_base", "groups", "starts", "ends", "bounds"}
NUMBERS = {"scale", "cap", "eps"}
ALIGNED = ("_row", "_head", "_batch")  # these and F, D, V: a real launch finds them to be so


def signature(kernel: Any, constants: dict[str, Any]) -> tuple[dict[str, str], dict, dict]:
    """Types, constants and alignments of a kernel's parameters; arrays are bfloat16."""
    types, known, aligned = {}, {}, {}
    for at, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            types[name], known[(at,)] = "constexpr", constants[name]
        elif parameter.annotation_type or name in NUMBERS:
            types[name] = parameter.annotation_type or "fp32"
        elif name in FLOATS or name in INTEGERS or name == "targets":
            types[name] = "*fp32" if name in FLOATS else "*i64" if name == "targets" else "*i32"
        else:
            scalar = name in ("T", "S", "start", "H", "G", "E", "F", "D", "V", "rows")
            types[name] = "i32" if scalar or name.endswith("_batch") else "*bf16"
        if types[name].startswith("*") or name.endswith(ALIGNED) or name in ("F", "D", "V"):
            aligned[(at,)] = [["tt.divisibility", 16]]
    return types, known, aligned


def compile_kernel(kernel: Any, capability: int, settings: dict[str, Any]) -> None:
    """Print what one kernel takes."""
    options = {n: settings.pop(n) for n in ("num_warps", "num_stages") if n in settings}
    types, known, aligned = signature(kernel, settings)
    source = ASTSource(fn=kernel, signature=types, constexprs=known, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    print(kernel.__name__, made.metadata.shared, flush=True)


def compile_codes(layout: Layout, capability: int) -> None:
    """Print what the kernel of quantization takes for a layout."""
    settings = quantize.launch_options(layout, layout.element == "e2m1")
    options = {"num_warps": settings.pop("num_warps")}
    types = {"x": "*bf16", "codes": "*u8", "tiles": "*u8", "scale": "*fp32", "key": "*i32"}
    types |= {"tiles": "*fp32"} if layout.scale == "power2" else {}
    types |= {"rows": "i32", "columns": "i32", "across": "i32", "inverse_largest": "fp32"}
    types |= dict.fromkeys(settings, "constexpr")
    known = {(list(types).index(name),): value for name, value in settings.items()}
    source = ASTSource(fn=quantize.encode_block, signature=types, constexprs=known)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    print("encode_block", made.metadata.shared, flush=True)


def main(capability: int) -> None:
    """Every kernel, as a bfloat16 model would launch it."""

    def like(size: int) -> torch.Tensor:
        return torch.empty(1, 1, 1, size, dtype=torch.bfloat16, device="meta")

    for size, size_v in ((64, 64), (128, 128), (192, 128)):
        shape = {"N": size, "M": size_v, "CAPPED": True}
        forward, backward = (
            attention.launch_options(like(size), like(size_v), kernel) | shape
            for kernel in ("forward", "backward")
        )
        compile_kernel(attention._forward_kernel, capability, forward | {"SINKS": True})
        compile_kernel(attention._queries_kernel, capability, dict(backward))
        compile_kernel(attention._keys_kernel, capability, dict(backward))
    for across in (False, True):
        settings = grouped_matmul.launch_options(like(64), "rows") | {"ACROSS": across}
        compile_kernel(grouped_matmul._rows_kernel, capability, settings)
    settings = grouped_matmul.launch_options(like(64), "matrices")
    compile_kernel(grouped_matmul._matrices_kernel, capability, settings)
    row = like(7168).view(1, -1)
    for name in ("forward", "backward"):
        settings = rms_norm.launch_options(row, name) | {"ADD": True, "PLUS_ONE": True}
        compile_kernel(getattr(rms_norm, f"_{name}_kernel"), capability, settings)
    block, warps = vocabulary_loss.BLOCKS
    for kernel in (vocabulary_loss._loss_kernel, vocabulary_loss._gradient_kernel):
        compile_kernel(kernel, capability, {"CAPPED": True, "BLOCK": block, "num_warps": warps})
    for layout in (NVFP4, NVFP4_WEIGHT, FP8, FP8_GRADIENT, FP8_TILES, FP8_WEIGHT_TILES):
        compile_codes(layout, capability)


if __name__ == "__main__":
    main(int(sys.argv[1]))
