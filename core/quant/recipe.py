"""Recipes: the number format of each component of a model.

A recipe gives each component (embedding, norm, router, attention, attention_gate, head, mlp,
expert, shared_expert) a scheme of `sabia.core.numerics.schemes`; the gate of gated attention has
that of attention by default. Rules with a regular expression on our tensor names override it, and
the last matching rule applies. The built-in `mixed` keeps embeddings, norms and routers in BF16,
attention and head in 8 bits, and MLPs and experts in 4 bits. A key of a recipe file that no tensor
of the model has is refused.
A given group size must divide a weight's columns; the default is the largest of 128, 64 and 32 that
divides them, or one scale per row if none does.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.files import read_toml
from sabia.core.model.storage.hub import write_parts
from sabia.core.numerics import nf4
from sabia.core.numerics.compressed import stored_bytes
from sabia.core.numerics.ggml_blocks import row_bytes
from sabia.core.numerics.integers import group_width, usual_group
from sabia.core.numerics.scales import Method
from sabia.core.numerics.schemes import BITSANDBYTES, GGUF, SCHEMES, Scheme, scheme_named
from sabia.core.spec import ModelSpec, TensorSpec
from sabia.core.spec.tensors import FusedPart

Rounding = Literal["auto", "gptq", "learned", "rtn", "trained"]
Smooth = Literal["none", "awq", "smoothquant"]
Tokens = Literal["routed", "all"]
Container = Literal["compressed-tensors", "dense", "gguf"]
COMPONENTS = (
    "embedding", "norm", "router", "attention", "attention_gate", "head", "mlp", "expert",
    "shared_expert",
)  # fmt: skip
KEYS: dict[str, Any] = {"name": str, "components": dict, "rules": list, "group": int}
KEYS |= {"rounding": str, "scale": str, "order": str, "damping": float}
KEYS |= {"smooth": str, "alpha": float, "experts": str, "match": str}
CHOICES: dict[str, tuple[str, ...]] = {"rounding": get_args(Rounding), "scale": ("mse", "absmax")}
CHOICES |= {"order": ("static", "natural"), "smooth": get_args(Smooth), "experts": get_args(Tokens)}
CHOICES |= {"match": ("none", "llmcompressor")}
NEVER = ("embedding", "norm", "router")  # inference kernels do not read these in integers
_FEED_FORWARD = ("mlp", "expert", "shared_expert")
BUILT_IN: dict[str, dict[str, str]] = {
    "w8": dict.fromkeys(("attention", "head", *_FEED_FORWARD), "w8a16"),
    "w4": dict.fromkeys(("attention", *_FEED_FORWARD), "w4a16") | {"head": "w8a16"},
    "mixed": dict.fromkeys(("attention", "head"), "w8a16") | dict.fromkeys(_FEED_FORWARD, "w4a16"),
}
TRAINED = {"qat-int8": "w8a16", "qat-int4": "w4a16", "qat-nvfp4": "nvfp4a16"}  # by --precision
BUILT_IN |= {
    precision: dict.fromkeys(("attention", *_FEED_FORWARD), name)
    for precision, name in TRAINED.items()
}
BUILT_IN |= {
    name: dict.fromkeys(("attention", *_FEED_FORWARD), name) for name in SCHEMES if name != "bf16"
}
# bitsandbytes replaces Linear modules, which the experts of a layer are not
BUILT_IN |= {
    name: dict.fromkeys(("attention", "mlp", "shared_expert"), name) for name in BITSANDBYTES
}
BUILT_IN["bf16"] = {}  # for other forms of the files


@dataclass(frozen=True)
class RecipeRule:
    """The scheme (and group size, if given) of tensors whose names match a pattern."""

    match: str
    scheme: str
    group: int | None = None


@dataclass(frozen=True)
class Recipe:
    """Schemes by component, rules that override them, and the settings of rounding.

    rounding: `auto` is GPTQ for 4 bits with calibration inputs, else to nearest; `learned`: up or
    down by signed gradients for 4 bits; `trained`: to nearest from BF16 values, as
    quantization-aware training simulates it. scale: how scales are chosen, `mse` or `absmax`.
    order: GPTQ's order of columns, `static` (by activation,
    with groups in the stored order) or `natural`. damping: see core.quant.gptq.
    smooth and its alpha: see core.quant.smoothing. experts: the tokens that calibrate an expert,
    those that the router sends to it or all. match: the program whose bytes are reproduced, or
    `none`. container: the form of the written files.
    """

    name: str
    components: Mapping[str, str]
    rules: tuple[RecipeRule, ...] = ()
    group: int | None = None
    rounding: Rounding = "auto"
    scale: Method = "mse"
    order: str = "static"
    damping: float = 0.01
    smooth: Smooth = "none"
    alpha: float = 0.5
    experts: Tokens = "routed"
    match: str = "none"
    container: Container = "compressed-tensors"

    def scheme_of(self, tensor: TensorSpec) -> Scheme:
        """The scheme of a matrix with its group size; bf16 for vectors."""
        component, group = component_of(tensor), self.group
        if component == "attention_gate" and component not in self.components:
            component = "attention"
        name = self.components.get(component, "bf16")
        for rule in self.rules:
            if re.search(rule.match, tensor.name):
                name, group = rule.scheme, rule.group or self.group
        scheme = scheme_named(name)
        if self.container == "gguf" and name not in GGUF:
            raise UsageError(
                f"recipe {self.name}: --format gguf has no form of {name} for {tensor.name} "
                f"(expected {', '.join(GGUF)})"
            )
        if not scheme.quantizes or len(tensor.shape) - tensor.stacked < 2:
            return SCHEMES["bf16"]
        if tensor.component in NEVER:
            raise UsageError(
                f"recipe {self.name}: format {name} for {tensor.name} (expected bf16 for "
                f"every tensor of component {tensor.component})"
            )
        if self.container == "gguf":
            scheme = GGUF[name]
        if scheme.sizes_groups:
            return scheme.with_group(_group_size(group, tensor))
        _check_tiles(scheme, tensor)
        return scheme


def component_of(tensor: TensorSpec) -> str:
    """The component of a tensor; the experts of an MoE layer are no `mlp`, and the gate of gated
    attention is no `attention`."""
    if tensor.name.endswith(".attn.gate"):
        return "attention_gate"
    if tensor.component != "mlp":
        return tensor.component
    for part, component in ((".experts.", "expert"), (".shared", "shared_expert")):
        if part in tensor.name:
            return component
    return "mlp"


def _check_tiles(scheme: Scheme, tensor: TensorSpec) -> None:
    """Raise UsageError where the groups of the weights or the inputs do not divide the columns."""
    sizes = {scheme.group or 1, (scheme.inputs.group if scheme.inputs else None) or 1}
    wrong = [size for size in sizes if tensor.shape[-1] % size]
    if wrong:
        raise UsageError(
            f"{tensor.name}: format {scheme.name} has groups of {wrong[0]}, which do not divide "
            f"{tensor.shape[-1]} columns (expected a rule with another format for it)"
        )


def _group_size(group: int | None, tensor: TensorSpec) -> int | None:
    if group is None:
        return usual_group(tensor.shape, bool(tensor.stacked))
    try:
        group_width(tensor.shape[-1], group)
    except UsageError as error:
        raise UsageError(f"{tensor.name}: {error}") from error
    return group


def load_recipe(name: str) -> Recipe:
    """A built-in recipe, or one from a TOML file; UsageError names what is wrong."""
    if name in TRAINED:
        return Recipe(name, BUILT_IN[name], rounding="trained", scale="absmax")
    if name in BUILT_IN:
        return Recipe(name, BUILT_IN[name])
    if not name.endswith(".toml"):
        known = ", ".join(BUILT_IN)
        raise UsageError(f"--recipe: {name!r} (expected {known}, or a file NAME.toml)")
    values = read_toml("--recipe", name)
    for key, value in values.items():
        if key not in KEYS:
            raise UsageError(f"{name}: no key {key!r} in a recipe (expected {', '.join(KEYS)})")
        if not isinstance(value, KEYS[key]):
            raise UsageError(f"{name}: {key} = {value!r} (expected {KEYS[key].__name__})")
    components = values.get("components", {})
    for component, scheme in components.items():
        if component not in COMPONENTS:
            raise UsageError(
                f"{name}: component {component!r} (expected one of {', '.join(COMPONENTS)})"
            )
        scheme_named(scheme)
    rules = tuple(_rule(name, rule) for rule in values.get("rules", ()))
    settings = {k: v for k, v in values.items() if k not in ("components", "rules")}
    return checked(Recipe(**({"name": name} | settings), components=components, rules=rules))


def _rule(path: str, values: Any) -> RecipeRule:
    try:
        rule = RecipeRule(**values)
        re.compile(rule.match)
    except (TypeError, re.error) as error:
        raise UsageError(
            f"{path}: rule {values!r}: {error} (expected keys match, scheme and perhaps group)"
        ) from error
    scheme_named(rule.scheme)
    return rule


def checked(recipe: Recipe) -> Recipe:
    """The recipe; raises UsageError for a setting with an unknown value."""
    for key, allowed in CHOICES.items():
        if (given := getattr(recipe, key)) not in allowed:
            raise UsageError(f"recipe: {key} is {given!r} (expected {' or '.join(allowed)})")
    for name, fraction in (("damping", recipe.damping), ("alpha", recipe.alpha)):
        if not 0 < fraction < 1:
            raise UsageError(f"recipe: {name} is {fraction} (expected between 0 and 1)")
    if name := next((x for x in format_names(recipe) if scheme_named(x).bitsandbytes), ""):
        _check_nearest(recipe, name)
    if recipe.match != "none":
        return _matched(recipe)
    if recipe.rounding == "trained" and (recipe.scale, recipe.smooth) != ("absmax", "none"):
        raise UsageError(
            f"recipe: scale is {recipe.scale} and smooth {recipe.smooth} with rounding trained "
            "(expected absmax and none, as training has simulated it)"
        )
    return recipe


def format_names(recipe: Recipe) -> list[str]:
    """The names of its formats."""
    return [*recipe.components.values(), *(rule.scheme for rule in recipe.rules)]


def _check_nearest(recipe: Recipe, name: str) -> None:
    """Raise UsageError for another rounding than that of bitsandbytes, to nearest."""
    nearest = {"rounding": ("auto", "rtn"), "smooth": ("none",), "match": ("none",)}
    for key, allowed in nearest.items():
        if (given := getattr(recipe, key)) not in allowed:
            raise UsageError(
                f"recipe: {key} is {given} with format {name}, whose scales are the largest values "
                f"and which is rounded to nearest (expected {' or '.join(allowed)})"
            )


def _matched(recipe: Recipe) -> Recipe:
    """The recipe with rounding to nearest, which alone is reproduced. UsageError."""
    if recipe.rounding not in ("auto", "rtn") or recipe.smooth != "none":
        raise UsageError(
            f"--match: {recipe.match}: its rounding to nearest is reproduced, not "
            f"{recipe.rounding} with smooth {recipe.smooth} (expected --rounding rtn)"
        )
    if recipe.container == "gguf":
        raise UsageError(f"--match: {recipe.match} writes no gguf (expected another --format)")
    for name in set(format_names(recipe)):
        inputs = scheme_named(name).inputs
        if inputs is not None and inputs.part:
            raise UsageError(
                f"--match: format {name} stores scales of inputs, which depend on the arithmetic "
                "of the whole model (expected a format without them)"
            )
    return replace(recipe, rounding="rtn", scale="absmax")


@dataclass(frozen=True)
class Linear:
    """One stored matrix: a tensor of the model, one expert of a stacked tensor, or several tensors
    that the files fuse.

    fused: the tensors whose rows the files store as one matrix, the first of which is `tensor`;
    they have the same inputs.
    """

    tensor: TensorSpec
    scheme: Scheme
    index: int | None = None
    fused: tuple[TensorSpec, ...] = ()

    @property
    def module(self) -> str:
        """The name of its module in the checkpoint."""
        return self.tensor.files[self.index or 0].removesuffix(".weight")

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of the model that it holds, or of which it holds one expert."""
        return self.fused or (self.tensor,)

    @property
    def matrix(self) -> tuple[int, int]:
        """Its rows and columns."""
        part = self.tensor.hf
        rows, columns = (part if isinstance(part, FusedPart) else self.tensor).shape[-2:]
        return rows, columns

    def weight(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """The matrix[O, I], of the model's tensors by name."""
        if self.fused:
            return write_parts(
                (t.hf, values[t.name]) for t in self.fused if isinstance(t.hf, FusedPart)
            )
        whole = values[self.tensor.name]  # [E, O, I] for experts
        return whole if self.index is None else whole[self.index]

    @property
    def stored_bytes(self) -> int:
        """Bytes of a quantized matrix in the files."""
        rows, columns = self.matrix
        if self.scheme.format == "gguf":
            return rows * row_bytes(self.scheme, columns)
        if self.scheme.bitsandbytes:
            return nf4.stored_bytes((rows, columns), self.scheme.scale == "u8")
        return stored_bytes(self.scheme, rows, columns)

    @property
    def key(self) -> tuple[str, int | None]:
        """(parameter name, expert number or None)."""
        return self.tensor.name, self.index


def plan(spec: ModelSpec, recipe: Recipe) -> tuple[Linear, ...]:
    """All matrices of linear layers with their schemes, in the model's order.

    spec: as `stored_form` returns it. Raises UsageError for a recipe that has different formats for
    tensors that the files fuse, and for one of a file with a component or a rule of no matrix.
    """
    linears: list[Linear] = []
    fused: dict[str, list[TensorSpec]] = {}  # parts of matrices by the tensor of the files
    for tensor in spec.tensors():
        if tensor.linear and isinstance(tensor.hf, FusedPart):
            fused.setdefault(tensor.hf.file, []).append(tensor)
    for tensor in spec.tensors():
        if not tensor.linear:
            continue
        scheme, parts = recipe.scheme_of(tensor), tuple[TensorSpec, ...]()
        if isinstance(tensor.hf, FusedPart) and not tensor.stacked:
            parts = tuple(fused[tensor.hf.file])
            other = next((t for t in parts if recipe.scheme_of(t) != scheme), None)
            if other is not None:
                raise UsageError(
                    f"recipe {recipe.name}: {tensor.name} and {other.name} have different formats, "
                    f"but {spec.family} models store both in {tensor.hf.file}"
                )
            if tensor != parts[0]:
                continue
        stacked = isinstance(tensor.hf, tuple)
        indices: Sequence[int | None] = range(tensor.shape[0]) if stacked else (None,)
        linears += [Linear(tensor, scheme, index, parts) for index in indices]
    if recipe.name not in BUILT_IN:
        _check_keys(spec, recipe, linears)
    if recipe.container == "compressed-tensors":
        check_one_method(f"recipe {recipe.name}", {linear.scheme for linear in linears})
    return tuple(linears)


def check_one_method(what: str, schemes: Collection[Scheme]) -> None:
    """Raise UsageError for formats of bitsandbytes beside others."""
    own = sorted(x.name for x in schemes if x.bitsandbytes)
    others = sorted(x.name for x in schemes if x.quantizes and not x.bitsandbytes)
    if own and others:
        raise UsageError(
            f"{what}: {own[0]} beside {others[0]} in a directory, which has one method, "
            f"bitsandbytes or compressed-tensors (expected {' or '.join(BITSANDBYTES)} and bf16, "
            "or none of these; --format dense holds all formats)"
        )


def stored_form(spec: ModelSpec, recipe: Recipe) -> ModelSpec:
    """`spec` with the tensor names of the quantized files: quantized experts are stored one by one.

    Raises UsageError for a family whose experts have no such names.
    """
    for tensor in spec.tensors():
        whole = tensor.stacked and tensor.linear and not isinstance(tensor.hf, tuple)
        if whole and recipe.scheme_of(tensor).quantizes:
            if not isinstance(spec.other_names.get(name_in_layer(tensor)), str):
                raise UsageError(
                    f"quantize: {spec.family} models store all experts of a layer in one tensor "
                    "(expected a family whose experts may be stored one by one)"
                )
            names = {**spec.names, **spec.other_names}
            return replace(spec, names=names, other_names=spec.names)
    return spec


def name_in_layer(tensor: TensorSpec) -> str:
    """The name without that of its layer, as in the spec's tables of names."""
    return tensor.name.removeprefix(f"layers.{tensor.layer}.")


def _check_keys(spec: ModelSpec, recipe: Recipe, linears: Sequence[Linear]) -> None:
    """Raise UsageError for the first key of the recipe that has no effect on the model."""
    matrices = {t.name: component_of(t) for linear in linears for t in linear.tensors}
    kept = [c for c, scheme in recipe.components.items() if not scheme_named(scheme).quantizes]
    for component in recipe.components.keys() - kept - set(matrices.values()):
        why = "; its head is the embedding (tied weights)" if component == "head" else ""
        raise UsageError(
            f"recipe {recipe.name}: no matrix of this {spec.family} model is of component "
            f"{component}{why} (it has {', '.join(sorted(set(matrices.values())))})"
        )
    for rule in recipe.rules:
        if not any(re.search(rule.match, name) for name in matrices):
            some = next(iter(matrices), "none")
            raise UsageError(
                f"recipe {recipe.name}: rule {rule.match!r} matches no matrix of this "
                f"{spec.family} model (their names are such as {some})"
            )


def with_overrides(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with those of `changes` that are not None."""
    return checked(replace(recipe, **{k: v for k, v in changes.items() if v is not None}))
