"""Meshes: what `--mesh` says, who lies where, and what does not divide is refused with a mend."""

import itertools

import pytest

from sabia.core.errors import UsageError
from sabia.core.parallel import mesh as rules
from sabia.core.parallel.mesh import Mesh, make_mesh, parse_mesh
from sabia.core.spec import from_config, new_config

SPEC = from_config(
    new_config("llama", hidden=72, layers=2, vocab=293, heads=6, kv_heads=2, head_dim=20, ffn=104)
)


def test_parse() -> None:
    assert parse_mesh("") == {}
    assert parse_mesh("fsdp=4, tensor=2") == {"fsdp": 4, "tensor": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model=2", "each axis of data, fsdp"),
        ("data=0", "AXIS=N"),
        ("data", "AXIS=N"),
        ("data=2,data=2", "at most once"),
    ],
)
def test_refusals(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_mesh(text)


def test_what_is_not_given_lies_along_data() -> None:
    assert make_mesh("", 4) == Mesh(data=4)
    assert make_mesh("tensor=2", 8) == Mesh(data=4, tensor=2)
    assert str(make_mesh("tensor=2,fsdp=4", 8)) == "fsdp=4,tensor=2"
    with pytest.raises(UsageError, match=r"needs 3 devices, there are 4 \(torchrun\)"):
        make_mesh("tensor=3", 4, "torchrun")
    with pytest.raises(UsageError, match="needs 2 devices, there are 4"):
        make_mesh("data=1,tensor=2", 4)


def test_ranks_and_coordinates() -> None:
    mesh = Mesh(data=2, fsdp=3, tensor=2, pipe=2)
    places = [tuple(mesh.coordinates(rank).items()) for rank in range(mesh.size)]
    assert len(set(places)) == mesh.size == 24
    assert dict(places[1])["tensor"] == 1 and dict(places[12])["pipe"] == 1
    assert sorted(itertools.chain(*mesh.peers(("fsdp", "tensor")))) == list(range(24))
    assert all(len(group) == 6 for group in mesh.peers(("fsdp", "tensor")))
    assert [mesh.row_part(rank) for rank in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_every_element_has_one_owner() -> None:
    mesh = Mesh(data=2, fsdp=2, tensor=2)
    for tensor in SPEC.tensors():
        split = rules.weight_split(tensor, mesh)
        count = 0
        for rank in range(mesh.size):
            if rules.owns(split, mesh, rank):
                slices = rules.shard_slices(tensor.shape, split, mesh, rank)
                size = 1
                for part in slices:
                    size *= part.stop - part.start
                count += size
        assert count == tensor.size, tensor.name


def test_an_odd_vocabulary_is_held_whole() -> None:
    table = {t.name: t for t in SPEC.tensors()}
    assert rules.weight_split(table["embed"], Mesh(tensor=2, fsdp=2)) == (None, "fsdp")
    assert rules.weight_split(table["layers.0.attn.q"], Mesh(tensor=2)) == ("tensor", None)
    assert rules.activation_split(("batch", "sequence", None), Mesh(data=2, context=2)) == (
        ("data",),
        ("context",),
        (),
    )


@pytest.mark.parametrize(
    ("mesh", "rows", "length", "said"),
    [
        (Mesh(tensor=3), 6, 32, r"tensor=3 does not divide kv-heads \(2\); sizes that fit: 1, 2$"),
        (Mesh(fsdp=5), 10, 32, r"fsdp=5 does not divide embed of embed \(72\).*: 3, 4, 6$"),
        (Mesh(context=3), 6, 32, r"the tokens of a row \(32\)"),
        (Mesh(data=2, fsdp=2), 6, 32, "a multiple of 4, such as 8"),
        (Mesh(pipe=3), 6, 32, "pipe=3 with 2 layers"),
        (Mesh(expert=2), 6, 32, "without experts"),
    ],
)
def test_uneven_meshes_are_refused(mesh: Mesh, rows: int, length: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        rules.check_fits(SPEC, mesh, rows, length)


def test_even_meshes_fit() -> None:
    rules.check_fits(SPEC, Mesh(data=2, fsdp=4, context=2, tensor=2, pipe=2), 16, 32)
