"""What `make tpu` and `make gpu` share: decoders with the shapes of Llama 3, compiled for devices that are not here.

The target has the shapes of Llama-3-8B in bfloat16 or int8, with drafters and trees, on one device and on a mesh of
2 x 2 (`jaxspec.make_mesh`); shapes alone, no weights. A few cases have the shapes of models with recurrent layers or
mixtures of experts, whose layer for multi-token prediction drafts (`OTHER_TARGETS`). Nothing is run.
"""

import dataclasses
import functools
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

import jaxspec
from jaxspec.core.automaton import TokenAutomaton
from jaxspec.core.drafter import DrafterInputs
from jaxspec.core.theory import ExpertReads
from jaxspec.decode.lifecycle import row_axes
from jaxspec.decode.partition import Partition
from jaxspec.decode.state import Request, State, Weights
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.early_exit import EarlyExit
from jaxspec.drafters.medusa import Medusa
from jaxspec.drafters.model import BridgedDraft, ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.pard import Pard
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.drafters.recycling import Recycling
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.eagle_layouts import mtp_config
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import unflatten
from jaxspec.models.config import DeltaSizes, Experts, ModelConfig, is_matrix
from jaxspec.models.quantized import quantize
from jaxspec.models.rope import Rope
from jaxspec.models.sharding import param_shardings
from jaxspec.models.transformer import TransformerLM
from jaxspec.rules.coupled import Coupled
from scripts.library import hlo

BY_KERNEL = ("prompt-lookup, chain 8", "medusa, 64 nodes")
"""Drafters that the tiers also compile with attention in Pallas."""
PLAIN = "none"
DEEP = 32  # layers of Llama 3 8B
VOCAB = 128256
AT_ONE_WIDTH = (
    "none", "prompt-lookup, chain 8", "model (Llama-3.2-1B), chain 4", "early-exit of 4 layers, chain 2",
    "eagle (EAGLE-3), chain 4", "medusa, 64 nodes",
)  # fmt: skip
"""Drafters that the tiers also compile with one width for every target call."""
WIDTH, WIDE = 16, 64
WITH_GRAMMAR = ("none", "prompt-lookup, chain 8", "medusa, 64 nodes")
"""Drafters that the tiers also compile with a grammar."""
STATES, CLASSES = 512, 512  # of the grammar
PERIOD = 4
"""Layers of Qwen3.5 after which the kinds of layers repeat: three with Gated DeltaNet, and one with attention."""
MTP_TREES = {"MTP, 8 nodes": 8, "MTP, 64 nodes": 64}


def llama(layers: int, hidden: int = 4096, inner: int = 14336, heads: int = 32, kv_heads: int = 8) -> TransformerLM:
    """Shapes of Llama 3; of the 8B model unless told otherwise."""
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=inner, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=hidden // heads, tie_embeddings=False,
    )  # fmt: skip
    return TransformerLM(config, "bfloat16")


def qwen35(layers: int) -> TransformerLM:
    """Shapes of Qwen3.5-4B."""
    config = ModelConfig(
        vocab_size=248320, hidden_size=2560, intermediate_size=9216, num_layers=layers, num_heads=16, num_kv_heads=4,
        head_dim=256, norm_eps=1e-6, rope=Rope(theta=1e7, width=64), qk_norm=True, out_gate=True,
        delta=DeltaSizes(16, 32, 128, 128), recurrent=tuple((i + 1) % PERIOD > 0 for i in range(layers)),
    )  # fmt: skip
    return TransformerLM(config, "bfloat16")


def qwen35_moe(layers: int) -> TransformerLM:
    """Shapes of Qwen3.5-35B-A3B."""
    experts = Experts(256, 8, 512, shared_width=512)
    config = dataclasses.replace(
        qwen35(layers).config, hidden_size=2048, intermediate_size=experts.active_width, num_kv_heads=2,
        experts=experts, tie_embeddings=False,
    )  # fmt: skip
    return TransformerLM(config, "bfloat16")


def qwen3_moe(layers: int) -> TransformerLM:
    """Shapes of Qwen3-30B-A3B."""
    config = ModelConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_layers=layers, num_heads=32, num_kv_heads=4,
        head_dim=128, norm_eps=1e-6, tie_embeddings=False, rope=Rope(theta=1e6), qk_norm=True,
        experts=Experts(128, 8, 768),
    )  # fmt: skip
    return TransformerLM(config, "bfloat16")


def with_mtp(target: TransformerLM) -> dict[str, tuple[Any, Any]]:
    """Returns plain decoding and trees of the target's layer for multi-token prediction, with shapes of parameters."""
    config = mtp_config(target.config)
    made: dict[str, tuple[Any, Any]] = {PLAIN: (NoDraft(), None)}
    for name, nodes in MTP_TREES.items():
        tree = jaxspec.best_tree([0.6, 0.2, 0.1, 0.05], nodes)
        made[name] = Eagle(config, target, tree), head_shapes(config, target)
    return made


def with_copies(target: TransformerLM) -> dict[str, tuple[Any, Any]]:
    """Returns plain decoding and a drafter that copies."""
    return {PLAIN: (NoDraft(), None), "prompt-lookup": (PromptLookup(), None)}


class OtherTarget(NamedTuple):
    """A target whose layers are not those of Llama 3, and a function that returns its drafters."""

    make: Callable[[int], TransformerLM]
    drafters: Callable[[TransformerLM], dict[str, tuple[Any, Any]]]


OTHER_TARGETS = {
    "Qwen3.5-4B": OtherTarget(qwen35, with_mtp),
    "Qwen3-30B-A3B": OtherTarget(qwen3_moe, with_copies),
    "Qwen3.5-35B-A3B": OtherTarget(qwen35_moe, with_mtp),
}
"""The targets by name, with which the names of their drafters in the table begin."""


def shapes(lm: TransformerLM, int8: bool = False) -> Any:
    params = jax.eval_shape(lm.init_params, jax.random.key(0))
    return jax.eval_shape(quantize, params) if int8 else params


def drafters(target: TransformerLM, layers: int) -> dict[str, tuple[Any, Any]]:
    """Returns each with the shapes of its parameters."""
    small = llama(max(layers // 2, 1), 2048, 8192, 32, 8)
    small = small.with_execution(platform=target.execution.platform)
    hidden = target.config.hidden_size
    config = HeadsConfig(hidden, target.config.vocab_size, 4)
    layer = {
        "kernel": jax.ShapeDtypeStruct((hidden, hidden), "bfloat16"),
        "bias": jax.ShapeDtypeStruct((hidden,), "float32"),
    }
    params = {"blocks": {i: {0: layer} for i in range(4)}}
    tree = jaxspec.named_tree("mc_sim_7b_63")
    model, exit = jaxspec.Model(target, shapes(target)), max(min(4, layers - 1), 1)
    medusa = Medusa(config, target, tree)
    early = DrafterInputs(model, tree=jaxspec.chain(2), options={"exit_layers": exit})
    return {
        "none": (NoDraft(), None),
        "prompt-lookup, chain 8": (PromptLookup(jaxspec.chain(8)), None),
        "prompt-lookup": (PromptLookup(), None),
        "recycling": (Recycling(), None),
        "model (Llama-3.2-1B), chain 4": (ModelDraft(small, jaxspec.chain(4)), shapes(small)),
        "model (Llama-3.2-1B), tree 4x2x1": (ModelDraft(small, jaxspec.branching(4, 2, 1)), shapes(small)),
        "model of another vocabulary, chain 4": across(target, small, jaxspec.chain(4)),
        "pard (Llama-3.2-1B), chain 8": (Pard(small, target.vocab - 1, target.vocab), shapes(small)),
        "early-exit of 4 layers, chain 2": EarlyExit.build(early),
        "medusa, 64 nodes": (medusa, {"heads": params}),
        "eagle (EAGLE-3), chain 4": eagle3(target, jaxspec.chain(4)),
        "eagle (EAGLE-3), dynamic of 60 nodes": eagle3(target, jaxspec.dynamic(10, 8, 60)),
        "dflash, block of 16": blocks(target, 15, block_size=16),
        "dflash (DSpark), block of 7": blocks(
            target, 7, block_size=7, from_anchor=True, markov="vanilla", markov_rank=256, confidence=True
        ),
    }  # fmt: skip


def across(target: TransformerLM, small: TransformerLM, tree: Any) -> tuple[BridgedDraft, Any]:
    """A draft of 49,152 tokens, of which 40,000 are the target's, too."""
    small = dataclasses.replace(small, config=dataclasses.replace(small.config, vocab_size=49152))
    tables = {"common": int32(40000), "as_target": int32(40000), "spelling": int32(400_000)}
    params = {"model": shapes(small), "starts": int32(target.vocab + 1)} | tables
    bridge: Any = None  # only the host reads it
    return BridgedDraft(ModelDraft(small, tree), 0, 32, bridge), params


def eagle3(target: TransformerLM, tree: Any) -> tuple[Eagle, Any]:
    """The published EAGLE-3 head of Llama-3.1-8B-Instruct, and its tree: a layer like the target's, 32,000 tokens."""
    layer = dataclasses.replace(target.config, num_layers=1)
    config = EagleConfig(layer, draft_vocab_size=32000, own_projection=True)
    return Eagle(config, target, tree), head_shapes(config, target)


def blocks(target: TransformerLM, depth: int, **sizes: Any) -> tuple[DFlash, Any]:
    """A DFlash head of five layers like the target's, as the published ones, and a chain."""
    layers = dataclasses.replace(target.config, num_layers=5, qk_norm=True)
    taps = tuple(min(tap, target.depth) for tap in (2, 9, 16, 23, 30))
    config = DFlashConfig(layers, mask_token=target.vocab - 1, taps=taps, **sizes)
    return DFlash(config, target, jaxspec.chain(depth)), head_shapes(config, target)


def head_shapes(config: EagleConfig | DFlashConfig, target: TransformerLM) -> Any:
    """Returns the shapes of a head's parameters, with matrices in the target's dtype."""

    def dtype(name: str, axes: int) -> str:
        kind = name.rpartition(".")[2]
        return "int32" if kind == "tokens" else target.dtype if is_matrix(kind, axes) else "float32"

    shapes = config.param_shapes().items()
    return unflatten({name: jax.ShapeDtypeStruct(shape, dtype(name, len(shape))) for name, shape in shapes})


def make_grammar(vocab: int) -> jaxspec.Grammar:
    """Returns a grammar with random transitions, because programs depend on the sizes alone."""
    rng = np.random.default_rng(0)
    table, final = rng.integers(-1, STATES, (STATES, CLASSES)), np.ones(STATES, bool)
    return jaxspec.Grammar(TokenAutomaton(table, final, np.arange(vocab) % CLASSES, rng.integers(-1, vocab, STATES)))


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compiled: one line of the table."""

    chip: str
    drafter: str
    mesh: bool = False
    batch: int = 1
    int8: bool = False
    layers: int = 32
    capacity: int = 2048
    attention: str = "xla"
    products: str = "xla"
    width: int = 0  # of every call of the target, `width_matched`; 0: as narrow as a round needs
    exact: bool = False  # products by one chain of sums, see `jaxspec.backend.exact_products`
    grammar: bool = False  # every row has a grammar

    @property
    def named(self) -> dict[str, Any]:
        """What tells it from other lines."""
        kind, dtype = "2x2" if self.mesh else "one device", "int8" if self.int8 else "bfloat16"
        drafter = self.drafter if self.attention == "xla" else f"{self.drafter}, attention in Pallas"
        drafter = f"{drafter}, width {self.width}" if self.width else drafter
        drafter = f"{drafter}, exact" if self.exact else drafter
        drafter = f"{drafter}, grammar" if self.grammar else drafter
        own = {"chip": self.chip, "mesh": kind, "drafter": drafter, "batch": self.batch, "dtype": dtype}
        return own | {"layers": self.layers}


def cases(chips: list[str], layers: int, everything: bool, capacity: Callable[[int], int]) -> Iterator[Case]:
    """The cases: all of them, or on one chip every drafter on one device and on a mesh, and a few of the others.

    Args:
        chips: their names.
        layers: of the target.
        everything: every combination.
        capacity: slots of the cache for a target of so many layers.
    """
    names = drafters(llama(layers), layers)
    others_named = [
        f"{name}, {drafter}" for name, (make, own) in OTHER_TARGETS.items() for drafter in own(make(PERIOD))
    ]
    few = [name for name in names if name.startswith(("none", "prompt-lookup", "medusa"))]
    shallow = functools.partial(Case, layers=layers, capacity=capacity(layers))
    if everything:
        for chip, mesh, many, int8, name in itertools.product(
            chips, (False, True), (False, True), (False, True), names
        ):
            yield shallow(chip, name, mesh, 16 if many else 1 + mesh, int8)
        return
    first, *others = chips
    for mesh, name in itertools.product((False, True), names):
        yield shallow(first, name, mesh, 1 + mesh)
    for name in few:
        yield shallow(first, name, batch=16)
        yield shallow(first, name, int8=True)
    for name in BY_KERNEL:
        yield shallow(first, name, attention="pallas")
    for name in AT_ONE_WIDTH:
        yield shallow(first, name, attention="pallas", width=WIDE if "64" in name else WIDTH)
    for mesh, name in itertools.product((False, True), WITH_GRAMMAR):
        yield shallow(first, name, mesh, 1 + mesh, grammar=True)
    for chip, name in itertools.product(others, few):
        yield shallow(chip, name)
    # Three times a power of two, so that no array of rows has the number of elements of a cache by chance.
    slots = capacity(1) // 2 * 3
    for mesh, name in itertools.product((False, True), others_named):
        yield Case(first, name, mesh, 1 + mesh, layers=PERIOD, capacity=slots)
    if layers < DEEP:
        for attention in ("xla", "pallas"):
            yield Case(first, BY_KERNEL[0], layers=DEEP, capacity=capacity(DEEP), attention=attention)


class Program(NamedTuple):
    """A compiled loop, with the shapes of its weights and its state.

    Attributes:
        target: the network.
        tokens: the number of tokens in a device's part of the target's widest call.
    """

    done: jax.stages.Compiled
    parts: dict[str, list[hlo.Instruction]]
    weights: Weights
    state: State
    seconds: float
    target: TransformerLM
    tokens: int

    @property
    def outputs_of_experts(self) -> set[int]:
        """The numbers of elements of arrays with a row for each expert and token, on one device and on two."""
        config = self.target.config
        if (experts := config.experts) is None:
            return set()
        widths = experts.width // 2, experts.width, 2 * experts.width, config.hidden_size
        return {experts.count * self.tokens * width for width in widths}

    def experts_read(self, one: hlo.Instruction) -> int:
        """Returns the expected number of experts that a loop over experts or a kernel reads, or 1."""
        config = self.target.config
        if (experts := config.experts) is None:
            return 1
        if re.search(r'op_name="[^"]*/experts/while"', one.rest):
            rows = next(n for n, *_, width in hlo.float_shapes(one.type) if width == config.hidden_size)
        elif hlo.is_kernel(one) and re.search(r'op_name="[^"]*/expert_(units|outputs)', one.rest):
            most, rows = self._units_of_experts(one)
            rows = most // experts.per_token if most < experts.count else rows
        else:
            return 1
        return round(ExpertReads(experts.count, experts.per_token, 1.0).expected(rows))

    def _units_of_experts(self, kernel: hlo.Instruction) -> tuple[int, int]:
        """Returns the sizes U and M of the hidden units of experts, which a kernel writes or reads."""
        types = {each.name: each.type for part in self.parts.values() for each in part}
        shapes = [hlo.shape(type) for type in (types[kernel.operands[0]], kernel.type)]
        return next(found[:2] for found in shapes if len(found) == 3)


def int32(*shape: int) -> Any:
    """Stands for an array of integers of this shape."""
    return jax.ShapeDtypeStruct(shape, "int32")


def prepared(case: Case, platform: str, devices: Any) -> tuple[Callable, tuple, jaxspec.Decoder]:
    """Returns the loop, the shapes of weights, state and rounds with their places on the devices, and the decoder."""
    first, _, rest = case.drafter.partition(", ")
    other = OTHER_TARGETS.get(first)
    target = (llama if other is None else other.make)(case.layers).with_execution(
        attention=case.attention, products=case.products, platform=platform, exact=case.exact
    )
    batch = case.batch
    drafter, params = drafters(target, case.layers)[case.drafter] if other is None else other.drafters(target)[rest]
    decoder = jaxspec.Decoder(target, drafter, Coupled(), width_matched=case.width or False)
    weights = Weights(shapes(target, case.int8), params)
    processors = [make_grammar(target.vocab)] if case.grammar else []
    sampling = jaxspec.Sampling(temperature=1.0, processors=processors)
    request = Request(
        int32(batch, 64),
        int32(batch),
        int32(batch),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch)),
        int32(batch, 8),
        jax.eval_shape(lambda: sampling.rows(batch, target.vocab)),
    )
    state = jax.eval_shape(lambda w, r: decoder.init(w, r, case.capacity), weights, request)
    arguments = (weights, state, int32())
    function = decoder.run
    if case.mesh:
        decoder = dataclasses.replace(decoder, target=target.with_execution(shards=2))
        mesh = jaxspec.make_mesh(2, 2, devices)
        partition = Partition(mesh, row_axes(lambda w, r: decoder.init(w, r, case.capacity), weights, request))
        function = partition.over(decoder.run, arguments)
        places = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), partition.specs(arguments))
        places = (places[0]._replace(target=param_shardings(weights.target, mesh)), *places[1:])
        # Keys and values [L, B, H, S, K], states [B, H, K, K], inputs of a convolution [B, F - 1, C].
        axes = {5: (None, "data", "model"), 4: ("data", "model"), 3: ("data", None, "model")}
        stores = jax.tree.map(lambda leaf: jax.NamedSharding(mesh, jax.P(*axes[leaf.ndim])), state.cache.stores)
        places = (places[0], places[1]._replace(cache=places[1].cache._replace(stores=stores)), *places[2:])
    else:
        places = jax.tree.map(lambda _: SingleDeviceSharding(devices[0]), arguments)
    placed = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arguments, places)
    return function, placed, decoder


def compiled(case: Case, platform: str, devices: Any, options: Mapping[str, str]) -> Program:
    """Compiles the loop for these devices, with these options of the compiler."""
    function, arguments, decoder = prepared(case, platform, devices)
    start = time.perf_counter()
    done = jax.jit(function, donate_argnums=1).lower(*arguments).compile(dict(options))
    weights, state, _ = arguments
    seconds = time.perf_counter() - start
    target: Any = decoder.target
    tokens = decoder.drafter.shape.nodes * case.batch // (2 if case.mesh else 1)
    return Program(done, hlo.computations(done.as_text() or ""), weights, state, seconds, target, tokens)
