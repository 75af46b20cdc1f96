"""Trees on the command line: the grammar of `--tree`. Imports JAX only when used."""

import itertools
import operator
import re
from typing import TYPE_CHECKING

from jaxspec.cli.options import MAX_NODES, UsageError
from jaxspec.errors import InvalidConfig, nearest

if TYPE_CHECKING:
    from jaxspec.core.topology import Dynamic, Topology

TREE_GRAMMAR = (
    "the number of children of each node, depth by depth (4x2x1: 4 nodes, then 8, then 8), or the paths of "
    "ranks from the root, with a dash or a comma (0-0-0,0-1,1: rank 0 is the most likely child, and prefixes are "
    "implied), or dynamic-BEAMxDEPTH-NODES, which expands BEAM nodes on each of DEPTH levels and keeps the NODES most "
    "likely nodes in every round (dynamic-8x5-32), or a name (mc_sim_7b_63: Medusa's tree of 64 nodes)"
)


def parse_tree(spec: str) -> "Topology | Dynamic":
    """Parses the value of `--tree`; see `TREE_GRAMMAR`.

    Raises:
        UsageError: the value does not follow the grammar, or the tree is too large.
    """
    from jaxspec.core.topology import branching, dynamic, from_paths
    from jaxspec.core.tree_spec import TREE_NAMES, named_tree

    if spec in TREE_NAMES:
        return named_tree(spec)
    reason = "this does not describe a tree"
    if re.fullmatch(r"\d{1,4}(x\d{1,4})*", spec, re.ASCII):
        counts = [int(count) for count in spec.split("x")]
        if 0 in counts:
            reason = "every level needs at least one child per node"
        elif sum(itertools.accumulate(counts, operator.mul)) > MAX_NODES:
            reason = f"it has more than {MAX_NODES} nodes"
        else:
            return branching(*counts)
    elif re.fullmatch(r"\d{1,4}([-,]\d{1,4})+", spec, re.ASCII):
        try:
            return from_paths([[int(rank) for rank in path.split("-")] for path in spec.split(",")])
        except InvalidConfig as error:
            reason = str(error)
    elif match := re.fullmatch(r"dynamic-(\d{1,4})x(\d{1,4})-(\d{1,4})", spec, re.ASCII):
        beam, depth, nodes = map(int, match.groups())
        if max(nodes, beam * depth) > MAX_NODES:
            reason = f"it expands more than {MAX_NODES} nodes"
        else:
            try:
                return dynamic(beam, depth, nodes)
            except InvalidConfig as error:
                reason = str(error)
    if (meant := _similar_tree(spec)) is not None:
        raise UsageError(f"tree {spec}: {reason}; did you mean {meant}?")
    raise UsageError(f"tree {spec}: {reason}. Write {TREE_GRAMMAR}.")


_BETWEEN = r"(?:\s*[,;xX*×/-]\s*|\s+)"
"""A pattern of the separators between the sizes of a tree in other notations."""


def _similar_tree(spec: str) -> str | None:
    """Returns the tree that a text which is not a tree probably means: the same numbers, or a similar name."""
    from jaxspec.core.tree_spec import TREE_NAMES

    numbers = re.findall(r"\d+", spec, re.ASCII)
    if re.match(r"\W*dyn", spec, re.IGNORECASE) and len(numbers) == 3:
        meant = "dynamic-{}x{}-{}".format(*numbers)
    elif re.fullmatch(rf"\s*[\[(]?\d+({_BETWEEN}\d+)*[\])]?\s*", spec, re.ASCII):
        meant = "x".join(numbers)
    else:
        meant = nearest(spec, TREE_NAMES)
    if meant is None or meant == spec:
        return None
    try:
        parse_tree(meant)
    except UsageError:
        return None
    return meant
