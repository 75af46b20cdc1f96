"""What a training run will need, before any weight is loaded: memory of each device, collectives, and time.

The programs of a run are compiled for the devices at hand, or for a topology of TPUs, from the shapes of all arrays.
"""

import contextlib
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
from jaxspec.backend.chips import TPUS, Chip, chip_of, describe_topology, without_xla_flags
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


class Collective(NamedTuple):
    """An exchange between devices in a program.

    Attributes:
        kind: all-gather, all-reduce, reduce-scatter, all-to-all or collective-permute.
        dtype: XLA's name of the dtype of its result.
        shape: the shape of its result on each device: of the whole array after an all-gather, and of a device's part
            after a reduce-scatter.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The bytes of the array."""
        return math.prod(self.shape) * BYTES.get(self.dtype, 4)


class Program(NamedTuple):
    """A compiled program.

    Attributes:
        name: what it computes.
        temporaries: bytes of its temporary arrays on each device; None if the compiler refused it for lack of memory.
        flops: operations of matrix products on each device.
        collectives: its collectives, where those in a loop are listed once; None if they are not known, because the
            program cannot be compiled or printed.
    """

    name: str
    temporaries: int | None
    flops: float
    collectives: list[Collective] | None

    def sum_collectives(self) -> dict[str, tuple[int, int]] | None:
        """Returns the number and the bytes of each kind of collective; None if they are not known."""
        if self.collectives is None:
            return None
        sums = {}
        for one in self.collectives:
            count, bytes = sums.get(one.kind, (0, 0))
            sums[one.kind] = count + 1, bytes + one.bytes
        return sums


class TracedProgram(NamedTuple):
    """A program before it is compiled.

    Attributes:
        name: what it computes.
        traced: the program.
        flops: operations of matrix products on each device.
        arguments: bytes of its arguments on each device.
    """

    name: str
    traced: Any
    flops: float
    arguments: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a training run before anything is compiled.

    Attributes:
        devices: the kind and the number of devices, and the mesh.
        rows: rows of a step, and tokens of a row.
        held: bytes of each device by what they hold.
        whole: names and shapes of large arrays of the heads that no dimension allows to be split.
        traced: the programs of a step: the features, if the target reads them in the step, and the step itself.
        chip: figures of a device; None if they are not known.
    """

    devices: str
    rows: tuple[int, int]
    held: dict[str, int]
    whole: list[str]
    traced: list[TracedProgram]
    chip: Chip | None


@dataclasses.dataclass(frozen=True)
class DryRun(Plan):
    """What a training run needs.

    Attributes:
        programs: the programs, compiled.
    """

    programs: list[Program]

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
            lines.append(f"collectives of the {program.name}: {_describe(program.sum_collectives())}")
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
        on: a topology such as "v5e:2x4" or "h100:8"; empty for the devices at hand.

    Raises:
        InvalidConfig: the settings do not fit the target or the devices, or there is no such topology.
    """
    plan = plan_run(target, settings, start, on)
    with without_xla_flags() if on.startswith(TPUS) else contextlib.nullcontext():
        programs = list(map(compile_program, plan.traced))
    return DryRun(**vars(plan), programs=programs)


def plan_run(target: Model, settings: TrainSettings, start: Any = None, on: str = "") -> Plan:
    """Computes `dry_run`, but compiles nothing."""
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
    traced, width = [], 0
    if reads and trainee.joint is None:
        read = functools.partial(compute_features, network, placement=here)
        width = jax.eval_shape(read, params, row, row).shape[-1]
        times = settings.accumulate
        traced.append(_trace("features", read, (params, row, row), here, lm.execution.shards, times=times))
    batch = _batch(settings, here, width)
    step = functools.partial(train_step, settings, trainee, network, placement=here)
    traced.append(_trace("step", step, (frozen, state, batch), here, 1, donated=(1,)))
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
    return Plan(name, (count, tokens), held, whole, traced, chip_of(devices[0]))


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


def _trace(
    name: str,
    function: Any,
    arguments: tuple,
    here: Placement,
    shards: int,
    donated: tuple[int, ...] = (),
    times: int = 1,
) -> TracedProgram:
    """Traces a program; `shards` devices share the work of a row, and it runs `times` times in a step."""
    traced = jax.jit(function, donate_argnums=donated).trace(*arguments)
    flops = times * count_flops(traced.jaxpr.jaxpr) / (here.mesh.shape[DATA] * shards)
    return TracedProgram(name, traced, flops, _bytes(arguments))


def compile_program(program: TracedProgram) -> Program:
    """Compiles a program."""
    name, flops, lowered = program.name, program.flops, program.traced.lower()
    try:
        try:
            done = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "output tile sizes" not in str(error):
                raise
            # Without a GPU to try tiles on, XLA may choose tiles that do not fit a product.
            done = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
            raise
        return Program(name, None, flops, None)
    memory = done.memory_analysis()
    text = None
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # JAX 0.10 cannot print some asynchronous instructions
        text = done.as_text()
    exchanged = None if text is None else list_collectives(text)
    return Program(name, 0 if memory is None else memory.temp_size_in_bytes, flops, exchanged)


def _describe(exchanged: dict[str, tuple[int, int]] | None) -> str:
    """Describes collectives, as `Program.sum_collectives` counts them."""
    if exchanged is None:
        return "not known, because the program cannot be compiled or printed"
    return ", ".join(f"{number} {kind} ({size(bytes)})" for kind, (number, bytes) in exchanged.items()) or "none"


def count_flops(jaxpr: Any) -> float:
    """Returns the operations of all matrix products of a program, with loops of a known length counted in full.

    A part that each group of devices runs on its own rows is counted for all groups.
    """
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
        if eqn.primitive.name == "scan":
            each *= eqn.params.get("length", 1)
        elif eqn.primitive.name == "shard_map":
            each *= eqn.params["mesh"].shape[DATA]
        total += each
    return total


def list_collectives(text: str) -> list[Collective]:
    """Returns the collectives of a compiled program in HLO; those in a loop are listed once."""
    found, chains, fused = [], set(), False
    for line in text.splitlines():
        if line.endswith("{"):  # XLA:TPU fuses an all-reduce with the slice that a device keeps
            header = re.match(r"%all-reduce-scatter[.\d]* .* -> (\w+)\[([\d,]*)\]", line)
            fused = header is not None
            found += [_collective("reduce-scatter", *header.groups())] if header else []
        match = re.match(rf"^.* = (.+?) ({COLLECTIVES})(-start)?\(", line)
        if match is None or fused:
            continue
        chain = re.search(r'chain_id="(\d+)"', line)  # XLA:TPU lists a collective once for each fusion that hides it
        if chain is not None and (match[2], chain[1]) in chains:
            continue
        chains |= {(match[2], chain[1])} if chain else set()
        results = [_collective(match[2], *one) for one in re.findall(r"(\w+)\[([\d,]*)\]", match[1])]
        if match[3]:  # an asynchronous instruction has its operands as well
            results = [max(results, key=lambda one: one.bytes)]
        found += results
    return found


def _collective(kind: str, dtype: str, shape: str) -> Collective:
    return Collective(kind, dtype, tuple(map(int, filter(None, shape.split(",")))))
