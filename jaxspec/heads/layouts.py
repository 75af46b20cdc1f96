"""The layouts of all kinds of heads, by name, and the layout of a file. Nothing here imports JAX.

A layout is a row of its kind (`jaxspec.heads.kinds`): recognition, reading, export, inspection, the choices of
`jaxspec export` and the files to fetch from the Hub depend on these rows alone. A new layout therefore needs only a new
row.
"""

import dataclasses
import re
from collections.abc import Iterable

from jaxspec.checkpoints.folder import WEIGHTS_FILE
from jaxspec.heads.kinds import Layout, head_kind
from jaxspec.registry import HEADS

TORCH_FILE = "pytorch_model.bin"
"""The name of a pickle file with a model or an EAGLE head. It is opened only if there is no other file."""
LAYOUTS: dict[str, Layout] = {layout.name: layout for name in HEADS for layout in head_kind(name).layouts}
"""The layouts by name. If several match a file, the first is its layout."""
EXPORT_LAYOUTS = tuple(name for name, layout in LAYOUTS.items() if layout.exported)
"""The layouts that `export_heads` writes; for each kind of heads, the first is the default."""
HEAD_FILES = tuple(dict.fromkeys(name for layout in LAYOUTS.values() for name in layout.files if name != WEIGHTS_FILE))
"""The names of files that hold heads and nothing else."""


def recognise_layout(names: Iterable[str]) -> Layout | None:
    """Returns the layout of a file with tensors of these names, with its prefix; None if it holds no heads."""
    names = list(names)
    for layout in LAYOUTS.values():
        for prefix in (*layout.other_prefixes, layout.prefix):
            after = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
            if any(re.fullmatch(layout.mark, name, re.ASCII | re.DOTALL) for name in after):
                return dataclasses.replace(layout, prefix=prefix)
    return None
