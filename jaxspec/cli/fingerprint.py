"""Prints the sha256 of every tree of arrays of a training run: runs with the same output are bit-identical."""

import argparse
import hashlib
import pathlib

from jaxspec.cli.options import Parser
from jaxspec.errors import TrainingError
from jaxspec.storage.reading import check_path


def add_options(parser: Parser) -> None:
    """Adds the command's options."""
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR", help="of 'jaxspec train', or of heads")


def run(args: argparse.Namespace) -> int:
    """Prints a line per tree: its sha256 and its name."""
    folder = check_path(args.folder, "DIR")
    if not folder.is_dir():
        raise TrainingError(f"{args.folder}: there is no such folder")
    lines = list(prints(folder))
    if not lines:
        raise TrainingError(f"{args.folder}: holds no run and no heads")
    for digest, name in lines:
        print(f"{digest}  {name}")
    return 0


def prints(folder: pathlib.Path):
    """Yields (sha256, name) of the log, of the state of every checkpoint, and of the heads or the draft model.

    Names do not depend on where the folder is, so that the output for two folders can be compared.
    """
    from jaxspec.checkpoints.load import load
    from jaxspec.heads.files import load_heads
    from jaxspec.heads.find import MANIFEST
    from jaxspec.train.checkpoints import Checkpoints
    from jaxspec.train.files import fingerprint
    from jaxspec.train.manifest import CHECKPOINTS, DRAFT, HEADS, LOG

    if (folder / LOG).exists():
        yield hashlib.sha256((folder / LOG).read_bytes()).hexdigest(), LOG
    for name, digest in Checkpoints(folder / CHECKPOINTS).prints().items():
        yield digest, f"{CHECKPOINTS}/{name}"
    for place in (folder, folder / HEADS):
        if (place / MANIFEST).exists():
            yield fingerprint(load_heads(place).params), HEADS
    if (folder / DRAFT).exists():
        yield fingerprint(load(folder / DRAFT, kernels=False).params), DRAFT
