"""The members under test: one row for each registered name, from which the tests take their parameters.

A new drafter or schedule needs a row here. A rule needs no row, since a rule is built without arguments, and neither
does a drafter with heads that are trained under its own name, unless the drafter has options.
`testing/test_cases.py` names each row that is missing.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from helpers.narrow import instance
from helpers.toys import RAGGED, noisy
from jaxspec import registry
from jaxspec.cli.tree import parse_tree
from jaxspec.core.draw import Noise
from jaxspec.core.rule import Rule, WeighingRule
from jaxspec.core.schedule import Constant, Schedule
from jaxspec.core.topology import Topology, branching, chain, dynamic
from jaxspec.errors import InvalidConfig
from jaxspec.generation.drafting import Drafting
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.network import flatten, init_params, unflatten
from jaxspec.models.transformer import TransformerLM
from jaxspec.schedules.adaptive import Adaptive
from jaxspec.schedules.best_width import BestWidth
from jaxspec.schedules.confidence import Confidence
from jaxspec.schedules.plus_minus import PlusMinus


@dataclasses.dataclass(frozen=True)
class DrafterCase:
    """How the tests draft with one drafter. Models and heads are made for the target where the drafter takes them.

    Attributes:
        tree: as on the command line; None for a drafter that takes no tree.
        options: `drafter_options`.
        any_network: it drafts for a target of any network, such as a table, and not for transformers alone.
    """

    tree: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    any_network: bool = False


DRAFTERS = {name: DrafterCase("2x1") for name in registry.HEADS} | {
    "none": DrafterCase(any_network=True),
    "prompt-lookup": DrafterCase("1x1x1", {"earlier": 64}, any_network=True),
    "recycling": DrafterCase("2x1", any_network=True),
    "early-exit": DrafterCase("2x1", {"exit_layers": 1}),
    "model": DrafterCase("2x1", any_network=True),
    "pard": DrafterCase("2x1", {"pard_token": 3, "projection": ""}, any_network=True),
    "eagle": DrafterCase("2x1", {"rope_theta": 5000.0, "taps": "1,2"}),
    "dflash": DrafterCase("2x1", {"taps": "1,2"}),
}
ANY_NETWORK = [name for name, case in DRAFTERS.items() if case.any_network]

SCHEDULES: dict[str, list[Schedule]] = {
    "constant": [Constant(2)],
    "plus-minus": [PlusMinus(first=2, widths=(2, 3))],
    "confidence": [Confidence(threshold=0.5), Confidence(threshold=0.55, entropy=True, widths=())],
    "adaptive": [Adaptive((1.0, 1.6), resume=0.05, widths=(3,))],
    "best-width": [BestWidth((1, 2, 3))],
}
"""Schedules with settings that limit some drafts of the toys, and not all of them, if the drafter asks."""

RULES: dict[str, Rule] = {name: registry.find("rule", name)() for name in registry.RULES}
LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]
WEIGHING = {name: cast(WeighingRule, rule) for name, rule in RULES.items() if rule.noise is not Noise.SHARED}
"""Rules that weigh the target's law against the draft's, and so have laws to enumerate."""

TREES = {
    "chain-1": chain(1),
    "chain-4": chain(4),
    "chain-8": chain(8),
    "ragged": RAGGED,
    "wide": branching(3, 2),
    "dynamic": dynamic(3, 4, 9),
}


def verifies(rule: Rule, topology: Topology) -> bool:
    """Tells whether the rule accepts trees of this shape."""
    try:
        rule.check(topology.shape)
    except InvalidConfig:
        return False
    return True


LAYER: dict[str, Any] = {
    "num_layers": 1,
    "window": None,
    "windowed": (),
    "window_rope": None,
    "out_gate": False,
    "delta": None,
    "recurrent": (),
    "experts": None,
    "sparse": (),
}
"""What differs between a target's config and that of a head's layer."""


def random_heads(target: jaxspec.Model, count: int = 2) -> jaxspec.DraftHeads:
    """Returns heads with random parameters; the parameters that training starts from repeat the target's law."""
    rng = np.random.default_rng(0)
    sizes = instance(TransformerLM, target.lm).config
    config = jaxspec.HeadsConfig(sizes.hidden_size, sizes.vocab_size, count, inputs="path")
    named = flatten(init_params(config))
    random = {name: jnp.asarray(0.3 * rng.normal(size=a.shape), jnp.float32) for name, a in named.items()}
    return jaxspec.DraftHeads(config, unflatten(random))


def random_eagle(target: jaxspec.Model) -> jaxspec.DraftHeads:
    """Returns an EAGLE-3.1 head with random parameters, which reads two taps and drafts every other token."""
    sizes = instance(TransformerLM, target.lm).config
    decoder = dataclasses.replace(sizes, **LAYER)
    ids = np.arange(0, sizes.vocab_size, 2)
    config = EagleConfig(
        decoder, taps=(1, 1), draft_vocab_size=len(ids), fc_norm=True, norm_output=True, own_projection=True
    )
    return jaxspec.DraftHeads(config, init_params(config, key=jax.random.key(0), tokens=ids))


def random_dflash(target: jaxspec.Model) -> jaxspec.DraftHeads:
    """Returns a DSpark head with random parameters, which reads two taps and drafts every other token."""
    sizes = instance(TransformerLM, target.lm).config
    decoder = dataclasses.replace(sizes, **LAYER, qk_norm=True)
    ids = np.arange(0, sizes.vocab_size, 2)
    config = DFlashConfig(
        decoder, 5, 0, taps=(1, 1), markov="rnn", markov_rank=4, confidence=True, draft_vocab_size=len(ids)
    )
    return jaxspec.DraftHeads(config, init_params(config, key=jax.random.key(0), tokens=ids))


def untrained_heads(name: str, target: jaxspec.Model) -> jaxspec.DraftHeads:
    """Returns heads of a kind that can be trained under its own name, before training, with noise."""
    trainee = registry.find("kind of heads", name)().trainee(target)
    heads = trainee.result(noisy(trainee.init_params(target, None), 0, 0.3), None, name)
    return instance(jaxspec.DraftHeads, heads)


UNTRAINED = {name: functools.partial(untrained_heads, name) for name in registry.HEADS}
RANDOM: dict[str, Callable[[jaxspec.Model], jaxspec.DraftHeads]] = UNTRAINED | {
    "medusa": random_heads,
    "eagle": random_eagle,
    "dflash": random_dflash,
}
"""Heads of each drafter that takes some."""


def arguments(name: str, target: jaxspec.Model) -> dict[str, Any]:
    """Returns the arguments of `jaxspec.generate` that draft with the drafter of this name."""
    case, takes = DRAFTERS[name], registry.find("drafter", name).takes
    given: dict[str, Any] = {"drafter": name, "drafter_options": dict(case.options)}
    if case.tree is not None:
        given["tree"] = parse_tree(case.tree)
    if "draft" in takes:
        given["draft"] = jaxspec.Model(target.lm, noisy(target.params, 1, 0.3), target.tokenizer)
    if "heads" in takes:
        given["heads"] = RANDOM[name](target)
    return given


def drafting(name: str, target: jaxspec.Model) -> Drafting:
    """Returns the `Drafting` of these arguments."""
    return Drafting(**arguments(name, target))


def words(name: str, target: jaxspec.Model, folder: pathlib.Path) -> list[str]:
    """Returns the same as options of the command line; models and heads are saved in the folder."""
    given, found = arguments(name, target), ["--drafter", name]
    if (tree := DRAFTERS[name].tree) is not None:
        found += ["--tree", tree]
    if "draft" in given:
        found += ["--draft-model", str(jaxspec.save(given["draft"], folder / "draft"))]
    if "heads" in given:
        found += ["--heads", str(jaxspec.save_heads(given["heads"], folder / "heads"))]
    for option, value in given["drafter_options"].items():
        found += ["--drafter-option", f"{option}={value}"]
    return found
