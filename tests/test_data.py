"""The data order as a pure function of (seed, step), and the loading of text."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from minimeg import data
from minimeg.data import TextDataset, decode, encode, fingerprint, load_text, microbatch_count

S = 4


@pytest.fixture
def dataset():
    """Token i has the value i, so a window tells where it was cut: 37 training samples, 1 for validation."""
    return TextDataset(torch.arange(157), S)


def ids_of(dataset, batches):
    return [int(row[0]) // dataset.seq_length for batch in batches for row in batch.tokens]


def draw(dataset, step, *, d, r, b=2, g=8, seed=0):
    return dataset.microbatches(step, micro_batch_size=b, global_batch_size=g, dp_rank=r, dp_size=d, seed=seed)


# --- samples ---------------------------------------------------------------------------------------------------------


def test_windows_cover_the_training_text_once_and_stay_out_of_the_held_out_tail(dataset):
    assert (len(dataset), dataset.train_samples, dataset.valid_samples) == (37, 37, 1)
    assert dataset.train_tokens.tolist() + dataset.valid_tokens.tolist() == list(range(157))
    predicted = torch.cat(
        [mb.targets.flatten() for step in range(37) for mb in draw(dataset, step, d=1, r=0, b=1, g=1)]
    )
    assert sorted(predicted.tolist()) == list(range(1, 37 * S + 1))
    (held_out,) = dataset.valid_microbatches(0, micro_batch_size=1, global_batch_size=1, dp_rank=0, dp_size=1)
    assert held_out.tokens.tolist() == [list(range(150, 154))]


@pytest.mark.parametrize("n", range(157, 162))
def test_no_sample_that_fits_is_left_out_and_none_is_short(n):
    dataset = TextDataset(torch.arange(n), S)
    train, held_out = n - n // 20, n // 20
    assert dataset.train_samples == len(range(0, train - S, S))
    assert dataset.valid_samples == len(range(0, held_out - S, S))
    for batches in (
        draw(dataset, 0, d=1, r=0, b=1, g=dataset.train_samples),
        dataset.valid_microbatches(0, micro_batch_size=1, global_batch_size=1, dp_rank=0, dp_size=1),
    ):
        assert {tuple(batch.targets.shape) for batch in batches} == {(1, S)}


def test_targets_are_the_tokens_one_later(dataset):
    text = torch.randint(256, (500,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    dataset = TextDataset(text, S)
    for batch in draw(dataset, 3, d=1, r=0):
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert batch.valid.dtype == torch.bool
        assert batch.tokens.shape == batch.targets.shape == batch.valid.shape == (2, S)
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        assert batch.valid_tokens == 2 * S
        assert batch.step == 3
    ids = dataset.sample_ids(3, 8, 0)
    batches = draw(dataset, 3, d=1, r=0)
    for place, i in enumerate(ids):
        row = batches[place // 2]
        assert row.tokens[place % 2].tolist() == text[i * S : i * S + S].tolist()
        assert row.targets[place % 2].tolist() == text[i * S + 1 : i * S + S + 1].tolist()


def test_microbatches_share_no_memory_with_the_text(dataset):
    before = dataset.train_tokens.clone()
    for batch in draw(dataset, 0, d=1, r=0):
        assert batch.tokens.is_contiguous()
        batch.tokens.zero_()
        batch.targets.zero_()
    assert torch.equal(dataset.train_tokens, before)


def test_valid_tokens_counts_the_mask_and_to_moves_every_tensor(dataset):
    batch = draw(dataset, 0, d=1, r=0)[1]
    batch.valid[0, :3] = False
    assert batch.valid_tokens == 2 * S - 3
    moved = batch.to("meta")
    assert {moved.tokens.device.type, moved.targets.device.type, moved.valid.device.type} == {"meta"}
    assert (moved.index, moved.step) == (1, 0)


# --- the order -------------------------------------------------------------------------------------------------------


def test_order_depends_on_seed_and_step_only(dataset):
    expected = [dataset.sample_ids(step, 8, 7) for step in range(12)]  # more than two epochs of 37
    for step in reversed(range(12)):  # as a resumed run: a new object, an empty cache, another global generator
        data._permutation.cache_clear()
        torch.manual_seed(step)
        assert TextDataset(torch.arange(157), S).sample_ids(step, 8, 7) == expected[step]
    assert [dataset.sample_ids(step, 8, 8) for step in range(12)] != expected


def test_drawing_leaves_the_global_generator_alone(dataset):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    data._permutation.cache_clear()
    draw(dataset, 0, d=1, r=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_process_draws_the_same(dataset):
    program = (
        "import json, torch; from minimeg.data import TextDataset; torch.set_num_threads(1)\n"
        "print(json.dumps([TextDataset(torch.arange(157), 4).sample_ids(step, 8, 7) for step in range(6)]))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(Path(data.__file__).parents[1])}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(printed.stdout) == [dataset.sample_ids(step, 8, 7) for step in range(6)]


@pytest.mark.parametrize("g", [1, 5, 8, 37, 50, 100])  # 50 and 100: a batch larger than an epoch
def test_every_epoch_is_a_permutation_of_its_own_also_across_borders(dataset, g):
    steps = -(-4 * 37 // g)
    line = [i for step in range(steps) for i in dataset.sample_ids(step, g, 3)]
    epochs = [line[start : start + 37] for start in range(0, 4 * 37, 37)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list(range(37)) not in epochs, "not shuffled"
    one_by_one = [dataset.sample_ids(step, 1, 3)[0] for step in range(4 * 37)]
    assert line[: 4 * 37] == one_by_one, "the order of the samples does not depend on the batch size"


def test_seed_and_epoch_are_not_added(dataset):
    assert dataset.sample_ids(1, 37, 0) != dataset.sample_ids(0, 37, 1)  # epoch 1 of seed 0, epoch 0 of seed 1


@pytest.mark.parametrize("d", [1, 2, 4])
@pytest.mark.parametrize("b", [1, 2])
def test_data_parallel_ranks_are_disjoint_and_complete(d, b):
    dataset = TextDataset(torch.arange(20 * S * 2 + 10), S)  # 40 training samples: five steps of 8
    assert len(dataset) == 40
    for epoch in range(2):
        read = {r: [] for r in range(d)}
        for step in range(5 * epoch, 5 * epoch + 5):
            for r in range(d):
                read[r] += ids_of(dataset, draw(dataset, step, d=d, r=r, b=b))
        assert {len(ids) for ids in read.values()} == {40 // d}
        assert sorted(i for ids in read.values() for i in ids) == list(range(40))


@pytest.mark.parametrize("d", [1, 2, 4])
def test_global_batch_is_the_same_for_every_d(dataset, d):
    for step in range(10):  # the epoch's border lies inside step 4
        alone = draw(dataset, step, d=1, r=0)
        ranks = [draw(dataset, step, d=d, r=r) for r in range(d)]
        assert [batch.index for batches in ranks for batch in batches] == [0, 1, 2, 3]
        assert {len(batches) for batches in ranks} == {4 // d}
        for one, other in zip(alone, [batch for batches in ranks for batch in batches], strict=True):
            assert (one.index, one.step) == (other.index, other.step)
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.targets, other.targets)
        assert ids_of(dataset, alone) == dataset.sample_ids(step, 8, 0)


def test_validation_is_fixed_and_reads_the_tail_only():
    dataset = TextDataset(torch.arange(2000), S)  # 24 validation samples
    assert dataset.valid_samples == 24

    def read(iteration, d=1, r=0):
        return dataset.valid_microbatches(iteration, micro_batch_size=2, global_batch_size=8, dp_rank=r, dp_size=d)

    starts = [int(row[0]) for iteration in range(3) for batch in read(iteration) for row in batch.tokens]
    assert sorted(starts) == list(range(1900, 1996, S))
    assert starts != sorted(starts)
    assert max(int(batch.targets.max()) for iteration in range(9) for batch in read(iteration)) < 2000
    data._permutation.cache_clear()
    dataset.sample_ids(3, 8, 99)
    assert ids_of(dataset, read(1)) == ids_of(dataset, [*read(1, 2, 0), *read(1, 2, 1)])
    assert [batch.index for batch in [*read(1, 2, 0), *read(1, 2, 1)]] == [0, 1, 2, 3]
    assert len({tuple(dataset.valid_sample_ids(iteration, 24)) for iteration in range(3)}) == 3


# --- bad sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((10, 2, 2), r"global_batch_size 10 .* micro_batch_size 2 \* dp_size 2 = 4; nearest: 8 or 12"),
        ((3, 2, 2), r"global_batch_size 3 .* nearest: 4$"),
        ((0, 1, 1), "global_batch_size must be at least 1, not 0"),
        ((8, 0, 1), "micro_batch_size must be at least 1, not 0"),
        ((8, 1, -2), "dp_size must be at least 1, not -2"),
        ((8, 1, 2, 2), r"dp_rank must lie in 0\.\.1 for dp_size 2, not 2"),
        ((8, 1, 2, -1), r"dp_rank must lie in 0\.\.1 for dp_size 2, not -1"),
        ((0, -1, 2, 5), r"global_batch_size .*; micro_batch_size .*; dp_rank "),
    ],
)
def test_bad_batch_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        microbatch_count(*sizes)


def test_microbatches_check_their_sizes(dataset):
    assert microbatch_count(24, 2, 3) == 4
    with pytest.raises(ValueError, match="nearest: 8 or 12"):
        draw(dataset, 0, d=2, r=0, g=10)
    with pytest.raises(ValueError, match="dp_rank"):
        draw(dataset, 0, d=2, r=2)
    with pytest.raises(ValueError, match="nearest: 8 or 12"):
        dataset.valid_microbatches(0, micro_batch_size=2, global_batch_size=10, dp_rank=0, dp_size=2)
    with pytest.raises(
        ValueError, match="step must be at least 0, not -1; global_batch_size must be at least 1, not 0"
    ):
        dataset.sample_ids(-1, 0, 0)


def test_short_texts_are_refused_and_the_length_named_suffices():
    with pytest.raises(
        ValueError, match=r"99 tokens .* seq_length 4: it needs at least 100.*; seq_length 3 or less"
    ) as e:
        TextDataset(torch.zeros(99, dtype=torch.uint8), S)
    assert "\n" not in str(e.value)
    enough = TextDataset(torch.zeros(100, dtype=torch.uint8), S)
    assert (enough.train_samples, enough.valid_samples) == (23, 1)
    assert TextDataset(torch.zeros(99, dtype=torch.uint8), 3).valid_samples == 1
    with pytest.raises(ValueError, match=r"needs at least 100, .* validation$"):
        TextDataset(torch.zeros(30, dtype=torch.uint8), S)  # no seq_length fits


def test_bad_tokens_and_seq_length_are_refused_together():
    with pytest.raises(ValueError, match=r"tokens must be integers \[n\], not torch.float32 \[2, 3\]; seq_length must"):
        TextDataset(torch.zeros(2, 3), 0)


# --- text ------------------------------------------------------------------------------------------------------------


def test_default_text_is_the_standard_library():
    text = load_text()
    assert text.dtype == torch.uint8
    assert len(text) == data.STDLIB_BYTES
    assert torch.equal(load_text(), text)
    content = bytes(text.tolist())
    root = Path(sysconfig.get_path("stdlib"))
    for inside in ("argparse.py", "asyncio/base_events.py"):
        assert root.joinpath(inside).read_bytes() in content
    for outside in ("idlelib/config.py", "encodings/cp437.py", "unittest/test/test_case.py"):
        if root.joinpath(outside).exists():
            assert root.joinpath(outside).read_bytes() not in content
    assert content.index(root.joinpath("argparse.py").read_bytes()) < content.index(
        root.joinpath("ast.py").read_bytes()
    )


def test_python_without_sources_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"no Python source in .* give a data_path"):
        load_text()


def test_files_and_folders_are_joined_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "z.txt").write_text("z")
    (tmp_path / "b" / "Ä.txt").write_text("ä\n")
    (tmp_path / "b" / "a").mkdir()
    (tmp_path / "b" / "a" / "zz.md").write_text("y")
    (tmp_path / "b" / "a.txt").write_text("a")
    for ignored in (".git", "__pycache__", "empty"):
        (tmp_path / "b" / ignored).mkdir()
        (tmp_path / "b" / ignored / "x").write_text("" if ignored == "empty" else "x")
    (tmp_path / "b" / ".hidden").write_text("x")
    (tmp_path / "b" / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "b" / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "one").write_bytes(b"1\xff")
    assert decode(load_text([tmp_path / "b"])) == "ayzä\n"
    assert bytes(load_text([str(tmp_path / "one"), tmp_path / "b"]).tolist()) == b"1" + b"\xff" + "ayzä\n".encode()
    assert torch.equal(load_text(tmp_path / "one"), load_text([tmp_path / "one"]))  # a single path
    assert torch.equal(load_text(str(tmp_path / "one")), load_text([tmp_path / "one"]))
    twice = load_text([tmp_path / "b" / "z.txt", tmp_path / "b", tmp_path / "b"])
    assert decode(twice) == "zayä\n", "a file reached twice is read once: it must not be in both parts of the split"


def test_all_bad_paths_are_named_at_once(tmp_path):
    (tmp_path / "good").write_text("text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "only.bin").write_bytes(b"\0")
    os.mkfifo(tmp_path / "pipe")
    names = ["missing", "good", "empty.txt", "binary", "folder", "pipe"]
    with pytest.raises(ValueError, match="cannot load text") as error:
        load_text([tmp_path / name for name in names])
    message = str(error.value)
    assert f"{tmp_path / 'missing'}: no such file or folder" in message
    assert f"{tmp_path / 'empty.txt'}: an empty file" in message
    assert f"{tmp_path / 'binary'}: no text" in message
    assert f"{tmp_path / 'folder'}: a folder without text" in message
    assert f"{tmp_path / 'pipe'}: neither a file nor a folder" in message
    assert "good" not in message
    with pytest.raises(ValueError, match="no path given"):
        load_text([])


def test_what_may_not_be_read_is_named_not_left_out(tmp_path, monkeypatch):
    secret = tmp_path / "folder" / "secret.txt"
    secret.parent.mkdir()
    secret.write_text("x")
    secret.with_name("public.txt").write_text("y")
    read = Path.read_bytes

    def refuse(path):
        if path == secret:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"secret\.txt: Permission denied"):
        load_text(tmp_path / "folder")

    def list_nothing(path):
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "scandir", list_nothing)
    with pytest.raises(ValueError, match=r"folder: Permission denied"):
        load_text(tmp_path / "folder")


def test_encode_decode_and_fingerprint():
    text = "def f(): return 'ä'\n"
    tokens = encode(text)
    assert tokens.dtype == torch.uint8
    assert len(tokens) == len(text) + 1
    assert decode(tokens) == decode(tokens.tolist()) == text
    assert decode([65, 0xFF, 66]) == "A\ufffdB"
    assert encode("").tolist() == []
    assert (
        fingerprint(encode("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )  # FIPS 180-2
    with pytest.raises(ValueError, match="uint8"):
        fingerprint(torch.arange(3))
