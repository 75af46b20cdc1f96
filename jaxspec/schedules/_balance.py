"""The balance of a row: the time that its drafts may still lose to plain decoding. Schedules share this one formula.

Time is measured in plain rounds: a plain round takes 1 and commits one token. A row starts with the balance `start`.
After a round that took the time c and committed e tokens, `settle` adds `(1 + a) e - c`: the e - 1 tokens beyond the
token of a plain round, minus the time c - 1 beyond a plain round, and an allowance a for each token. `affordable`
decides which rounds a row may choose: a round that takes the time 1 + x, and fails with the probability p, needs a
balance of at least p x. Plain rounds are always allowed.

Claim: if the rounds take the assumed times, a text of n tokens takes at most `start + a n + (1 - p) x` plain rounds
longer than plain decoding, whatever is accepted, with the largest `(1 - p) x` of all rounds. If p is 1 in every round,
this is `start + a n`; otherwise it is at most `start + a n` and one rejected draft.

Proof. The balance after the text is at most `start + (1 + a) n - T`, where T is the time of all rounds; a cap only
lowers the balance. So the text takes at most T - n <= start + a n - balance longer, and it remains to bound the balance
from below. The start is not negative. A plain round commits a token in the time 1, and does not lower the balance. Any
other round is chosen at a balance of at least p x and commits at least one token, so the balance after it is at least
p x + (1 + a) - (1 + x) >= -(1 - p) x. (A round in which the target fails commits no token, but ends the text; it costs
one plain round more.)

If rows share the decision, the same sums over these rows obey the same inequalities, as long as the same rows run.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MAX_COST = 1e12
"""The limit of settings and of ratios of costs, so that their sums and products fit into float32."""


def settle(
    balance: Float[Array, "B"],
    emitted: Int[Array, "B"],
    cost: Float[Array, "B"],
    allowance: float,
    cap: float = float("inf"),
) -> Float[Array, "B"]:
    """Returns the balance after a round.

    Args:
        balance: the balance before the round, in plain rounds.
        emitted: the number of tokens that the round committed.
        cost: the time of the round, in plain rounds.
        allowance: the time that each token adds, in plain rounds.
        cap: the largest balance.
    """
    return jnp.minimum(balance + ((1 + allowance) * emitted - cost), cap)


def affordable(balance: Float[Array, "B"], loss: Float[Array, "B C"]) -> Bool[Array, "B C"]:
    """Returns which choices a row can afford; the first choice is always affordable.

    Args:
        balance: the balance of each row.
        loss: the time of each choice beyond a plain round, times the probability of losing it. The first choice is the
            smallest round, which is plain decoding.
    """
    return (loss <= balance[:, None]).at[:, 0].set(True)
