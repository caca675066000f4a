"""Model weights in files: Hugging Face directories, adapters, safetensors, lazy arrays.

One parameter from safetensors to export, file by file: `safetensors_file` maps it as a LazyArray;
`hub` finds it by the name that the table of `core.spec.model` gives it; `core.train.stepper_torch`
takes this process's shard (`core.train.stepper_torch_shards`) and updates it
(`core.train.optimizer.updates_torch`); `core.train.checkpoint.pieces` saves the shard; and
`core.train.convert` writes the whole parameter under its original name again.
"""
