"""The acceptance of the tokens of a block, and how well a head's confidence predicts it: a table and a diagram."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxspec.storage.writing import write_whole

NUM_BINS = 10
"""Number of equal intervals of the confidence in the table."""
DIAGRAM_FILE = "reliability.png"


class BlockSums(NamedTuple):
    """Sums over the blocks of a batch, so that the sums of several batches can be added.

    Attributes:
        acceptance: for each drafted token, 1 - total variation between its distribution and the target's.
        running: for each drafted token, the product of its acceptance and the acceptance of all tokens before it.
        bins: for each interval of the confidence, the number of its tokens, their confidence and their acceptance.
    """

    acceptance: Float[Array, "n"]
    running: Float[Array, "n"]
    bins: Float[Array, "bins 3"]

    @classmethod
    def zeros(cls, drafted: int) -> Self:
        """Returns sums of zero, over no blocks."""
        return cls(jnp.zeros(drafted), jnp.zeros(drafted), jnp.zeros((NUM_BINS, 3)))

    def add(
        self,
        step: int,
        there: Bool[Array, "B A"],
        acceptance: Float[Array, "B A"],
        running: Float[Array, "B A"],
        certainty: Float[Array, "B A"] | None,
    ) -> Self:
        """Adds one token of each block.

        Args:
            step: the index of the token in its block, from 0.
            there: the blocks in which the token counts.
            acceptance: the acceptance of the token.
            running: the product of this acceptance and the acceptance of all tokens before it in the block; 0 where the
                token does not count.
            certainty: logits of the token's confidence; None if the head has no confidence.
        """
        bins = self.bins
        if certainty is not None:
            confidence = jax.nn.sigmoid(jax.lax.stop_gradient(certainty))
            index = jnp.minimum((confidence * NUM_BINS).astype(jnp.int32), NUM_BINS - 1)
            row = jnp.where(there[..., None], jnp.stack([jnp.ones_like(confidence), confidence, acceptance], -1), 0)
            bins = bins + jnp.einsum("abi,abj->ij", jax.nn.one_hot(index, NUM_BINS), row, precision="highest")
        return self._replace(
            acceptance=self.acceptance.at[step].add(jnp.where(there, acceptance, 0.0).sum()),
            running=self.running.at[step].add(jax.lax.stop_gradient(running).sum()),
            bins=bins,
        )

    def average(self, seen: np.ndarray) -> dict[str, Any]:
        """Returns the means as values of a line of the log; `seen` is the number of positions of each drafted token.

        `tau` is the expected number of tokens of a round that verifies a chain by rejection, including the target's own
        token. DSpark (arXiv:2607.05147) computes it in the same way, and also counts blocks that end with the text.
        """
        record = {
            "acceptance": (np.asarray(self.acceptance) / seen).tolist(),
            "tau": 1 + float(np.asarray(self.running).sum() / seen[0]),
        }
        bins = np.asarray(self.bins)
        return record | ({"confidence": reliability(bins)} if bins.any() else {})


def reliability(bins: np.ndarray) -> dict[str, Any]:
    """Returns the number of tokens in each interval of the confidence, and their mean confidence and acceptance.

    Both means are None for an interval without tokens. `error` is the expected calibration error (Naeini et al. 2015):
    the mean distance between confidence and acceptance, weighted by the number of tokens of each interval.
    """
    count = bins[:, 0]
    divisor = np.maximum(count, 1)
    confidence, acceptance = bins[:, 1] / divisor, bins[:, 2] / divisor

    def as_list(means: np.ndarray) -> list[float | None]:
        return [float(mean) if number else None for mean, number in zip(means, count)]

    return {
        "tokens": [int(number) for number in count],
        "confidence": as_list(confidence),
        "acceptance": as_list(acceptance),
        "error": float((count * np.abs(confidence - acceptance)).sum() / max(count.sum(), 1)),
    }


def best_figures(log: Sequence[dict]) -> dict[str, Any]:
    """Returns the figures of blocks on the held-out texts at the best step of a log; empty if there are none."""
    evaluations = [record["held_out"] for record in log if "held_out" in record]
    if not evaluations:
        return {}
    record = max(evaluations, key=lambda evaluation: evaluation["accepted_length"])
    return {name: record[name] for name in ("acceptance", "tau", "confidence") if name in record}


def format_figures(measured: dict[str, Any]) -> list[str]:
    """Returns the lines of a card about blocks; no lines if blocks were not measured."""
    if "tau" not in measured:
        return []
    lines = [
        "",
        "Mass of the law of each token that the target shares, after the text's own tokens: "
        f"{', '.join(f'{share:.3f}' for share in measured['acceptance'])}. By the running products, a chain that is "
        f"verified by rejection has {measured['tau']:.2f} tokens per round.",
    ]
    if (table := measured.get("confidence")) is None:
        return lines
    lines += ["", f"Confidence on the held-out texts, calibration error {table['error']:.3f}:", ""]
    lines += ["| confidence | tokens | mean confidence | shared with the target |", "|---|---|---|---|"]
    for number, count in enumerate(table["tokens"]):
        if count:
            confidence, shared = (table[name][number] for name in ("confidence", "acceptance"))
            interval = f"{number / NUM_BINS:.1f} to {(number + 1) / NUM_BINS:.1f}"
            lines.append(f"| {interval} | {count} | {confidence:.3f} | {shared:.3f} |")
    return lines


def draw_diagram(measured: dict[str, Any], path: pathlib.Path) -> bool:
    """Draws the reliability diagram: mean acceptance against mean confidence, and below it the tokens, by interval.

    Returns:
        False if there is no confidence, or matplotlib is not installed.

    Raises:
        StorageError: the file cannot be written; an existing one is unchanged.
    """
    if (table := measured.get("confidence")) is None:
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(
        2, 1, sharex=True, figsize=(4, 5), height_ratios=(4, 1), constrained_layout=True
    )
    filled = [number for number, count in enumerate(table["tokens"]) if count]
    confidence, shared = ([table[name][number] for number in filled] for name in ("confidence", "acceptance"))
    upper.plot([0, 1], [0, 1], "k--", linewidth=1, label="calibrated")
    upper.plot(confidence, shared, "o-", label=f"held-out texts, error {table['error']:.3f}")
    upper.set_ylabel("shared with the target")
    upper.legend()
    lower.bar((np.arange(NUM_BINS) + 0.5) / NUM_BINS, table["tokens"], 0.9 / NUM_BINS)
    lower.set_ylabel("tokens")
    lower.set_xlabel("confidence")
    try:
        write_whole(path, lambda file: figure.savefig(file, format="png", dpi=110))
    finally:
        pyplot.close(figure)
    return True
