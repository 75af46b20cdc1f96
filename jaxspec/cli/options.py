"""What commands share in reading their options. Nothing here imports JAX before it is called for."""

import argparse
import difflib
import itertools
import operator
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NoReturn

from jaxspec.errors import InvalidConfig, UnknownName

if TYPE_CHECKING:
    from jaxspec.core.tree import Topology

TREE_GRAMMAR = (
    "either the children of each node, depth by depth (4x2x1: 4 nodes, then 8, then 8), or the paths of "
    "ranks from the root, with a dash or a comma (0-0-0,0-1,1: rank 0 is the likeliest; prefixes are implied)"
)
MAX_NODES = 1024


class UsageError(Exception):
    """The command line is wrong: exit status 2."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the nearest name where one was misspelt."""

    def __init__(self, **settings):
        settings |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_options(self, words: list[str]) -> argparse.Namespace:
        """The options; positional words may stand before, between and after them."""
        args, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            known = re.findall(r"--[\w-]+", self.format_help())
            near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
            self.error(f"unknown option {unknown[0]!r}" + (f", did you mean {near[0]!r}?" if near else ""))
        return args


def one_of(kind: str, names: Iterable[str]) -> Callable[[str], str]:
    """An option's type: one of the names."""
    names = tuple(names)

    def check(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(str(UnknownName(kind, name, names)))
        return name

    return check


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """An option's type: a whole number within limits."""

    def check(text: str) -> int:
        limits = f"from {least}" if most is None else f"from {least} to {most}"
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or not least <= int(text) <= (most or int(text)):
            raise argparse.ArgumentTypeError(f"expected a whole number {limits}, got {text!r}")
        return int(text)

    return check


def parse_tree(spec: str) -> "Topology":
    """The topology that a `--tree` describes; see `TREE_GRAMMAR`.

    Raises:
        UsageError: saying how to write one.
    """
    from jaxspec.core.tree import branching, from_paths

    reason = "this is no tree"
    if re.fullmatch(r"\d{1,4}(x\d{1,4})*", spec, re.ASCII):
        counts = [int(count) for count in spec.split("x")]
        if 0 in counts:
            reason = "every level needs at least one child per node"
        elif sum(itertools.accumulate(counts, operator.mul)) > MAX_NODES:
            reason = f"more than {MAX_NODES} nodes"
        else:
            return branching(*counts)
    elif re.fullmatch(r"\d{1,4}([-,]\d{1,4})+", spec, re.ASCII):
        try:
            return from_paths([[int(rank) for rank in path.split("-")] for path in spec.split(",")])
        except InvalidConfig as error:
            reason = str(error)
    raise UsageError(f"tree {spec}: {reason}. Write {TREE_GRAMMAR}.")
