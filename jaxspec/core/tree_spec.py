"""Trees with names."""

from jaxspec.core.topology import Topology, from_paths
from jaxspec.errors import UnknownName

_PATHS = {
    # Medusa's default for 7B models, searched from its heads' accuracies (Cai et al. 2024, section 2.3.3): ranks from
    # the root, by depth; 64 nodes, root included.
    "mc_sim_7b_63": (
        "0 1 2 3 4 5 6 7 8 9",
        "00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90",
        "000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200",
        "0000 0001",
    ),
}
TREE_NAMES = tuple(_PATHS)


def named_tree(name: str) -> Topology:
    """Returns the tree of this name, one of `TREE_NAMES`.

    Raises:
        UnknownName: there is no such tree; the message suggests the nearest name.
    """
    if not isinstance(name, str) or name not in _PATHS:
        raise UnknownName("tree", name, _PATHS)
    return from_paths([tuple(map(int, path)) for level in _PATHS[name] for path in level.split()])
