"""Chips, shapes and state recipes on file: complete, dated, sane."""

import datetime
from dataclasses import MISSING, fields

import pytest

from sabia.core.errors import UsageError
from sabia.core.plan import chips
from sabia.core.plan.catalogue import read_data
from sabia.core.plan.chips import Chip, chip_of_device, find_chip, load_chips
from sabia.core.plan.counting.assumed import Shape, load_shapes
from sabia.core.plan.device.layout import Abilities, Stack
from sabia.core.plan.memory import RECIPES
from sabia.core.plan.serving.decode import Format, PublishedRatio

DAY = datetime.date(2026, 8, 1)


def accelerators():
    """All chips but a CPU's core, which stands for the machine at hand."""
    return {name: chip for name, chip in load_chips().items() if chip.family != "CPU"}


def test_every_chip_has_source_date_and_sane_figures():
    for name, chip in accelerators().items():
        assert chip.source and isinstance(chip.date, datetime.date), name
        assert 1e14 < chip.bf16_flops_per_s < 1e16, name
        assert chip.memory_source, name
        assert 0.97 < chip.usable_hbm_bytes / chip.hbm_bytes < 1.09, name
        assert chip.node_chips in (4, 8, 16), name


@pytest.mark.parametrize(
    ("name", "hbm_gb", "tflops"),
    [("h100", 80, 989), ("h200", 141, 989), ("b200", 192, 2250), ("mi300x", 192, 1307),
     ("v5p", 95, 459), ("v6e", 32, 918), ("trn2", 96, 667)],
)  # fmt: skip
def test_published_chip_figures(name, hbm_gb, tflops):
    chip = find_chip(name)
    assert (chip.hbm_bytes / 1e9, chip.bf16_flops_per_s / 1e12) == (hbm_gb, tflops)


@pytest.mark.parametrize(
    ("device", "chip", "per_device"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", 989e12),
        ("NVIDIA H100 PCIe", "h100-pcie", 756e12),
        ("NVIDIA H200", "h200", 989e12),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", 312e12),
        ("A100-SXM4-40GB", "a100-40gb", 312e12),
        ("NVIDIA A100-SXM4-80GB", "a100", 312e12),
        ("NVIDIA A100 80GB PCIe", "a100", 312e12),
        ("NVIDIA B200", "b200", 2250e12),
        ("AMD Instinct MI300X", "mi300x", 1307e12),
        ("TPU v4", "tpu-v4", 275e12),
        ("TPU v5 lite", "tpu-v5e", 197e12),
        ("TPU v5", "tpu-v5p", 459e12),
        ("TPU v6e", "tpu-v6e", 918e12),
        ("TPU7x", "tpu-v7", 2307e12 / 2),
        ("NVIDIA GH200 480GB", "gh200", 989e12),
        ("NVIDIA H20", "h20", 148e12),
        ("NVIDIA L40S", "l40s", 362e12),
    ],
)
def test_chips_by_the_names_of_devices(device, chip, per_device):
    known = chip_of_device(device)
    assert (known.name, known.bf16_flops_per_s / known.devices) == (chip, per_device)


@pytest.mark.parametrize(
    "device",
    ["cpu", "", "NVIDIA L4", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200 144G HBM3e",
     "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H20-3e", "TPU v5 lite podslice", "TPU v2"],
)  # fmt: skip
def test_a_device_that_is_no_chip_on_file_is_not_taken_for_one(device):
    assert chip_of_device(device) is None


@pytest.mark.parametrize(
    ("name", "gb"),
    [("h100", 85.5), ("a100", 85.9), ("b200", 191.5), ("gb200", 198.7), ("b300", 281.3)],
)
def test_memory_is_what_the_driver_reports(name, gb):
    assert find_chip(name).usable_hbm_bytes / 1e9 == pytest.approx(gb, abs=0.05)


def test_unknown_chip_gets_a_hint():
    with pytest.raises(UsageError, match="did you mean h100"):
        find_chip("h10")


def keys_of(kind, *left_out):
    """Keys that an entry of a dataclass must have, and all that it may have."""
    own = [field for field in fields(kind) if field.name not in left_out]
    names = {chips.NAMES.get(field.name, field.name): field.default for field in own}
    return {name for name, default in names.items() if default is MISSING}, set(names)


SERVING, STACKS = read_data("serving.toml"), read_data("stacks.toml")
RATIO, OFFER = keys_of(PublishedRatio)[0] | {"date"}, {"chip", "tier", "provider", "source", "date"}
# entries by name, their required keys, and all keys
SCHEMES = {
    "chips": (read_data("chips.toml"), *keys_of(Chip, "name")),
    "shapes": ({row["name"]: row for row in read_data("shapes.toml")["shape"]}, *keys_of(Shape)),
    "stacks": (STACKS, {"source", "date"}, keys_of(Stack, "name")[1] | {"like"}),
    "abilities": (
        {name: row["can"] for name, row in STACKS.items() if "can" in row},
        set(), keys_of(Abilities)[1],
    ),
    "prices": (
        dict(enumerate(read_data("prices.toml")["offer"])),
        OFFER, OFFER | {"by_hour", "spot", "committed"},
    ),
    "launch": (
        read_data("launch.toml"), {"source", "date"},
        {"source", "date", "tpu", "cores", "slices", "slice_step", "slice_most", "skypilot"},
    ),
    "efficiencies": (
        {name: row for name, row in SERVING.items() if name not in ("format", "judged")},
        *[{"value", "source", "date"}] * 2,
    ),
    "formats": (SERVING["format"], *keys_of(Format, "name")),
    "ratios": (SERVING["judged"], RATIO, RATIO),
}  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_entry_has_its_keys_and_a_real_date(scheme):
    entries, required, known = SCHEMES[scheme]
    assert entries
    for name, entry in entries.items():
        assert required <= entry.keys() <= known, name
        assert isinstance(entry.get("date", DAY), datetime.date), name


def test_shapes_are_of_possible_models():
    for shape in load_shapes():
        assert 0 < shape.active <= shape.params, shape.name
        dense_part = 4 * shape.config["num_hidden_layers"] * shape.config["hidden_size"] ** 2
        assert dense_part < shape.params * 1.5, shape.name


@pytest.mark.parametrize(
    ("name", "held", "durable"),
    [("adamw16", 16, 12), ("megatron18", 18, 12), ("fsdp-fp32", 16, 12), ("jax10", 10, 10),
     ("bf16-moments", 12, 8), ("muon", 12, 8), ("lion", 12, 8), ("adam8bit", 10, 6),
     ("soap", 32, 28)],
)  # fmt: skip
def test_state_recipes(name, held, durable):
    recipe = RECIPES[name]
    assert (recipe.bytes_per_param, recipe.durable) == (held, durable)


@pytest.mark.parametrize(
    ("name", "fp8", "fp4", "hbm_tb_s", "scale_up_gb_s", "domain", "axes"),
    [
        ("a100", None, None, 2.039, 300, 8, 0),
        ("h100", 1979e12, None, 3.35, 450, 8, 0),
        ("h100-96gb", 1979e12, None, 2.4, 450, 8, 0),
        ("b200", 4500e12, 9000e12, 8.0, 900, 8, 0),
        ("gb200", 5000e12, 10000e12, 8.0, 900, 72, 0),
        ("v5e", None, None, 0.81, 180, 256, 2),
        ("v5p", 459e12, None, 2.765, 540, 8960, 3),
        ("v7", 4614e12, None, 7.37, 600, 9216, 3),
    ],
)  # fmt: skip
def test_published_rates_and_bandwidths(name, fp8, fp4, hbm_tb_s, scale_up_gb_s, domain, axes):
    chip = find_chip(name)
    assert (chip.fp8_flops_per_s, chip.fp4_flops_per_s) == (fp8, fp4)
    assert chip.hbm_bytes_per_s == pytest.approx(hbm_tb_s * 1e12)
    assert chip.scale_up_bytes_per_s == pytest.approx(scale_up_gb_s * 1e9)
    assert (chip.scale_up_domain, chip.torus_axes) == (domain, axes)


def test_metas_h100_has_less_power_and_a_lower_ceiling():
    sold, meta = find_chip("h100"), find_chip("h100-96gb")
    assert (meta.hbm_bytes, meta.power_w) == (96e9, 500)
    expected = sold.matmul_ceiling * (500 / 700) ** (1 / 3)
    assert meta.matmul_ceiling == pytest.approx(expected, rel=2e-3)


def test_rates_are_ordered_and_every_chip_can_be_timed():
    for name, chip in accelerators().items():
        assert chip.hbm_bytes_per_s and chip.scale_up_bytes_per_s, name
        assert chip.scale_up_domain >= chip.node_chips, name
        assert (chip.fp8_flops_per_s or chip.bf16_flops_per_s) >= chip.bf16_flops_per_s, name
        assert (chip.fp4_flops_per_s or 1e20) >= (chip.fp8_flops_per_s or 0), name
        assert 0.4 < (chip.matmul_ceiling or 0.5) < 0.95, name
        assert (chip.torus_axes > 0) == (chip.family == "TPU"), name
