"""Collectives: volumes of simulated rings, groups of the trainer's own mesh, bandwidth rules."""

import itertools
import random
from dataclasses import replace

import pytest

from sabia.core.errors import UsageError
from sabia.core.parallel.mesh import Mesh
from sabia.core.plan.chips import find_chip
from sabia.core.plan.device.layout import Layout, Stack
from sabia.core.plan.device.step_network import (
    RankGroup,
    bandwidth,
    exchange_s,
    gather_s,
    group,
    send_s,
)

H100, V5P = find_chip("h100"), find_chip("v5p")
PLAIN = Stack("plain")
AXES = ("data", "fsdp", "expert", "context", "tensor", "pipe")


def ring_gather_bytes(size: float, ranks: int) -> float:
    """Bytes that rank 0 sends while each of `ranks` parts goes round the ring."""
    held = {rank: {rank} for rank in range(ranks)}
    sent = 0.0
    while len(held[0]) < ranks:
        new = {rank: held[(rank - 1) % ranks] - held[rank] for rank in held}
        for rank, parts in new.items():
            part = min(parts, key=lambda p: (rank - p) % ranks)
            held[rank] = held[rank] | {part}
            sent += size / ranks if rank == 0 else 0
    return sent


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_gather_moves_what_a_ring_moves(ranks):
    seconds = gather_s(8e9, RankGroup(ranks, 1), ranks, H100, PLAIN)
    assert seconds * 450e9 == pytest.approx(ring_gather_bytes(8e9, ranks))


def meshes(count: int):
    """Random meshes of powers of two."""
    rng = random.Random(7)
    for _ in range(count):
        yield Mesh(**{axis: 2 ** rng.choice((0, 0, 1, 1, 2, 3)) for axis in AXES})


@pytest.mark.parametrize("domain", [4, 8, 64])
def test_groups_lie_in_nodes_as_the_trainers_mesh_lays_them(domain):
    chip = replace(H100, scale_up_domain=domain)
    for mesh in meshes(40):
        layout = Layout(**{axis: mesh.along(axis) for axis in AXES})
        for axis in AXES:
            peers = mesh.peers((axis,))[0]
            together = sum(rank // domain == peers[0] // domain for rank in peers)
            who = group(layout, axis)
            assert who.domain_ranks(chip) == together, (mesh, axis)
            assert who.leaves(chip) == (together < len(peers)), (mesh, axis)


@pytest.mark.parametrize(
    ("stride", "cards"), [(1, 8), (2, 4), (4, 2), (8, 1), (64, 1)]
)  # ranks of one group in a node of eight
def test_a_group_across_nodes_has_the_cards_of_its_ranks_in_the_node(stride, cards):
    assert bandwidth(RankGroup(32, stride), 2048, H100, PLAIN) == min(450e9, cards * 50e9)
    assert bandwidth(RankGroup(32, stride), 2048, H100, Stack("x", bare_network=True)) == 50e9


def test_a_group_inside_the_node_has_its_links():
    assert bandwidth(RankGroup(8, 1), 2048, H100, PLAIN) == 450e9
    assert bandwidth(RankGroup(64, 1), 2048, find_chip("gb200"), PLAIN) == 900e9


def test_a_torus_gives_a_group_the_links_of_its_axes():
    whole = bandwidth(RankGroup(4096, 1), 4096, V5P, PLAIN)
    assert whole == 540e9
    assert bandwidth(RankGroup(16, 1), 4096, V5P, PLAIN) == pytest.approx(540e9 / 3)
    assert bandwidth(RankGroup(2, 1), 4096, V5P, PLAIN) == pytest.approx(540e9 / 3)
    assert bandwidth(RankGroup(256, 16), 4096, V5P, PLAIN) == pytest.approx(540e9 * 2 / 3)


def test_pods_are_joined_by_the_host_network():
    pod = replace(find_chip("v5e"), scale_up_domain=256)
    layout = Layout(data=4, fsdp=256)
    assert bandwidth(group(layout, "data"), 1024, pod, PLAIN) == 3.125e9
    assert bandwidth(group(layout, "fsdp"), 1024, pod, PLAIN) == 180e9


@pytest.mark.parametrize(("ranks", "stride"), [(4, 1), (8, 1), (16, 1), (8, 4), (64, 1)])
def test_an_exchange_sends_each_peer_its_part(ranks, stride):
    places = [rank * stride // 8 for rank in range(ranks)]
    near = sum(index == places[0] for index in places) - 1
    inside, outside = near / ranks / 450e9, (ranks - 1 - near) / ranks / 50e9
    assert exchange_s(1e9, RankGroup(ranks, stride), 512, H100) == pytest.approx(
        1e9 * max(inside, outside)
    )


def test_an_exchange_may_send_a_token_once_to_each_place():
    """Each of 4 copies goes to one of 16 ranks in 2 nodes; counted over all ways."""
    ways = [set(way) for way in itertools.product(range(16), repeat=4)]
    ranks = sum(map(len, ways)) / len(ways)
    nodes = sum(len({rank // 8 for rank in way}) for way in ways) / len(ways)
    inside, outside = ranks / 4 * 7 / 16 / 450e9, nodes / 4 / 2 / 50e9
    seen = exchange_s(1e9, RankGroup(16, 1), 512, H100, 4)
    assert seen == pytest.approx(1e9 * max(inside, outside))
    assert exchange_s(1e9, RankGroup(16, 1), 512, H100, 1) == exchange_s(
        1e9, RankGroup(16, 1), 512, H100
    )
    near = exchange_s(1e9, RankGroup(8, 1), 512, H100, 4) / exchange_s(
        1e9, RankGroup(8, 1), 512, H100
    )
    assert near == pytest.approx(8 * (1 - (7 / 8) ** 4) / 4)


def test_stages_in_one_node_send_over_its_links():
    assert send_s(1e9, Layout(pipe=4, tensor=2), H100) == pytest.approx(1e9 / 450e9)
    assert send_s(1e9, Layout(pipe=4, tensor=8), H100) == pytest.approx(1e9 / 50e9)


def test_a_missing_figure_is_named():
    small = replace(find_chip("v7"), scale_up_domain=64)
    with pytest.raises(UsageError, match=r"no nic_gb_s of tpu-v7"):
        bandwidth(RankGroup(128, 1), 128, small, PLAIN)
    none = replace(H100, scale_up_bytes_per_s=None)
    with pytest.raises(UsageError, match="scale_up_gb_s"):
        gather_s(1e9, RankGroup(8, 1), 8, none, PLAIN)


@pytest.mark.parametrize(("axes", "tokens"), [(1, 2550), (3, 850)])
def test_weights_are_gathered_in_time_above_the_scaling_books_batch(axes, tokens):
    """Tokens a v5p chip above which FSDP is bound by arithmetic (jax-ml.github.io/scaling-book)."""
    ranks = {1: 16, 3: 4096}[axes]
    params = 1e9
    gather = gather_s(2 * params, RankGroup(ranks, 1), 4096, V5P, PLAIN) * ranks / (ranks - 1)
    balanced = gather * V5P.bf16_flops_per_s / (2 * params)
    assert balanced == pytest.approx(tokens, rel=1e-3)


def test_mixed_fsdp_and_tensor_split_best_where_the_scaling_book_says():
    """X_opt = sqrt(2BN/F) = 1618: two axes for FSDP, one for tensor, 4.19M tokens, 8960 chips."""
    batch, width, chips = 4.19e6, 28672, 8960
    hidden = 8192.0
    two = replace(H100, scale_up_bytes_per_s=2e9, scale_up_domain=chips)
    one = replace(H100, scale_up_bytes_per_s=1e9, scale_up_domain=chips)

    def seconds(fsdp: float) -> float:
        tensor = chips / fsdp
        weights = 2 * 2 * hidden * width / tensor
        stream = 2 * 2 * batch * hidden / fsdp
        # large groups: (n-1)/n is one in the book's formulas
        gathered = gather_s(weights, RankGroup(fsdp, 1), chips, two, PLAIN) * fsdp / (fsdp - 1)
        passed = gather_s(stream, RankGroup(tensor, 1), chips, one, PLAIN) * tensor / (tensor - 1)
        return gathered + passed

    best = min(range(100, 8000), key=seconds)
    assert best == pytest.approx((2 * batch * chips / width) ** 0.5, rel=2e-3)
    assert best == pytest.approx(1618, rel=2e-3)
