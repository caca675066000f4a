"""Counts: parameters, active parameters, and training FLOPs per token.

training_flops_per_token = 6·N_mm + c·12·Σ_layers min(s, window)·(score width)/2 with N_mm the
active matrix elements without the input lookup and c by convention: `6nd` 0, `palm` 1 (PaLM,
arXiv 2204.02311 appendix B), `causal` ½ (half of the score matrix is masked; an encoder has no
mask, and its windows extend to both sides). A gated delta net adds 6·3·(state elements) per token
under both of these, for any length. A tied embedding counts once as a parameter and once as the
head's matrix.
"""

from typing import Literal, get_args

from sabia.core.errors import UsageError
from sabia.core.spec.delta import GatedDeltaNet
from sabia.core.spec.layers import Mixer
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec

Convention = Literal["6nd", "palm", "causal"]
_SHARE = {"6nd": 0.0, "palm": 1.0, "causal": 0.5}


def _active(tensor: TensorSpec) -> int:
    used, of = tensor.active_share
    return tensor.size * used // of


def parameter_count(spec: ModelSpec) -> int:
    """All parameters; tied ones once."""
    return sum(tensor.size for tensor in spec.tensors())


def active_parameter_count(spec: ModelSpec) -> int:
    """Parameters that one token uses (all of them in a dense model)."""
    return sum(_active(tensor) for tensor in spec.tensors())


def matmul_parameter_count(spec: ModelSpec) -> int:
    """Active matrix elements without the input embedding's lookup; the head always counts."""
    inner = (t for t in spec.tensors() if len(t.shape) > 1)
    inner_count = sum(_active(t) for t in inner if t.component not in ("embedding", "head"))
    return inner_count + (0 if spec.classifier else spec.vocab_size * spec.hidden_size)


def training_flops_per_token(spec: ModelSpec, seq: int, convention: Convention = "6nd") -> float:
    """FLOPs per token, forward and backward, at sequence length `seq`."""
    share, sides = attention_share(convention, spec.causal)
    mixing = sum(_mixing(layer.mixer, seq, share, sides) for layer in spec.layers) if share else 0.0
    return 6.0 * matmul_parameter_count(spec) + 6.0 * mixing


def attention_share(convention: str, causal: bool) -> tuple[float, int]:
    """(fraction of a layer's scores that count, sides of a token with scores). UsageError."""
    if convention not in _SHARE:
        known = ", ".join(get_args(Convention))
        raise UsageError(f"--convention: {convention!r} (expected one of {known})")
    share = _SHARE[convention]
    return (share, 1) if causal else (1.0 if share else 0.0, 2)


def _mixing(mixer: Mixer, seq: int, share: float, sides: int) -> float:
    """Multiply-adds per token between activations; a recurrent state has no mask."""
    if isinstance(mixer, GatedDeltaNet):
        return mixer.state_products()
    return share * min(seq, sides * (mixer.window or seq)) * mixer.score_width()
