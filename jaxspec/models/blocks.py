"""Weight matrices in the blocks of a GGUF file, packed for the CPU kernels.

A weight is `scale * (code - offset) + minimum`: its code has 4 to 8 bits, and the inputs of a block of 32 (in Q6_K, of
a part of 16) share the scale and the minimum. Scale and minimum are float16 numbers. In the types whose names end with
K, they are products of a float16 number for 256 inputs and a whole number for each block. All of these numbers are
kept, so the weights are exactly the weights of the file.

A matrix `[O, I]` is stored as `[O / 16, I / u, bytes]`, in units of 16 outputs by u inputs that share float16 numbers,
where u is 32 or 256. A unit holds these fields in this order, each for all of its 16 outputs: the float16 scale, the
float16 minimum, the whole numbers for the scales of its blocks, the whole numbers for their minimums, and the codes of
block after block, where inputs 4 k to 4 k + 3 form group k of 8. Codes of 8 bits are stored one group after another.
Shorter codes are stored as nibbles, with group k in the low and group k + 4 in the high nibbles. Planes with the bits
above the nibble follow: one plane with the fifth bits of 8 groups, or two planes with the fifth and sixth bits of 4
groups each.

The kernels round the rows of the other factor of a product to int8, with one scale for each 32 values.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from jaxspec.kernels import calls
from jaxspec.models.block_kinds import BLOCK_INPUTS, BLOCK_KINDS, UNIT_OUTPUTS, BlockKind, Split
from jaxspec.models.products import product
from jaxspec.models.rows import NO_FUSION, Fused


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """A packed weight matrix `[O, I]`, or several one below the other, of different types.

    The matrices of a layer's experts are one `Blocks`, whose parts have one more axis at the front.

    Attributes:
        parts: the units of each matrix, uint8 `[O / 16, I / unit, bytes]`.
        kinds: the type of each matrix, a key of `BLOCK_KINDS`.
        outputs: O of each matrix.
        inputs: I of all matrices.
    """

    parts: tuple[Any, ...]
    kinds: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    outputs: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    inputs: int = dataclasses.field(default=0, metadata={"static": True})

    @classmethod
    def pack(cls, kind: str, split: Split) -> "Blocks":
        """Packs a matrix; the result holds a NumPy array."""
        outputs, inputs = split.codes.shape
        return cls((_pack(BLOCK_KINDS[kind], split),), (kind,), (outputs,), inputs)

    @classmethod
    def stack(cls, matrices: Sequence["Blocks"]) -> "Blocks":
        """Stacks matrices with the same number of inputs, one below the other."""
        parts, kinds, outputs = [], [], []
        for matrix in matrices:
            for part, kind, number in zip(matrix.parts, matrix.kinds, matrix.outputs):
                if kinds and kinds[-1] == kind and outputs[-1] % UNIT_OUTPUTS == 0:
                    parts[-1], outputs[-1] = np.concatenate([parts[-1], part], axis=-3), outputs[-1] + number
                    continue
                parts, kinds, outputs = [*parts, part], [*kinds, kind], [*outputs, number]
        return cls(tuple(parts), tuple(kinds), tuple(outputs), matrices[0].inputs)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.outputs), self.inputs

    def __getitem__(self, rows: Any) -> Any:
        if rows is Ellipsis:
            return self
        part, *others = self.parts
        if others or isinstance(rows, slice):
            return self.unpack()[rows]
        return _decode(BLOCK_KINDS[self.kinds[0]], part[rows // UNIT_OUTPUTS], rows % UNIT_OUTPUTS)

    def take(self, rows: Int[Array, "R"]) -> "Blocks":
        """Returns the matrix of some rows, in the same blocks."""
        part, *others = self.parts
        assert not others, self.kinds
        padded = jnp.pad(rows, (0, -len(rows) % UNIT_OUTPUTS))
        fields = [  # [R, n, c, 1, w] becomes [R / 16, n, c, 16, w]
            jnp.moveaxis(field.reshape(-1, UNIT_OUTPUTS, *field.shape[1:3], field.shape[-1]), 1, 3)
            for field in _fields(BLOCK_KINDS[self.kinds[0]], part[padded // UNIT_OUTPUTS], padded % UNIT_OUTPUTS)
        ]
        taken = jnp.concatenate([field.reshape(*field.shape[:2], -1) for field in fields], axis=-1)
        return Blocks((taken,), self.kinds, (len(rows),), self.inputs)

    def unpack(self) -> Float[Array, "*X O I"]:
        """Returns the matrix in float32, equal to the file's."""
        matrices = []
        for part, kind, outputs in zip(self.parts, self.kinds, self.outputs):
            decoded = _decode(BLOCK_KINDS[kind], jnp.asarray(part)).reshape(*part.shape[:-3], -1, self.inputs)
            matrices.append(decoded[..., :outputs, :])
        return jnp.concatenate(matrices, axis=-2)

    def astype(self, dtype: DTypeLike) -> Float[Array, "*X O I"]:
        """Returns the matrix in floating point."""
        return self.unpack().astype(dtype)

    def product(self, x: Float[Array, "N J"], fused: Fused = NO_FUSION) -> Float[Array, "N O"]:
        """Returns `x @ matrix.T`; the docstring of the module says how the rows of `x` are rounded."""
        return product(x, self, fused)

    def of_experts(self) -> calls.PackedExperts:
        """Returns the arrays of the experts' matrices, for the kernel."""
        part, *others = self.parts
        assert not others, self.kinds
        return calls.PackedExperts(part, None, self.kinds[0])

    def multiply(self, x: Float[Array, "N J"], fused: Fused = NO_FUSION) -> Float[Array, "N O"]:
        """Returns the product that the kernel computes."""
        products, first = [], 0
        for part, kind, outputs in zip(self.parts, self.kinds, self.outputs):
            options = fused.options(slice(first, first + outputs))
            products.append(calls.multiply(x, part, None, outputs, kind, **options))
            first += outputs
        return products[0] if len(products) == 1 else jnp.concatenate(products, axis=-1)


def _pack(kind: BlockKind, split: Split) -> np.ndarray:
    outputs, inputs = split.codes.shape
    units, rows = inputs // kind.unit, -(-outputs // UNIT_OUTPUTS)

    def field(array: np.ndarray, width: int) -> np.ndarray:
        """Brings `[O, I / unit * count * width]` bytes into the order `[O / 16, I / unit, count, 16, width]`."""
        array = np.pad(array.view(np.uint8), ((0, -outputs % UNIT_OUTPUTS), (0, 0)))
        array = array.reshape(rows, UNIT_OUTPUTS, units, -1, width)
        return np.ascontiguousarray(np.moveaxis(array, 1, 3))

    fields = [field(array, 2) for array in split.halves] + [field(array, 1) for array in split.whole]
    codes = field(split.codes, 4).reshape(rows, units, kind.unit // BLOCK_INPUTS, 8, UNIT_OUTPUTS, 4)
    if kind.bits < 8:
        planes = [codes[..., :4, :, :] & 15 | codes[..., 4:, :, :] << 4]
        if kind.bits > 4:
            high_bits = kind.bits - 4
            high = (codes >> 4).reshape(*codes.shape[:3], high_bits, 8 // high_bits, UNIT_OUTPUTS, 4)
            shifts = high_bits * np.arange(8 // high_bits, dtype=np.uint8)[:, None, None]
            planes.append(np.bitwise_or.reduce(high << shifts, axis=4))
        codes = np.concatenate(planes, axis=3)
    return np.concatenate([array.reshape(rows, units, -1) for array in (*fields, codes)], axis=2)


def _fields(kind: BlockKind, units: Any, lane: Any = None) -> list[Shaped[Array, "*b n c L w"]]:
    """Returns the fields of units `[*b, n, bytes]`: of all 16 outputs, or of the output number `lane` `[*b]`."""
    numbers = 1 + kind.minimum
    sizes = [(1, 2)] * numbers + [(kind.factors, 1)] * (numbers if kind.factors else 0)
    fields, at = [], 0
    for count, width in [*sizes, (kind.unit // BLOCK_INPUTS * kind.bits, 4)]:
        size = count * UNIT_OUTPUTS * width
        field = units[..., at : at + size].reshape(*units.shape[:-1], count, UNIT_OUTPUTS, width)
        at += size
        if lane is not None:
            field = jnp.take_along_axis(field, lane.reshape(*lane.shape, 1, 1, 1, 1), axis=-2)
        fields.append(field)
    return fields


def _decode(kind: BlockKind, units: Any, lane: Any = None) -> Float[Array, "*b I"]:
    """Decodes units `[*b, I / u, bytes]` to float32: all outputs `[*b, 16, I]`, or the outputs `lane`, `[*b, I]`."""
    *numbers, codes = _fields(kind, units, lane)
    halves = [lax.bitcast_convert_type(field, jnp.float16).astype(jnp.float32) for field in numbers[: 1 + kind.minimum]]
    if kind.factors:
        whole = zip(numbers[len(halves) :], (kind.factor, np.uint8))
        whole = [lax.bitcast_convert_type(field[..., 0], dtype).astype(jnp.float32) for field, dtype in whole]
        halves = [half * factor for half, factor in zip(halves, whole)]
    codes = codes.reshape(*codes.shape[:-3], -1, kind.bits, *codes.shape[-2:])  # [*b, n, blocks, bits, L, 4]
    if kind.bits < 8:
        low = codes[..., :4, :, :]
        low = jnp.concatenate([low & 15, low >> 4], axis=-3)
        if kind.bits > 4:
            high_bits = kind.bits - 4
            high = jnp.repeat(codes[..., 4:, :, :], 8 // high_bits, axis=-3)
            shifts = high_bits * (jnp.arange(8, dtype=jnp.uint8) % (8 // high_bits))[:, None, None]
            low = low | ((high >> shifts) & ((1 << high_bits) - 1)) << 4
        codes = low
    # [*b, n, blocks, 8, L, 4] becomes [*b, n, parts, L, part]
    split = codes.reshape(*codes.shape[:-4], -1, kind.part // 4, *codes.shape[-2:]).swapaxes(-3, -2)
    split = split.reshape(*split.shape[:-2], kind.part)
    weights = halves[0][..., None] * (split.astype(jnp.float32) - kind.offset)
    if kind.minimum:
        weights += halves[1][..., None]
    weights = jnp.moveaxis(weights, -2, -4)  # [*b, L, n, parts, part]
    weights = weights.reshape(*weights.shape[:-3], -1)
    return weights if lane is None else weights[..., 0, :]
