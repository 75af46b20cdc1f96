"""What a training run will need, before any weight is loaded: memory of each device, collectives, and time.

The programs of a run are compiled for the devices at hand, or for a topology of TPUs, from the shapes of all arrays.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxspec.amounts import plural, size
from jaxspec.backend.chips import Chip, chip_of, describe_topology
from jaxspec.core.mesh import DATA
from jaxspec.errors import InvalidConfig
from jaxspec.models import sharding
from jaxspec.models.model import Model
from jaxspec.models.transformer import TransformerLM
from jaxspec.train import losses
from jaxspec.train.batch import Batch
from jaxspec.train.head_trainee import HeadTrainee
from jaxspec.train.placement import Placement, default_mesh
from jaxspec.train.settings import TrainSettings, parse_mesh
from jaxspec.train.step import Trainable, compute_features, init_state, train_step
from jaxspec.train.trainee import Trainee

COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
NUM_BATCHES = 2
"""Batches on the devices at once: the batch of a step and the next batch."""
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2}
"""Bytes of the elements of HLO types; 4 for other types."""


class Program(NamedTuple):
    """A compiled program.

    Attributes:
        name: what it computes.
        temporaries: bytes of its temporary arrays on each device; None if the compiler refused it for lack of memory.
        flops: operations of matrix products on each device.
        collectives: number and bytes of each kind of collective; empty if the program cannot be printed.
    """

    name: str
    temporaries: int | None
    flops: float
    collectives: dict[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What a training run needs.

    Attributes:
        devices: the kind and the number of devices, and the mesh.
        rows: rows of a step, and tokens of a row.
        held: bytes of each device by what they hold.
        whole: names and shapes of large arrays of the heads that no dimension allows to be split.
        programs: the programs of a step: the features, if the target reads them in the step, and the step itself.
        chip: figures of a device; None if they are not known.
    """

    devices: str
    rows: tuple[int, int]
    held: dict[str, int]
    whole: list[str]
    programs: list[Program]
    chip: Chip | None

    @property
    def total(self) -> float:
        """The largest number of bytes of a device at once; infinite if a program does not fit."""
        temporaries = [program.temporaries for program in self.programs]
        return sum(self.held.values()) + max(math.inf if bytes is None else bytes for bytes in temporaries)

    @property
    def fits(self) -> bool:
        """Whether everything fits into the memory of a device, as far as it is known."""
        return self.total <= (math.inf if self.chip is None else self.chip.memory) and math.isfinite(self.total)

    def lines(self) -> list[str]:
        """Returns the description of the run for people."""
        count, tokens = self.rows
        lines = [f"{self.devices}; {plural(count, 'row')} of {tokens:,} tokens a step", "bytes of each device:"]
        lines += [f"  {name}: {size(held)}" for name, held in self.held.items() if held]
        for program in self.programs:
            bytes = "more than there is" if program.temporaries is None else size(program.temporaries)
            lines.append(f"  temporary arrays of the {program.name}: {bytes}")
        share = "" if self.chip is None else f" of {size(self.chip.memory)}, {self.total / self.chip.memory:.0%}"
        total = f"{size(self.total)}{share}" if math.isfinite(self.total) else "does not fit"
        lines.append(f"  at once: {total}")
        lines += [f"on every device, because no dimension can be split: {', '.join(self.whole)}"] if self.whole else []
        for program in self.programs:
            each = [f"{number} {kind} ({size(bytes)})" for kind, (number, bytes) in program.collectives.items()]
            lines.append(f"collectives of the {program.name}: {', '.join(each) or 'none'}")
        flops = sum(program.flops for program in self.programs)
        parts = ", ".join(f"{program.name} {program.flops / 1e12:.3g}" for program in self.programs)
        lines.append(f"products of each device: {flops / 1e12:.3g} TFLOP a step ({parts})")
        if self.chip is not None:
            seconds = flops / self.chip.flops
            speed = f"{count * tokens / seconds:,.0f} tokens/s"
            lines.append(f"ideal time: {seconds * 1e3:.3g} ms a step at the peak of bfloat16, {speed}")
        lines.append("it fits" if self.fits else "it does not fit: use more devices, fewer rows, or shorter rows")
        return lines


def shapes_of(lm: TransformerLM) -> Any:
    """Returns the shapes of a network's parameters."""
    return jax.eval_shape(lm.init_params, jax.random.key(0))


def dry_run(target: Model, settings: TrainSettings, start: Any = None, on: str = "") -> DryRun:
    """Compiles the programs of a run, and returns what it will need.

    Args:
        target: the target, whose parameters may be shapes (`jax.ShapeDtypeStruct`).
        settings: the settings. An empty `mesh` stands for as many devices as divide the batch.
        start: what training starts from; None for new heads.
        on: a topology such as "v5e:2x4"; empty for the devices at hand.

    Raises:
        InvalidConfig: the settings do not fit the target or the devices, or there is no such topology.
    """
    devices = describe_topology(on) if on else jax.devices()
    settings = _resolve(settings, devices)
    if math.prod(parse_mesh(settings.mesh)) > len(devices):
        raise InvalidConfig(f"mesh {settings.mesh!r} needs more than {plural(len(devices), 'device')}")
    if not isinstance(target.lm, TransformerLM):
        raise InvalidConfig(
            f"a dry run needs the sizes of a transformer; {target.name} is a {type(target.lm).__name__}"
        )
    here = Placement.of(settings, devices)
    trainee = _make_trainee(settings, target, start)
    lm = target.lm.with_execution(platform=devices[0].platform, shards=parse_mesh(settings.mesh)[1])
    sharding.check_divisible(lm.config, here.mesh, target.name)
    network: Any = trainee.network(lm)
    params = _placed(target.params, sharding.param_shardings(target.params, here.mesh, spread=True))
    state, frozen = _shapes(settings, trainee, target, start)
    split = here.split(state)
    state, frozen = _placed(state, split), _placed(frozen, jax.tree.map(lambda _: here.whole, frozen))
    count, tokens = settings.batch, settings.row_tokens
    row = jax.ShapeDtypeStruct((count // settings.accumulate, tokens), jnp.int32, sharding=here.rows)
    reads = losses.needs_features(settings, trainee)
    programs, width = [], 0
    if reads and trainee.joint is None:
        read = functools.partial(compute_features, network, placement=here)
        width = jax.eval_shape(read, params, row, row).shape[-1]
        times = settings.accumulate
        programs.append(_compile("features", read, (params, row, row), here, lm.execution.shards, times=times))
    batch = _batch(settings, here, width)
    step = functools.partial(train_step, settings, trainee, network, placement=here)
    programs.append(_compile("step", step, (frozen, state, batch), here, 1, donated=(1,)))
    held = {
        "target": _bytes(params) if state.params.target is None else 0,
        "heads and trained target": _bytes(state.params),
        "moments": _bytes(state.opt),
        "tables": _bytes(frozen),
        "batches": NUM_BATCHES * _bytes(batch),
    }
    whole = [
        f"{jax.tree_util.keystr(path)} {list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
        if here.mesh.size > 1 and leaf.sharding == here.whole and here.is_large(leaf)
    ]
    name = f"{len(here.mesh.devices.flat)} x {devices[0].device_kind} ({settings.mesh})"
    return DryRun(name, (count, tokens), held, whole, programs, chip_of(devices[0]))


def _resolve(settings: TrainSettings, devices: Sequence[Any]) -> TrainSettings:
    """Returns the settings with a mesh and a precision."""
    precision = losses.product_dtype(settings, devices[0].platform)
    mesh = settings.mesh or default_mesh(settings, len(devices))
    return dataclasses.replace(settings, mesh=mesh, precision=precision)


def _make_trainee(settings: TrainSettings, target: Model, start: Any) -> Trainee:
    """Returns the heads or the draft model to train for a target whose parameters are shapes."""
    made: list[Trainee] = []

    def make(params: Any, started: Any) -> tuple[()]:
        begin = start if start is None else dataclasses.replace(start, params=started)
        made.append(settings.trainee(dataclasses.replace(target, params=params), begin))
        return ()

    jax.eval_shape(make, target.params, None if start is None else start.params)
    return made[0]


def _shapes(settings: TrainSettings, trainee: Any, target: Model, start: Any) -> tuple[Any, losses.FrozenTarget]:
    """Returns the shapes of the state before the first step, and of the target's tables."""
    lm: Any = target.lm
    ids = np.arange(settings.draft_vocab) if 0 < settings.draft_vocab < lm.vocab else None
    laws, dtype = losses.needs_laws(settings, trainee), losses.product_dtype(settings)

    def heads(params: Any) -> Any:
        if start is not None:
            kept = {name: value for name, value in start.params.items() if name != "tokens"}
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), kept)
        assert isinstance(trainee, HeadTrainee)
        return trainee.init_params(dataclasses.replace(target, params=params), ids)

    def state(params: Any) -> Any:
        trained = params if settings.trains_target else None
        return init_state(settings, trainee, Trainable(heads(params), trained))

    frozen = losses.FrozenTarget.empty()
    if losses.needs_features(settings, trainee):
        frozen = jax.eval_shape(lambda params: losses.freeze(trainee, lm, params, ids, laws, dtype), target.params)
    return jax.eval_shape(state, target.params), frozen


def _batch(settings: TrainSettings, here: Placement, width: int) -> Batch:
    """Returns the shapes of a batch with features of a width."""
    shape = settings.accumulate, settings.batch // settings.accumulate, settings.row_tokens
    dtypes = {"tokens": jnp.int32, "segments": jnp.int32, "mask": jnp.bool_}
    arrays: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=here.parts) for name, dtype in dtypes.items()
    }
    arrays["features"] = jax.ShapeDtypeStruct((*shape, width), jnp.float32, sharding=here.parts)
    return Batch(**arrays)


def _placed(tree: Any, shardings: Any) -> Any:
    """Returns shapes with places."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree, shardings
    )


def _bytes(tree: Any) -> int:
    """Returns the bytes of a device's part of arrays."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf.sharding, NamedSharding)
    )


def _compile(
    name: str,
    function: Any,
    arguments: tuple,
    here: Placement,
    shards: int,
    donated: tuple[int, ...] = (),
    times: int = 1,
) -> Program:
    """Compiles a program; `shards` devices share the work of a row, and it runs `times` times in a step."""
    traced = jax.jit(function, donate_argnums=donated).trace(*arguments)
    flops = times * count_flops(traced.jaxpr.jaxpr) / (here.mesh.shape[DATA] * shards)
    try:
        done = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
            raise
        return Program(name, None, flops, {})
    memory = done.memory_analysis()
    return Program(name, 0 if memory is None else memory.temp_size_in_bytes, flops, count_collectives(done))


def count_flops(jaxpr: Any) -> float:
    """Returns the operations of all matrix products of a program, with loops of a known length counted in full."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2.0 * depth * math.prod(eqn.outvars[0].aval.shape)
            continue
        inner = [
            count_flops(getattr(value, "jaxpr", value))
            for value in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "jaxpr") or hasattr(leaf, "eqns")
            )
            if hasattr(getattr(value, "jaxpr", value), "eqns")
        ]
        each = max(inner, default=0.0) if eqn.primitive.name in ("cond", "platform_index") else sum(inner)
        total += each * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else each
    return total


def count_collectives(compiled: Any) -> dict[str, tuple[int, int]]:
    """Returns the number and the bytes of each kind of collective of a program; those in a loop are counted once."""
    try:
        text = compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:  # JAX 0.10 cannot print some asynchronous instructions of TPUs
        return {}
    found: dict[str, list[int]] = collections.defaultdict(list)
    seen = set()
    for match in re.finditer(rf"^.* = (.+?) ({COLLECTIVES})(?:-start)?\((.*)$", text, re.MULTILINE):
        channel = re.search(r"channel_id=(\d+)", match[3])  # an instruction may be fused, and listed several times
        if channel is not None and (match[2], channel[1]) in seen:
            continue
        seen.add((match[2], channel and channel[1]))
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
        sizes = [math.prod(map(int, filter(None, shape.split(",")))) * BYTES.get(kind, 4) for kind, shape in arrays]
        found[match[2]].append(max(sizes, default=0))
    return {kind: (len(sizes), sum(sizes)) for kind, sizes in found.items()}
