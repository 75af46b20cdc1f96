"""Prints the sha256 of every tree of arrays of a training run: runs with the same output are bit-identical."""

import argparse
import hashlib
import pathlib

from jaxspec.cli.options import Parser
from jaxspec.errors import TrainingError
from jaxspec.storage.reading import check_path


def add_options(parser: Parser) -> None:
    """Adds the command's options."""
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR", help="folder of 'jaxspec train', or of heads")


def run(args: argparse.Namespace) -> int:
    """Prints a line per tree: its sha256 and its name."""
    folder = check_path(args.folder, "DIR")
    if not folder.is_dir():
        raise TrainingError(f"{args.folder}: this folder does not exist")
    lines = list(list_fingerprints(folder))
    if not lines:
        raise TrainingError(f"{args.folder}: holds neither a training run nor heads")
    for digest, name in lines:
        print(f"{digest}  {name}")
    return 0


def list_fingerprints(folder: pathlib.Path):
    """Yields (sha256, name) of the log, of the state of every checkpoint, and of the heads or the draft model.

    Names do not depend on where the folder is, so that the output for two folders can be compared.
    """
    from jaxspec.checkpoints.load import load
    from jaxspec.heads.files import load_heads
    from jaxspec.heads.find import HEADS_MANIFEST
    from jaxspec.train.checkpoints import Checkpoints
    from jaxspec.train.files import fingerprint
    from jaxspec.train.manifest import CHECKPOINTS_FOLDER, DRAFT_FOLDER, HEADS_FOLDER, LOG_FILE

    if (folder / LOG_FILE).exists():
        yield hashlib.sha256((folder / LOG_FILE).read_bytes()).hexdigest(), LOG_FILE
    for name, digest in Checkpoints(folder / CHECKPOINTS_FOLDER).fingerprints().items():
        yield digest, f"{CHECKPOINTS_FOLDER}/{name}"
    for place in (folder, folder / HEADS_FOLDER):
        if (place / HEADS_MANIFEST).exists():
            yield fingerprint(load_heads(place).params), HEADS_FOLDER
    if (folder / DRAFT_FOLDER).exists():
        yield fingerprint(load(folder / DRAFT_FOLDER, kernels=False).params), DRAFT_FOLDER
