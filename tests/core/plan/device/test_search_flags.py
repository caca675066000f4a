"""A layout's flags are taken by `sabia pretrain` as they are printed; fixed layouts are read."""

import json
import random
import shlex
from dataclasses import replace

import mesh_cases
import pytest
from plain_models import attention_layer, decoder
from training_cases import LENGTH, losses, make_tokens, sabia, torchrun

from sabia.cli.group import run
from sabia.core.errors import UsageError
from sabia.core.options.table import resolve
from sabia.core.parallel.mesh import Mesh, check_fits, make_mesh
from sabia.core.plan.chips import find_chip
from sabia.core.plan.counting.known import from_spec
from sabia.core.plan.device.layout import AXES, Layout, Workload, find_stack, stack_on
from sabia.core.plan.device.search_rules import SearchProblem, fixed_layout, parse_fields
from sabia.core.plan.device.survey import Survey
from sabia.core.plan.memory import RECIPES
from sabia.core.plan.output.layout import pretrain_flags
from sabia.core.recipes.training_config import batch_rows
from sabia.core.spec import from_config, new_config

H100, SABIA = find_chip("h100"), find_stack("sabia")
LLAMA_70B = decoder(
    "llama-3-70b", 8192, 128256, (replace(attention_layer(8192, 64, 8, 128, 28672), count=80),)
)


def work(model, sequence, rows, **more):
    return Workload(model, sequence, rows, RECIPES["fsdp-fp32"], **more)


JOB = work(LLAMA_70B, 8192, 512)


def parsed(flags):
    """What the command line makes of the flags."""
    parsed_layouts = []

    def keep(name, function, given):
        parsed_layouts.append(resolve(function.options, name, given, {}))
        return 0

    words = ["pretrain", "tokens/", "--config-json", "config.json", *shlex.split(flags)]
    assert run(words, keep, print) == 0
    return parsed_layouts[0]


@pytest.mark.parametrize("name", ["dense", "moe", "hybrid", "latent", "sinks"])
def test_the_command_and_the_trainer_take_any_layout_of_the_search(name):
    spec = from_config(mesh_cases.models()[name])
    problem = SearchProblem(work(from_spec(spec), 24, 24), H100, SABIA, {})
    survey = Survey(problem, [1, 4, 8, 12, 24])
    every = [(part[0], number) for part in survey.parts for number in range(part[0].size)]
    assert survey.fitting == len(every) > 50
    for some, number in random.Random(2).sample(every, 30):
        layout = some.one(number)
        given = parsed(pretrain_flags(problem.workload, layout))
        assert make_mesh(given.mesh, layout.chips) == Mesh(
            **{axis: getattr(layout, axis) for axis in AXES}
        )
        assert batch_rows(given, 24) == 24
        assert given.micro_batch == layout.micro_batch
        mesh = make_mesh(given.mesh, layout.chips)
        check_fits(spec, mesh, batch_rows(given, 24), 24)
        assert 24 % (mesh.rows * given.micro_batch) == 0


def test_flags_say_what_the_layout_says():
    layout = Layout(fsdp=8, tensor=4, pipe=2, micro_batch=2, recompute="selective")
    assert pretrain_flags(JOB, layout) == (
        "--mesh fsdp=8,tensor=4,pipe=2 --batch 512 --micro-batch 2 --remat matmuls --precision bf16"
    )
    alone = pretrain_flags(replace(JOB, precision="fp8"), Layout(recompute="none"), backend="jax")
    assert alone == (
        "--backend jax --mesh data=1 --batch 512 --micro-batch 1 --remat none --precision fp8"
    )
    adapted = replace(JOB, adapter_params=1_000_000)
    assert pretrain_flags(adapted, Layout(), lora_rank=16).endswith(" --lora-rank 16")
    assert parsed(pretrain_flags(adapted, Layout(), lora_rank=16)).lora_rank == 16


def test_a_format_that_the_trainer_has_not_is_refused():
    with pytest.raises(UsageError, match="mxfp8 is not supported by sabia pretrain"):
        pretrain_flags(replace(JOB, precision="mxfp8"), Layout())


@pytest.mark.parametrize("chip", ["h100", "v5p", "cpu"])
@pytest.mark.parametrize(
    "text", ["pipe=2,virtual=2", "fsdp=2,zero=1", "tensor=2,experts-over-tensor=yes", "pipe=2"]
)
def test_layouts_that_the_trainer_cannot_run_are_refused(chip, text):
    chip = find_chip(chip)
    problem = SearchProblem(JOB, chip, stack_on("sabia", chip), parse_fields(text))
    if text == "pipe=2" and chip.family != "TPU":
        assert fixed_layout(problem, None).pipe == 2
    else:
        with pytest.raises(UsageError, match="layout: "):
            fixed_layout(problem, None)


def fixed(text, stack="megatron", chips=None):
    return fixed_layout(SearchProblem(JOB, H100, find_stack(stack), parse_fields(text)), chips)


def test_a_fixed_layout_is_read_as_it_is():
    text = "fsdp=8,tensor=4,pipe=2,micro-batch=2,recompute=full,zero=1,virtual=2"
    assert fixed(text) == Layout(
        fsdp=8, tensor=4, pipe=2, micro_batch=2, recompute="full", zero=1, virtual=2
    )
    assert fixed("tp=8, pp=2, mb=4, recompute=none", chips=64) == Layout(
        data=4, tensor=8, pipe=2, micro_batch=4, recompute="none", zero=1
    )
    assert fixed("fsdp=8", "sabia") == Layout(fsdp=8, sequence_parallel=False)
    assert fixed("tensor=8,sequence-parallel=no").sequence_parallel is False
    assert fixed("tensor=16").tensor == 16  # over nodes: slow, not wrong


def test_what_is_described_is_read_back():
    survey = Survey(SearchProblem(JOB, H100, find_stack("megatron"), {}), [512])
    for fitting, _, _ in survey.parts:
        for number in range(0, fitting.size, 200):
            layout = fitting.one(number)
            assert fixed(layout.described) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor=6", "tensor=6 does not divide 64 heads; use 4 or 8"),
        ("tensor=x", "'tensor=x' (expected a whole number, 1 or more)"),
        ("heads=2", "'heads=2' (expected FIELD=VALUE, each of data, fsdp"),
        ("tensor=2,tp=2", "'tp=2' (expected FIELD=VALUE"),
        ("recompute=half", "'recompute=half' (expected none, selective, full)"),
        ("zero=4", "'zero=4' (expected 0, 1, 2 or 3)"),
        ("sequence-parallel=2", "(expected yes or no)"),
        ("pipe=7", "pipe=7 does not divide 80 layers; use 5 or 8"),
        ("virtual=2", "virtual=2 with pipe=1"),
        ("pipe=16,virtual=3", "pipe=16 x virtual=3 = 48 does not divide 80 layers"),
        ("fsdp=8,micro-batch=3", "fsdp=8 x micro_batch=3 = 24 does not divide 512 rows"),
    ],
)
def test_a_fixed_layout_that_cannot_be_is_refused(text, message):
    with pytest.raises(UsageError) as error:
        fixed(text, "maxtext")
    assert message in str(error.value)


def test_a_fixed_layout_of_other_chips_is_refused():
    with pytest.raises(UsageError, match=r"has 24 chips \(expected --chips 24, or axes"):
        fixed("fsdp=8,pipe=3,data=1", "sabia", 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    ["data pipe", "tensor pipe", "expert pipe", "fsdp expert", "fsdp context", "tensor data"],
)
def test_the_trainer_runs_with_the_flags_as_printed(tmp_path, axes):
    """Random layouts of a small mixture on four processes, from the line to a finished run."""
    tokens = make_tokens(tmp_path / "tokens")
    config = new_config("mixtral", hidden=32, layers=4, vocab=304, heads=4,
                        kv_heads=2, experts=4, chosen=2, expert_ffn=32, context=64)  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    pinned = dict.fromkeys(axes.split(), 2)
    problem = SearchProblem(work(from_spec(from_config(config)), LENGTH, 16), H100, SABIA, pinned)
    parts = [part[0] for part in Survey(problem, [4]).parts]
    every = [(some, number) for some in parts for number in range(some.size)]
    some, number = random.Random(axes).choice(every)
    flags = shlex.split(pretrain_flags(problem.workload, some.one(number)))
    words = ("pretrain", tokens, "--config-json", tmp_path / "config.json", "--steps", "2")
    done = sabia(*words, *flags, "-o", tmp_path / "run", launcher=torchrun(4))
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 2
