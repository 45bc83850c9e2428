"""Checkpoints that survive anything: written whole or not at all, verified before they are used, loadable in any layout.

    FOLDER/step-00000100/rank-00003.safetensors   what rank 3 alone holds: pieces of parameters and of the optimizer's state
                         manifest.json            sizes, sha256, and of which tensor each piece is part; written last
    FOLDER/latest                                 the name of the newest, for people and other programs

    entries.py    pieces of tensors, and how they become whole again
    manifest.py   what is in a checkpoint, and every way in which it can be wrong
    writer.py     a directory that appears complete, by a rename, or does not appear
    reader.py     the newest good checkpoint, and this rank's part of it

Nothing that is read is run: safetensors and JSON, no pickle. (``torch.load`` and ``torch.distributed.checkpoint`` load most flipped
bits without a word, and their metadata is a pickle.)

See it run: ``python -m minimeg.train --save out/run --save-interval 10``, then ``python -m minimeg.checkpoint inspect out/run``.
"""

from minimeg.checkpoint.entries import Entry
from minimeg.checkpoint.manifest import CheckpointError, verify
from minimeg.checkpoint.reader import Loaded, find, load
from minimeg.checkpoint.writer import Writer

__all__ = ["CheckpointError", "Entry", "Loaded", "Writer", "find", "load", "verify"]
