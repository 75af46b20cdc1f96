"""Compiles the decoder for TPUs without one, and says what the compiled loop does: `make tpu`.

    python -m scripts.prove.tpu                 # programs of two layers, and two of 32
    python -m scripts.prove.tpu --all           # every drafter, TPU, mesh, batch and dtype: hours
    python -m scripts.prove.tpu --chips v6e --drafters medusa --layers 32

The target has the shapes of Llama-3-8B in bfloat16, with drafters and trees, on one device and on a mesh of 2 x 2
(`jaxspec.make_mesh`); shapes alone, no weights. The compiler is the one of real TPUs (package libtpu). What must hold
is checked, and makes the exit status 1: one loop for the rounds, nothing sent to or fetched from the host, nothing as
large as a cache, a matrix or a drafter's table written inside the loop or before it, the caches updated in place. What
is printed: the bytes of HBM that a round moves, counted in the compiled program (`scripts.library.hlo`; of two branches
the costlier, of every loop inside one turn: the levels that a draft model drafts one after the other
count once), beside those of the target's matrices, which every round must read; the FLOPs by the compiler's own count;
and the time each would take at the chip's published bandwidth and peak. Nothing is run.
"""

import os
import sys
from typing import Any

from jax.experimental import topologies

from scripts.library import loops, tier
from scripts.library.loops import Case
from scripts.library.tier import Chip

CHIPS = {  # cloud.google.com/tpu/docs, system architecture
    "v5e": Chip("v5e:2x2", 819e9, 197e12, 16e9),
    "v6e": Chip("v6e:2x2", 1640e9, 918e12, 32e9),
    "v5p": Chip("v5p:2x2x1", 2765e9, 459e12, 95e9),
}


def compile_loop(case: Case) -> loops.Program:
    """Compiles the loop of a case."""
    return loops.compiled(case, "tpu", topologies.get_topology_desc(CHIPS[case.chip].topology, "tpu").devices, {})


def look(case: Case) -> dict[str, Any]:
    """Compiles a case, and returns its line of the table."""
    chip = CHIPS[case.chip]
    program = compile_loop(case)
    cost = program.done.cost_analysis()
    flops = ((cost[0] if isinstance(cost, list) else cost) or {}).get("flops", 0.0)
    row = tier.report(case, chip, program)
    if case.width:  # not wrong: XLA:TPU tiles products by what is beside them, and no option stops it
        difference = tier.compare_with_plain(case, program, compile_loop)
        row |= {"kernels": difference.kernels, "same_kernels": difference.same}
    return row | {"gflop": flops / 1e9, "ms_by_flops": flops / chip.flops * 1e3}


# Over all layers a cache has as many bytes for two layers as for 32: a smaller one would be moved to VMEM.
TIER = tier.Tier(
    "tpu", look, lambda layers: 65536 // layers, lambda row: f"{row['gflop']:8.1f} GFLOP", ("gflop",), ("libtpu",)
)


def main() -> int:
    arguments = tier.parser(__doc__, CHIPS).parse_args()
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    return TIER.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
