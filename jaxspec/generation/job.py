"""A whole job of decoding, checked: what `generate` and `stream` make of their arguments."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.core import sizes
from jaxspec.core.checks import flag, whole
from jaxspec.core.mesh import everywhere, fetch, groups
from jaxspec.core.sampling import Sampling
from jaxspec.decode.loop import Decoder
from jaxspec.decode.notice import Notice
from jaxspec.decode.session import Session
from jaxspec.decode.state import Request, Weights
from jaxspec.errors import CapacityError, InvalidConfig
from jaxspec.generation import inputs, memory
from jaxspec.generation.drafting import Drafting
from jaxspec.models.model import Model
from jaxspec.models.sharding import shard
from jaxspec.models.transformer import TransformerLM


class Batch(NamedTuple):
    """Rows that share a cache: `places` at a time, another taking the place of one that has ended."""

    rows: list[int]  # in the order in which they get a place
    places: int
    capacity: int

    @property
    def first(self) -> list[int | None]:
        """The rows that begin; None for a place without one."""
        return [*self.rows, *[None] * self.places][: self.places]

    @property
    def waiting(self) -> list[int]:
        """Those that get a place later."""
        return self.rows[self.places :]


@dataclasses.dataclass(frozen=True, repr=False)
class Job:
    """What is to be decoded, checked. A row is one sample of one prompt; those of a prompt stand together.

    Attributes:
        target: the model.
        decoder: put together from its members.
        weights: of target and drafter.
        given: every prompt as it was given.
        ids: the tokens of every prompt.
        keys: `[rows]`.
        sampling: as given, for all rows or per row.
        max_new_tokens: of a row.
        samples: rows per prompt.
        stop_ids: `[1, M]`.
        logprobs: alternatives that are asked for with each token's log-probabilities; None: neither is asked for.
        mesh: the devices; None for the default one.
    """

    target: Model
    decoder: Decoder
    weights: Weights
    given: list[Any]
    ids: list[list[int]]
    keys: jax.Array
    sampling: Sampling
    max_new_tokens: int
    samples: int
    stop_ids: jax.Array
    logprobs: int | None = None
    mesh: Mesh | None = None

    @property
    def rows(self) -> int:
        return len(self.ids) * self.samples

    def prompt(self, row: int) -> list[int]:
        return self.ids[row // self.samples]

    def request(self, rows: Sequence[int | None], size: int) -> Request:
        """These rows, their prompts padded to `size`; None for a place without one, which stands still."""
        at = np.asarray([0 if row is None else row for row in rows])

        def own(name: str) -> Any:
            value = getattr(self.sampling, name)
            per_row = not isinstance(value, Mapping) and np.ndim(value) == 1 + (name == "logit_bias")
            return np.asarray(value)[at] if per_row else value

        sampling = Sampling(**{field.name: own(field.name) for field in dataclasses.fields(Sampling)})
        return inputs.make_request(
            [self.prompt(0)[:1] if row is None else self.prompt(row) for row in rows],
            self._keys(at),
            inputs.with_padding_masked(self.target, sampling, len(at)),
            [0 if row is None else self.max_new_tokens for row in rows],
            jnp.broadcast_to(self.stop_ids, (len(at), self.stop_ids.shape[1])),
            size,
            self.logprobs is not None,
        )

    def _keys(self, rows: np.ndarray) -> jax.Array:
        """Those of the rows; taken by NumPy, which compiles nothing for another number of them."""
        data = np.asarray(jax.random.key_data(self.keys))[rows]
        return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(self.keys))

    def batches(self, places: int | None, capacity: int | None, left: Sequence[int]) -> list[Batch]:
        """What is decoded together: all rows, or `places` at a time of those whose caches are of one size.

        The places are rounded up as `sizes.rows` says, in each group of devices, but never to more than `places` asks
        for. Those without a row stand still.

        Where rows wait, the longest come first, so that what takes most memory is known to fit, and rows of like length
        are neighbours: a step costs what the longest text's length costs.

        Raises:
            InvalidConfig: `places` is no whole number from 1.
            CapacityError: a row does not fit the model's context, or the capacity.
        """
        if places is not None:
            whole("batch", places)

        def slots(rows: Sequence[int], batch: int) -> int:
            longest = max(len(self.prompt(row)) for row in rows) + self.max_new_tokens
            return memory.fit_capacity(self.decoder, self.weights, longest, batch, capacity)

        def rounded(rows: int) -> int:
            count = groups(self.mesh)  # each has as many places
            each = sizes.rows(-(-rows // count))
            return count * (each if places is None else min(each, -(-places // count)))

        if places is None:
            return [Batch(list(left), rounded(len(left)), slots(left, len(left)))] if left else []
        by_size: dict[int, list[int]] = {}
        for row in sorted(left, key=lambda row: -len(self.prompt(row))):
            by_size.setdefault(slots([row], places), []).append(row)
        found = [Batch(rows, rounded(min(places, len(rows))), size) for size, rows in by_size.items()]
        return [batch if batch.waiting else batch._replace(rows=sorted(batch.rows)) for batch in found]

    def memory(self, batch: Batch) -> int:
        """Bytes of the caches of a batch; where rows are replaced, one row more in every group of devices."""
        rows = batch.places + groups(self.mesh) * (bool(batch.waiting))
        return memory.cache_bytes(self.decoder, self.weights, rows, batch.capacity)


def make_job(
    target: Model,
    prompts: Any,
    drafting: Drafting,
    *,
    key: Any = None,
    sampling: Any = Sampling(),
    max_new_tokens: Any = 128,
    samples: Any = 1,
    chat: bool | None = None,
    stop_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    logprobs: Any = False,
    width_matched: bool = False,
    mesh: Any = None,
) -> Job:
    """Makes a job of what a user handed in; arguments as those of `jaxspec.generate`.

    Raises:
        JaxspecError: whatever can be found wrong without memory on the device.
    """
    max_new_tokens = whole("max_new_tokens", max_new_tokens)
    samples = whole("samples", samples, 1, inputs.MOST_SAMPLES)
    inputs.need_model("target", target)
    if mesh is not None:
        target = shard(target, mesh)
    elif isinstance(target.lm, TransformerLM) and (parts := target.lm.shards) > 1:
        raise InvalidConfig(f"{target.name} is split over {parts} devices; give the mesh, too (mesh=...)")
    prompts = inputs.as_prompts(prompts)
    ids = inputs.encode_prompts(target, prompts, chat)
    inputs.check_sampling(sampling, len(ids) * samples, target.lm.vocab)
    keys = inputs.row_keys(key, len(ids), samples, sampling)
    stopping = inputs.stop_array(target, stop_ids, ignore_eos, 1)
    alternatives = inputs.check_logprobs(logprobs)
    if alternatives > target.lm.vocab:
        raise InvalidConfig(f"logprobs={alternatives}: {target.name} has no more than {target.lm.vocab} tokens")
    widths = () if flag("width_matched", width_matched) else (1,)
    decoder, weights = drafting.build(
        target, widths=widths, top_logprobs=sizes.top_logprobs(alternatives, target.lm.vocab)
    )
    if mesh is not None:
        weights = weights._replace(draft=everywhere(weights.draft, mesh))
    asked = None if isinstance(logprobs, (bool, np.bool_)) and not logprobs else alternatives
    return Job(target, decoder, weights, prompts, ids, keys, sampling, max_new_tokens, samples, stopping, asked, mesh)


def extend(session: Session, job: Job) -> Batch:
    """Appends a job's prompts to the rows of a session.

    Raises:
        InvalidConfig: the session was begun with other settings.
        CapacityError: the session has too few slots.
    """
    if session.decoder != job.decoder or session.rows != job.rows or session.mesh != job.mesh:
        raise InvalidConfig("a session goes on with the settings and the number of rows it began with")
    longest = int(fetch(session.state.length).max()) + max(map(len, job.ids)) + job.max_new_tokens
    if job.decoder.slots(longest) > session.capacity or longest > job.decoder.target.context:
        raise CapacityError(
            f"the session has room for {session.capacity} slots, this turn needs {job.decoder.slots(longest)}; "
            "begin with a larger capacity=..."
        )
    batch = Batch(list(range(job.rows)), len(session.state.length), session.capacity)
    session.extend(job.request(batch.first, session.capacity))
    return batch


def say_rounded(notice: Notice, capacity: int | None, batches: Sequence[Batch]) -> None:
    """Says that caches get more slots than were asked for, where they do."""
    if capacity is not None and batches and batches[0].capacity != capacity:
        notice.say(f"capacity {capacity} is rounded up to {batches[0].capacity} slots, whole blocks of {sizes.BLOCK}")
