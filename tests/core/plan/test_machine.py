"""`--machine FILE`: a chip of one's own has the same plan as the chip on file with its figures."""

import datetime
import math

import pytest
from plan_calls import call, report

from sabia.core.errors import BadData, UsageError
from sabia.core.plan.chips import SCALED, find_chip
from sabia.core.plan.machine import NUMBERS, TEXTS, load_machine, machine_of

LAB = {"hbm_gb": 48, "node_chips": 4, "bf16_tflops": 362, "measured_tflops": 290.0}


def as_file(folder, **keys):
    path = folder / "lab.toml"
    quoted = {k: f'"{v}"' if isinstance(v, str) else v for k, v in keys.items()}
    path.write_text("".join(f"{key} = {value}\n" for key, value in quoted.items()))
    return path


def figures_of(name):
    """The entry of a chip on file, as a machine of another name."""
    chip = find_chip(name)
    entry = {"name": f"my-{name}", "family": chip.family, "node_chips": chip.node_chips}
    for key, (field, unit) in SCALED.items():
        if getattr(chip, field) is not None and key in NUMBERS:
            entry[key] = getattr(chip, field) / unit
    if chip.matmul_ceiling:
        entry["measured_tflops"] = chip.matmul_ceiling * entry["bf16_tflops"]
    if chip.torus_axes:
        entry["torus_axes"] = chip.torus_axes
    return {k: int(v) if k in ("node_chips", "scale_up_chips", "memory_mib") else v
            for k, v in entry.items()}  # fmt: skip


@pytest.mark.parametrize("name", ["h200", "a100", "tpu-v5p"])
@pytest.mark.parametrize("words", ["--search --chips 16 --price 2 --preempt 12h", "--price 2"])
def test_a_machine_with_the_figures_of_a_chip_has_its_plan(name, words, tmp_path):
    given = f"--params 8B --tokens 20B --deadline 60d {words}"
    path = as_file(tmp_path, **figures_of(name))
    own, on_file = report(f"{given} --machine {path}"), report(f"{given} --chip {name}")
    for mine, theirs in zip(own["rows"], on_file["rows"], strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("chips", "layout", "meets_deadline"):
            assert mine[key] == theirs[key]
        assert mine["finishes_s"] == pytest.approx(theirs["finishes_s"], rel=1e-9)
        assert mine["costs"][0]["cost_usd"] == pytest.approx(theirs["costs"][0]["cost_usd"])


def test_the_price_of_the_file_counts_unless_another_is_given(tmp_path):
    path = as_file(tmp_path, **LAB, usd_per_chip_hour=0.5)
    given = f"--params 1B --tokens 20B --machine {path}"
    own, other = report(given), report(f"{given} --price 1")
    assert [price["usd_per_chip_hour"] for price in own["prices"]] == [0.5]
    assert other["rows"][0]["costs"][0]["cost_usd"] == pytest.approx(
        2 * own["rows"][0]["costs"][0]["cost_usd"]
    )
    path = as_file(tmp_path, **LAB)
    assert report(given)["prices"] == []


def test_the_ceiling_is_the_measured_rate_over_the_peak():
    both = machine_of(LAB, "lab", "x").chip
    assert both.matmul_ceiling == pytest.approx(290 / 362) and both.bf16_flops_per_s == 362e12
    alone = machine_of({k: v for k, v in LAB.items() if k != "bf16_tflops"}, "lab", "x").chip
    assert (alone.matmul_ceiling, alone.bf16_flops_per_s) == (1, 290e12)
    assert both.usable_hbm_bytes == both.hbm_bytes == 48e9 and both.scale_up_domain == 4
    reported = machine_of({"memory_mib": 46068} | {k: v for k, v in LAB.items() if k != "hbm_gb"},
                          "lab", "x").chip  # fmt: skip
    assert reported.hbm_bytes == pytest.approx(46068 * 2**20)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"hbm": 3}, "unknown key 'hbm'"),
        ({"x" * 4000: 3}, "unknown key"),
        ({"hbm_gb": None}, "hbm_gb is missing"),
        ({"bf16_tflops": None, "measured_tflops": None}, "bf16_tflops or measured_tflops"),
        ({"node_chips": 2.5}, "node_chips: '2.5' .expected a whole number"),
        ({"node_chips": True}, "node_chips: 'True'"),
        ({"hbm_gb": "48"}, "hbm_gb: '48' .expected a number"),
        ({"hbm_gb": math.nan}, "hbm_gb: 'nan'"),
        ({"hbm_gb": -1}, "hbm_gb: '-1'"),
        ({"hbm_gb": 10**30}, "hbm_gb"),
        ({"hbm_gb": [1] * 100000}, "hbm_gb"),
        ({"hbm_gb": {"a": 1}}, "hbm_gb"),
        ({"family": "abacus"}, "family: 'abacus' .expected one of GPU"),
        ({"name": ""}, "name: ''"),
        ({"name": "H100"}, "is a chip on file"),
        ({"date": "today"}, "date: 'today'"),
        ({"hbm_gb": 10**400}, "hbm_gb: '1000"),
        ({"measured_tflops": 400}, "measured_tflops 400 .expected at most bf16_tflops 362"),
    ],
)
def test_odd_values_get_one_short_line(change, hint):
    entry = {k: v for k, v in (LAB | change).items() if v is not None}
    with pytest.raises(UsageError, match=hint) as error:
        machine_of(entry, "lab", "--machine: lab.toml")
    assert len(str(error.value)) <= 500 and "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["/dev/zero", "/", "missing.toml", "binary", "text", "x" * 5000])
def test_odd_files_get_one_short_line(path, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "text").write_text("not toml at all")
    path = str(tmp_path / path) if path in ("binary", "text") else path
    with pytest.raises((UsageError, BadData)) as error:
        load_machine(path)
    assert len(str(error.value)) <= 500 and "\n" not in str(error.value)


def test_a_layout_that_needs_a_missing_rate_names_its_key(tmp_path):
    path = as_file(tmp_path, **LAB)
    done = call(f"--params 1B --tokens 20B --machine {path} --chips 4 --search")
    assert done.code == 2 and "no hbm_tb_s of lab" in done.stderr
    one = as_file(tmp_path, **LAB, hbm_tb_s=0.8)
    words = f"--params 100M --tokens 1B --deadline 60d --machine {one} --search"
    assert call(f"{words} --chips 1").code == 0  # links and network are not needed
    done = call(f"{words} --chips 4")
    assert done.code == 2 and "no scale_up_gb_s of lab" in done.stderr


@pytest.mark.parametrize(
    "words", ["--chip h100", "--compare h100,a100", "--provider aws", "--region us", "--offers"]
)
def test_what_names_other_chips_is_refused(words, tmp_path):
    done = call(f"--params 1B --machine {as_file(tmp_path, **LAB)} {words}")
    assert done.code == 2 and "--machine" in done.stderr


def test_a_slurm_script_asks_for_the_gpus_of_the_machine(tmp_path):
    path = as_file(tmp_path, **LAB, hbm_tb_s=0.8, scale_up_gb_s=31, nic_gb_s=3, pcie_gb_s=31)
    words = f"--params 100M --tokens 1B --deadline 60d --machine {path} --chips 4 --search"
    done = call(f"{words} --emit slurm")
    assert done.code == 0 and "--gres=gpu:4" in done.stdout


def test_keys_of_the_help_are_those_that_are_read():
    text = call("--help=json").stdout
    assert {key for key in NUMBERS | TEXTS | {"date"} if f"`{key}`" not in text} == set()
    assert isinstance(machine_of(LAB | {"date": datetime.date(2026, 1, 1)}, "a", "x").chip.date,
                      datetime.date)  # fmt: skip
