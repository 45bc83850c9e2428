"""Whatever happens to the files, it is found before a number of the model changes, and the checkpoint before is used."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from minimeg.checkpoint import CheckpointError, Entry, Writer, find, load, verify
from minimeg.checkpoint import __main__ as program
from minimeg.checkpoint.manifest import MANIFEST, Manifest
from minimeg.checkpoint.reader import whole
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.parameter import Shard

ABOUT = {"num_layers": 2}


def entries(scale: float = 1.0) -> list[Entry]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"a.weight": (7, 5), "b.weight": (3,), "c.weight": (4, 4)}
    return [
        Entry(kind, Shard(name, shape), torch.randn(shape, generator=generator) * scale)
        for name, shape in shapes.items()
        for kind in ("parameter", "exp_avg")
    ]


def two_ranks(folder: Path, scale: float, step: int) -> None:
    """Each rank holds one half of every tensor: two files."""
    state = initialize_model_parallel(2)
    pieces = [
        Entry(e.kind, Shard(e.shard.name, e.shard.full_shape, 0, state.tp.rank, 2, e.shard.full_shape[0] % 2), e.tensor)
        for e in entries(scale)
    ]
    cut = [Entry(e.kind, e.shard, e.shard.cut(e.tensor)) for e in pieces]
    Writer(folder, state).save(step, cut, ABOUT, {"n": step})


@pytest.fixture
def saved(ranks: Any, tmp_path: Path) -> Path:
    """Steps 1 and 2, of two files and a manifest each."""
    for step in (1, 2):
        ranks(2, two_ranks, tmp_path / "run", float(step), step)
    return tmp_path / "run"


def loads_the_one_before(folder: Path) -> str:
    """Loads, checks that it is step 1, whole, and says why step 2 was not used."""
    mine = entries(0.0)
    loaded = load(folder, mine, ABOUT, single_process())
    assert (loaded.step, loaded.scalars) == (1, {"n": 1})
    for entry, expected in zip(mine, entries(1.0), strict=True):
        assert torch.equal(entry.tensor, expected.tensor)
    (reason,) = loaded.refused
    return reason


def test_a_good_one_is_whole(saved: Path) -> None:
    mine = entries(0.0)
    loaded = load(saved, mine, ABOUT, single_process())
    assert (loaded.step, loaded.refused, (saved / "latest").read_text()) == (2, [], "step-00000002")
    for entry, expected in zip(mine, entries(2.0), strict=True):
        assert torch.equal(entry.tensor, expected.tensor)
    assert sorted(path.name for path in loaded.place.iterdir()) == [
        MANIFEST, "rank-00000.safetensors", "rank-00001.safetensors",
    ]  # fmt: skip


FILES = ["rank-00000.safetensors", "rank-00001.safetensors", MANIFEST]


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_and_every_flipped_bit_is_found(saved: Path, name: str) -> None:
    """CASE 41: 100 offsets, 200 bits, of each file."""
    place, path = saved / "step-00000002", saved / "step-00000002" / name
    good, dice = path.read_bytes(), random.Random(5)
    for offset in [0, len(good) - 1, *dice.sample(range(len(good)), 98)]:
        path.write_bytes(good[:offset])
        with pytest.raises(CheckpointError, match=name):
            verify(place)
    for _ in range(200):
        at, bit = dice.randrange(len(good)), 1 << dice.randrange(8)
        path.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
        with pytest.raises(CheckpointError, match=name):
            verify(place)
    assert name in loads_the_one_before(saved)
    path.write_bytes(good)
    assert verify(place).step == 2


def swap(place: Path) -> None:
    first, second = place / FILES[0], place / FILES[1]
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


DAMAGES = {
    "deleted": lambda place: (place / FILES[0]).unlink(),
    "emptied": lambda place: (place / FILES[1]).write_bytes(b""),
    "no manifest": lambda place: (place / MANIFEST).unlink(),
    "empty manifest": lambda place: (place / MANIFEST).write_bytes(b""),
    "shards swapped": swap,
    "steps mixed": lambda place: shutil.copy(place.parent / "step-00000001" / FILES[0], place / FILES[0]),
    "manifest of another step": lambda place: shutil.copy(place.parent / "step-00000001" / MANIFEST, place / MANIFEST),
    "a link": lambda place: ((place / FILES[0]).rename(place.parent / "x"), (place / FILES[0]).symlink_to(place.parent / "x")),
    "a directory": lambda place: ((place / FILES[0]).unlink(), (place / FILES[0]).mkdir()),
    "nested manifest": lambda place: (place / MANIFEST).write_text("[" * 100_000),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_other_damage_is_found_and_the_one_before_is_used(saved: Path, damage: str) -> None:
    DAMAGES[damage](saved / "step-00000002")
    assert "step-00000002" in loads_the_one_before(saved)
    assert program.main(["verify", str(saved)]) == 1


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_does_not_run(saved: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(saved)
    (saved / "step-00000002" / name).write_bytes(pickle.dumps(Bomb()))
    (saved / "latest").write_bytes(pickle.dumps(Bomb()))
    loads_the_one_before(saved)
    assert not (saved / "exploded").exists()


def forged(place: Path, **changes: Any) -> None:
    """A manifest by somebody who knows how to compute its checksum."""
    manifest = Manifest.from_bytes((place / MANIFEST).read_bytes())
    (place / MANIFEST).write_bytes(Manifest(**{**vars(manifest), **changes}).to_bytes())


@pytest.mark.parametrize(
    "name", ["../run/step-00000001/rank-00000.safetensors", "/etc/passwd", "..", "rank-0.safetensors", "x"]
)
def test_a_manifest_cannot_point_outside(saved: Path, name: str) -> None:
    forged(saved / "step-00000002", files={name: {"bytes": 1, "sha256": ""}})
    assert f"names a file {name!r}" in loads_the_one_before(saved)


def test_a_manifest_cannot_ask_for_memory_that_the_files_do_not_hold(saved: Path) -> None:
    place = saved / "step-00000002"
    tensors = json.loads(json.dumps(Manifest.from_bytes((place / MANIFEST).read_bytes()).tensors))
    tensors["parameter/a.weight"]["shape"] = [1 << 40, 5]
    forged(place, tensors=tensors)
    assert "parameter/a.weight: part 0 of 2 is not covered exactly once" in loads_the_one_before(saved)


def test_pieces_that_overlap_or_leave_a_gap_are_found(saved: Path) -> None:
    place = saved / "step-00000002"
    tensors = json.loads(json.dumps(Manifest.from_bytes((place / MANIFEST).read_bytes()).tensors))
    tensors["parameter/c.weight"]["pieces"] *= 2
    del tensors["exp_avg/c.weight"]["pieces"][1]
    forged(place, tensors=tensors)
    reason = loads_the_one_before(saved)
    assert "parameter/c.weight: part 0 of 2 is not covered exactly once" in reason
    assert "exp_avg/c.weight: part 1 of 2 is not covered exactly once" in reason


def test_when_all_are_bad_all_are_named_and_nothing_changes(saved: Path) -> None:
    for step in (1, 2):
        (saved / f"step-0000000{step}" / FILES[step - 1]).unlink()
    mine = entries(7.0)
    with pytest.raises(CheckpointError) as error:
        load(saved, mine, ABOUT, single_process())
    assert f"{FILES[0]} is missing" in str(error.value)
    assert f"{FILES[1]} is missing" in str(error.value)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(mine, entries(7.0), strict=True))


# ---- writing -----------------------------------------------------------------------------------------------------------------


def test_older_ones_are_pruned_and_the_newest_stays(tmp_path: Path) -> None:
    for keep in (1, 3):
        folder = tmp_path / str(keep)
        writer = Writer(folder, single_process(), keep=keep)
        for step in range(1, 6):
            writer.save(step, entries(), ABOUT, {})
            assert find(folder)[1].step == step
        assert [path.name for path in sorted(folder.glob("step-*"))] == [
            f"step-{step:08d}" for step in range(6 - keep, 6)
        ]
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        Writer(tmp_path, single_process(), keep=0)


def test_a_step_that_is_saved_again_replaces_a_bad_one_only(tmp_path: Path) -> None:
    writer = Writer(tmp_path, single_process())
    writer.save(1, entries(1.0), ABOUT, {})
    writer.save(1, entries(2.0), ABOUT, {})
    assert torch.equal(whole(*find(tmp_path)[:2], "parameter/b.weight"), entries(1.0)[2].tensor)
    (tmp_path / "step-00000001" / FILES[0]).write_bytes(b"")
    writer.save(1, entries(2.0), ABOUT, {})
    assert torch.equal(whole(*find(tmp_path)[:2], "parameter/b.weight"), entries(2.0)[2].tensor)


def full_disk(folder: Path, rank: int, asynchronous: bool) -> str:
    state = initialize_model_parallel(2)
    writer = Writer(folder, state, asynchronous=asynchronous, timeout=2)
    if state.rank == rank:
        import minimeg.checkpoint.writer as module

        real = module.save_file
        module.save_file = lambda tensors, path: (_ for _ in ()).throw(OSError(28, "No space left on device"))

    def attempt() -> None:
        whole_ones = [Entry(e.kind, Shard(e.shard.name, e.shard.full_shape), e.tensor) for e in entries()]
        writer.save(3, whole_ones, ABOUT, {})
        writer.wait()

    try:
        with pytest.raises(CheckpointError) as error:
            attempt()
    finally:
        if state.rank == rank:
            module.save_file = real
    return str(error.value)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_old_one(ranks: Any, saved: Path, asynchronous: bool) -> None:
    for message in ranks(2, full_disk, saved, 0, asynchronous):
        assert "the checkpoint was not written; the one before it stays" in message
        assert "rank 0: OSError: [Errno 28] No space left on device" in message
    assert find(saved)[1].step == 2
    ranks(2, two_ranks, saved, 3.0, 3)  # there is room again
    assert find(saved)[1].step == 3
    assert not list(saved.glob("*.tmp"))


def test_training_goes_on_while_an_asynchronous_save_writes(tmp_path: Path) -> None:
    mine = entries(1.0)
    writer = Writer(tmp_path, single_process(), asynchronous=True)
    writer.save(1, mine, ABOUT, {})
    for entry in mine:
        entry.tensor.fill_(-1)  # the optimizer's next step
    writer.wait()
    assert torch.equal(whole(*find(tmp_path)[:2], "parameter/a.weight"), entries(1.0)[0].tensor)


# ---- the command line --------------------------------------------------------------------------------------------------------


def test_inspect_verify_and_convert(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["inspect", str(saved)]) == 0
    said = capsys.readouterr().out
    assert "step 2, 2 files" in said
    assert "parameter/a.weight" in said
    assert "2 pieces" in said
    assert program.main(["verify", str(saved)]) == 0
    assert capsys.readouterr().out.count(": good, step") == 2
    one, again = saved.parent / "model.safetensors", saved.parent / "again"
    assert program.main(["convert", str(saved), str(one)]) == 0
    assert program.main(["convert", str(one), str(again)]) == 0
    mine = [entry for entry in entries(0.0) if entry.kind == "parameter"]
    assert load(again, mine, ABOUT, single_process()).kinds == {"parameter"}
    assert all(torch.equal(e.tensor, x.tensor) for e, x in zip(mine, entries(2.0)[::2], strict=True))
    capsys.readouterr()
    assert program.main(["inspect", str(saved.parent / "nowhere")]) == 1
    assert "there is none" in capsys.readouterr().err
