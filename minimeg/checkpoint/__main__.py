"""Look into a checkpoint, verify it, or turn it into one file of whole tensors and back.

python -m minimeg.checkpoint inspect out/run                     the newest good one: step, tensors, sizes
python -m minimeg.checkpoint verify out/run                      all of them; exit code 1 if one is bad
python -m minimeg.checkpoint convert out/run model.safetensors   the parameters, whole, by their global names
python -m minimeg.checkpoint convert model.safetensors out/new   and back: a checkpoint without an optimizer
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from minimeg.checkpoint.entries import Entry
from minimeg.checkpoint.manifest import STEP, CheckpointError, verify
from minimeg.checkpoint.reader import find, whole
from minimeg.checkpoint.writer import Writer
from minimeg.parallel_state import single_process
from minimeg.parameter import Shard


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minimeg.checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("inspect", "verify", "convert"):
        commands.add_parser(name).add_argument("source", type=Path, metavar="DIR")
    commands.choices["convert"].add_argument("target", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.command == "inspect":
            print(inspect(options.source))
        elif options.command == "verify":
            return 0 if verify_all(options.source) else 1
        elif options.source.is_file():
            spread(options.source, options.target)
        else:
            gather(options.source, options.target)
    except (CheckpointError, SafetensorError, OSError) as error:
        print(f"minimeg.checkpoint: error: {error}", file=sys.stderr)
        return 1
    return 0


def inspect(folder: Path) -> str:
    """What the newest good checkpoint holds, as text."""
    place, manifest, refused = find(folder)
    size = sum(file["bytes"] for file in manifest.files.values())
    lines = [f"cannot be used: {reason}" for reason in refused]
    lines += [f"{place}: step {manifest.step}, {len(manifest.files)} files, {size:,} bytes"]
    lines += [f"model    {json.dumps(manifest.about)}", f"scalars  {json.dumps(manifest.scalars)}"]
    for name, tensor in sorted(manifest.tensors.items()):
        pieces = len(tensor["pieces"])
        lines.append(f"{name:<64} {tensor['dtype']:<9} {tensor['shape']!s:<14} {pieces} piece{'s' * (pieces > 1)}")
    for kind in sorted({name.split("/", 1)[0] for name in manifest.tensors}):
        elements = sum(prod(t["shape"]) for name, t in manifest.tensors.items() if name.startswith(f"{kind}/"))
        lines.append(f"{kind:<64} {elements:,} elements")
    return "\n".join(lines)


def verify_all(folder: Path) -> bool:
    """Every checkpoint in a folder, or the one that it is. True if there is one, and all are good."""
    places = (
        [folder] if STEP.fullmatch(folder.name) else sorted(p for p in folder.glob("step-*") if STEP.fullmatch(p.name))
    )
    if not places:
        print(f"{folder}: no checkpoint")
    good = bool(places)
    for place in places:
        try:
            manifest = verify(place)
            print(f"{place}: good, step {manifest.step}, {len(manifest.tensors)} tensors")
        except CheckpointError as error:
            good = False
            print(error)
    return good


def gather(folder: Path, target: Path) -> None:
    """Whole parameters, one file."""
    place, manifest, _ = find(folder)
    names = [name for name in manifest.tensors if name.startswith("parameter/")]
    tensors = {
        name.split("/", 1)[1]: whole(place, manifest, name) for name in tqdm(names, disable=not sys.stderr.isatty())
    }
    save_file(tensors, target, {"step": str(manifest.step), "about": json.dumps(manifest.about)})
    print(f"written: {target}, {len(tensors)} tensors of step {manifest.step}")


def spread(source: Path, folder: Path) -> None:
    """A file of whole parameters as a checkpoint, from which any layout starts with a fresh optimizer."""
    with safe_open(source, framework="pt") as file:
        about = json.loads((file.metadata() or {}).get("about", "{}"))
        step = int((file.metadata() or {}).get("step", "0"))
        entries = [
            Entry("parameter", Shard(name, tuple(tensor.shape)), tensor)
            for name in file.keys()  # noqa: SIM118 (it is no mapping)
            if (tensor := file.get_tensor(name)) is not None
        ]
    Writer(folder, single_process()).save(step, entries, about, {})
    print(f"written: {folder}, {len(entries)} tensors of step {step}")


if __name__ == "__main__":
    sys.exit(main())
