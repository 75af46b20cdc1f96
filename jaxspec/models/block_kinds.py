"""The types of blocks in a GGUF file; see `jaxspec.models.blocks` for their meaning. Nothing here imports JAX."""

import dataclasses

import numpy as np

UNIT_OUTPUTS, BLOCK_INPUTS = 16, 32


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """A type of blocks.

    Attributes:
        bits: the number of bits of a code.
        offset: the number that is subtracted from codes.
        unit: the number of inputs that share float16 numbers.
        part: the number of inputs that share a scale.
        minimum: whether blocks have a minimum.
        factor: the dtype of the whole numbers by which scales are multiplied, if `unit` is 256.
    """

    bits: int
    offset: int = 0
    unit: int = BLOCK_INPUTS
    part: int = BLOCK_INPUTS
    minimum: bool = False
    factor: type = np.uint8

    @property
    def factors(self) -> int:
        """The number of whole numbers that a unit has for its scales, and again for its minimums."""
        return self.unit // self.part if self.unit > BLOCK_INPUTS else 0

    def bytes(self, outputs: int, inputs: int) -> int:
        """Returns the size of a packed matrix."""
        lane = (1 + self.minimum) * (2 + self.factors) + self.unit * self.bits // 8
        return -(-outputs // UNIT_OUTPUTS) * UNIT_OUTPUTS * (inputs // self.unit) * lane


BLOCK_KINDS = {
    "Q8_0": BlockKind(8, 128),
    "Q4_0": BlockKind(4, 8),
    "Q4_1": BlockKind(4, minimum=True),
    "Q5_0": BlockKind(5, 16),
    "Q5_1": BlockKind(5, minimum=True),
    "Q4_K": BlockKind(4, unit=256, minimum=True),
    "Q5_K": BlockKind(5, unit=256, minimum=True),
    "Q6_K": BlockKind(6, 32, unit=256, part=16, factor=np.int8),
}


@dataclasses.dataclass(frozen=True)
class Split:
    """The numbers of a matrix in blocks, as separate arrays.

    Attributes:
        codes: the codes, uint8 `[O, I]`.
        halves: the scales and, if there are any, the minimums, float16 `[O, I / unit]`.
        whole: the whole numbers by which `halves` are multiplied, uint8 or int8 `[O, I / part]`; empty if the unit is a
            block.
    """

    codes: np.ndarray
    halves: tuple[np.ndarray, ...]
    whole: tuple[np.ndarray, ...] = ()
