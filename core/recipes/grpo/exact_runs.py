"""Where a run can be exactly on policy (--exact)."""

from sabia.core.errors import UsageError
from sabia.core.parallel.mesh import Mesh
from sabia.core.spec import ModelSpec
from sabia.core.spec.layers import Attention


def check_exact(spec: ModelSpec, mesh: Mesh) -> None:
    """Raise UsageError where the log-probabilities of sampler and trainer can differ in bits."""
    if cause := _cause(spec, mesh):
        raise UsageError(f"--exact: not with {cause}; train without --exact")


def _cause(spec: ModelSpec, mesh: Mesh) -> str:
    """What is in the way, '' for nothing."""
    from sabia.core.ops.device_torch import default_device
    from sabia.kernels.runtime.torch_fp32 import HAS_ONEDNN

    if default_device().type != "cpu":
        return "a GPU (expected a CPU)"
    if not HAS_ONEDNN:
        return "this processor (expected x86-64 and a torch that has oneDNN)"
    if mesh.size > mesh.data * mesh.fsdp:
        return f"--mesh {mesh} (expected data and fsdp alone)"
    for layer in spec.layers:
        mixer = layer.mixer
        if not isinstance(mixer, Attention):
            return f"{type(mixer).__name__} layers (expected plain attention)"
        if mixer.softcap is not None or mixer.sinks:
            return "capped attention or sinks (expected plain attention)"
    return ""
