"""Text as bytes, and who reads which of it: the data order is a function of (seed, step) and of nothing else.

What it teaches. A data-parallel rank must read what no other rank reads, all ranks together must read everything, and the
tensor and pipeline ranks of one replica must read the same. No communication is needed for that: every rank computes the
same permutation from the same key and takes its own part of it. A loader that keeps a position, or seeds by rank or by
clock, gets this wrong in silence: samples are repeated on some ranks and skipped on others, and a resumed run replays the
first epoch. Here there is no position to lose; resuming at a step needs the step's number only.

    samples of the step     0 1 2 3 | 4 5 6 7        global batch 8, micro-batch b = 2, d = 2, hence m = 2
    micro-batch               0   1 |   2   3        rank r reads micro-batches r*m ... r*m + m - 1
    data-parallel rank           0  |      1         the order of the global batch is the same for every d

The vocabulary is the 256 bytes, so there is no tokenizer to train or to download.

    python -c "from minimeg.data import decode, load_text; print(decode(load_text()[:500]))"
"""

import functools
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

VOCAB_SIZE = 256
STDLIB_BYTES = 4 * 2**20  # of the standard library's 11 MB: more than a laptop trains on in an hour, read in a blink
HOLDOUT = 20  # the last twentieth of a text is for validation

# Not the prose of programmers: other people's packages, tests, and tables (character maps, help topics, build settings).
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What one forward pass reads. Ranks of one data-parallel position hold equal ones."""

    tokens: torch.Tensor  # [b, s] int64
    targets: torch.Tensor  # [b, s] int64: the token after each
    valid: torch.Tensor  # [b, s] bool: does this target count in the loss?
    index: int  # position among the micro-batches of the global batch: keys the dropout masks (rng.py)
    step: int

    @property
    def valid_tokens(self) -> int:
        """Number of targets that count. Their sum over the global batch is the loss's normaliser."""
        return int(self.valid.sum())

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same micro-batch with its tensors on `device`."""
        return replace(
            self, tokens=self.tokens.to(device), targets=self.targets.to(device), valid=self.valid.to(device)
        )


def encode(text: str) -> torch.Tensor:
    """The UTF-8 bytes of a string as uint8 [n]."""
    return _as_tensor(text.encode())


def decode(tokens: torch.Tensor | Iterable[int]) -> str:
    """The string of some tokens [n]; bytes that are no UTF-8 (a model may well generate them) show as U+FFFD."""
    return bytes(tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens).decode(errors="replace")


def load_text(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None) -> torch.Tensor:
    """The bytes of some text, joined, as uint8 [n]; the same on every machine that holds the same files.

    paths: files or folders, in the order of reading. A folder is read with all below it, sorted by path; hidden names,
    __pycache__ and files that are no text (they hold a zero byte) are passed over, and a file reached twice is read once.
    None: Python source of the standard library, its first 4 MiB.
    ValueError names every path that is missing, empty, not text, or a folder without text.
    """
    if paths is None:
        return _load_standard_library()
    given = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    faults = [] if given else ["no path given; leave it out to read the source of Python's standard library"]
    parts: dict[Path, bytes] = {}
    for path in given:
        try:
            parts |= _read(path)
        except (OSError, ValueError) as error:
            faults.append(f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else f"{path}: {error}")
    if faults:
        raise ValueError("cannot load text (data_path takes files or folders of text): " + "; ".join(faults))
    return _as_tensor(b"".join(parts.values()))


def fingerprint(tokens: torch.Tensor) -> str:
    """SHA-256 of a text (uint8 [n]), hexadecimal: machines, or a run and its resumption, can tell that theirs differ."""
    if tokens.dtype != torch.uint8 or tokens.dim() != 1:
        raise ValueError(f"a text is uint8 [n], not {tokens.dtype} {list(tokens.shape)}")
    digest = hashlib.sha256()
    for start in range(0, len(tokens), 2**20):  # in parts: a list of Python integers is large
        digest.update(bytes(tokens[start : start + 2**20].tolist()))
    return digest.hexdigest()


class TextDataset:
    """A text cut into samples of seq_length + 1 tokens, the last twentieth held out for validation.

    Sample i starts at token i * seq_length, so that neighbours share one token and every target is predicted once an
    epoch; what does not fill a sample at the end is left out. `len` is the number of training samples.
    ValueError names the length that is needed if the text is too short for one sample on each side.
    """

    def __init__(self, tokens: torch.Tensor, seq_length: int) -> None:
        faults = []
        if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            faults.append(f"tokens must be integers [n], not {tokens.dtype} {list(tokens.shape)}")
        if seq_length < 1:
            faults.append(f"seq_length must be at least 1, not {seq_length}")
        needed = HOLDOUT * (seq_length + 1)
        if not faults and len(tokens) < needed:
            fits = len(tokens) // HOLDOUT - 1
            faults.append(
                f"a text of {len(tokens)} tokens is too short for seq_length {seq_length}: it needs at least {needed}, "
                f"{HOLDOUT} times (seq_length + 1), since one in {HOLDOUT} tokens is held out for validation"
                + (f"; seq_length {fits} or less would fit" if fits >= 1 else "")
            )
        if faults:
            raise ValueError("; ".join(faults))
        self.seq_length = seq_length
        held_out = len(tokens) // HOLDOUT
        self.train_tokens, self.valid_tokens = tokens[: len(tokens) - held_out], tokens[len(tokens) - held_out :]
        self.train_samples = (len(self.train_tokens) - 1) // seq_length
        self.valid_samples = (len(self.valid_tokens) - 1) // seq_length

    def __len__(self) -> int:
        return self.train_samples

    def sample_ids(self, step: int, global_batch_size: int, seed: int) -> list[int]:
        """The training samples of a step (counted from 0), in the order of its global batch; equal on every rank.

        The epochs lie end to end, each a permutation of its own; a step takes its part of that line, across an epoch's
        border too (only then can a sample occur twice in a batch).
        """
        return _sample_ids("train", self.train_samples, step, global_batch_size, seed)

    def valid_sample_ids(self, iteration: int, global_batch_size: int) -> list[int]:
        """The validation samples of an iteration (counted from 0), shuffled once and for all.

        No seed and no step: any two validations of equal length read the same, and their losses compare. Past the last
        sample it begins again.
        """
        return _sample_ids("valid", self.valid_samples, iteration, global_batch_size, 0)

    def microbatches(
        self, step: int, *, micro_batch_size: int, global_batch_size: int, dp_rank: int, dp_size: int, seed: int
    ) -> list[MicroBatch]:
        """All m micro-batches of a step that a data-parallel rank reads: the contiguous block r of the global batch.

        Drawn before the step starts, because the loss is divided by the valid tokens of all of them.
        """
        m = microbatch_count(global_batch_size, micro_batch_size, dp_size, dp_rank)
        ids = self.sample_ids(step, global_batch_size, seed)
        return self._cut(self.train_tokens, ids, micro_batch_size, range(dp_rank * m, dp_rank * m + m), step)

    def valid_microbatches(
        self, iteration: int, *, micro_batch_size: int, global_batch_size: int, dp_rank: int, dp_size: int
    ) -> list[MicroBatch]:
        """As `microbatches`, of the held-out text; `step` of a micro-batch is the iteration."""
        m = microbatch_count(global_batch_size, micro_batch_size, dp_size, dp_rank)
        ids = self.valid_sample_ids(iteration, global_batch_size)
        return self._cut(self.valid_tokens, ids, micro_batch_size, range(dp_rank * m, dp_rank * m + m), iteration)

    def _cut(self, text: torch.Tensor, ids: list[int], b: int, indices: range, step: int) -> list[MicroBatch]:
        s = self.seq_length
        result = []
        for index in indices:
            windows = torch.stack([text[i * s : i * s + s + 1] for i in ids[index * b : index * b + b]]).long()
            tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()  # [b, s]
            result.append(MicroBatch(tokens, targets, torch.ones_like(tokens, dtype=torch.bool), index, step))
        return result


def microbatch_count(global_batch_size: int, micro_batch_size: int, dp_size: int, dp_rank: int = 0) -> int:
    """m, the micro-batches a data-parallel rank runs in a step: global_batch_size / (micro_batch_size * dp_size).

    ValueError lists all that is wrong with the sizes; what does not divide comes with the nearest sizes that do.
    """
    sizes = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size, "dp_size": dp_size}
    faults = [f"{name} must be at least 1, not {size}" for name, size in sizes.items() if size < 1]
    if dp_size >= 1 and not 0 <= dp_rank < dp_size:
        faults.append(f"dp_rank must lie in 0..{dp_size - 1} for dp_size {dp_size}, not {dp_rank}")
    together = micro_batch_size * dp_size
    if min(sizes.values()) >= 1 and global_batch_size % together != 0:
        below = global_batch_size // together * together
        nearest = f"{below} or {below + together}" if below else f"{together}"
        faults.append(
            f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} "
            f"* dp_size {dp_size} = {together}; nearest: {nearest}"
        )
    if faults:
        raise ValueError("; ".join(faults))
    return global_batch_size // together


def _sample_ids(part: str, samples: int, step: int, global_batch_size: int, seed: int) -> list[int]:
    faults = [f"step must be at least 0, not {step}"] if step < 0 else []
    if global_batch_size < 1:
        faults.append(f"global_batch_size must be at least 1, not {global_batch_size}")
    if faults:
        raise ValueError("; ".join(faults))
    ids: list[int] = []
    position, end = step * global_batch_size, (step + 1) * global_batch_size
    while position < end:
        epoch, offset = divmod(position, samples)
        ids += _permutation(part, samples, seed, epoch)[offset : offset + end - position].tolist()
        position = step * global_batch_size + len(ids)
    return ids


@functools.lru_cache(maxsize=4)
def _permutation(part: str, samples: int, seed: int, epoch: int) -> torch.Tensor:
    # Hashed, not seed + epoch: else epoch 1 of seed 0 were epoch 0 of seed 1. An own generator: whatever else has drawn from
    # the global one (a rank with more layers draws more) does not matter.
    key = hashlib.sha256(f"minimeg data {part} {seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:4], "little"))
    return torch.randperm(samples, generator=generator)


def _load_standard_library() -> torch.Tensor:
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    missing = STDLIB_BYTES
    for file in _files(root, _SKIPPED_FOLDERS):
        if missing <= 0:
            break
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata"):
            parts.append(file.read_bytes()[:missing])
            missing -= len(parts[-1])
    if not parts:
        raise ValueError(
            f"no Python source in {root}, the standard library of this Python; give a data_path of your own"
        )
    return _as_tensor(b"".join(parts))


def _read(path: Path) -> dict[Path, bytes]:
    """The text of a file, or of the files of a folder, by real path. ValueError or OSError says what is wrong."""
    if not path.exists():
        raise ValueError("no such file or folder")
    if not path.is_dir():
        if not path.is_file():  # a pipe would give its text to one rank only
            raise ValueError("neither a file nor a folder")
        text = path.read_bytes()
        if not text:
            raise ValueError("an empty file")
        if b"\0" in text:
            raise ValueError("no text: it holds a zero byte")
        return {path.resolve(): text}
    found = {file.resolve(): file.read_bytes() for file in _files(path, set())}
    found = {file: text for file, text in found.items() if text and b"\0" not in text}
    if not found:
        raise ValueError("a folder without text")
    return found


def _files(root: Path, skipped: set[str]) -> list[Path]:
    """Files below a folder in the order of their paths, by code point: not as the file system or the locale has them."""

    def fail(error: OSError) -> None:
        raise error  # os.walk by itself leaves out what it may not read

    found = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [
            name for name in subfolders if not name.startswith((".", "__pycache__")) and name not in skipped
        ]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(root).as_posix())


def _as_tensor(text: bytes) -> torch.Tensor:
    # frombuffer refuses an empty buffer; the copy makes the memory our own and writable
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
