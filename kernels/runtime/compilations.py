"""How often torch compiles a function again for arrays of another size."""

COMPILATIONS = 64  # of a function, in all of a process; torch's default is 8


def allow_compilations() -> None:
    """Let torch compile a function COMPILATIONS times; then it runs eagerly, or fails."""
    import torch._dynamo

    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, COMPILATIONS)
