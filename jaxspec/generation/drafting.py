"""What is drafted and how: the one form that keywords, the command line, benchmarks and tuned files are brought into.

The file of a `Drafting`, which `jaxspec tune` writes, is JSON: a version, the drafter by name, the parents of its tree,
the options of the drafter's own, and a schedule by name with its fields. What was measured stands beside them, for
people.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, Self

import jax
import numpy as np

from jaxspec.backend.cpu import INT8_NODE_COST
from jaxspec.core.protocols import Drafter, DrafterInputs, Rule, Schedule
from jaxspec.core.records import Params
from jaxspec.core.schedule import Constant
from jaxspec.core.tree import Dynamic, Topology, as_topology, read_parents
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.errors import InvalidConfig, JaxspecError, TuningError, shown
from jaxspec.generation.inputs import need_model
from jaxspec.heads.companions import with_companions
from jaxspec.heads.files import load_heads
from jaxspec.heads.network import DraftHeads, check_heads
from jaxspec.models.model import Model
from jaxspec.registry import SCHEDULES, find
from jaxspec.schedules.adaptive import Adaptive
from jaxspec.storage.reading import check_path, read_json
from jaxspec.text.tokenizer import check_same_vocab

DRAFTER = "prompt-lookup"
"""Where a user names none."""
NODE_COST = 0.1
"""Assumed cost of one drafted token in a target call, in units of a call with one token."""
VERSION = 3
_FIELDS = {"version", "drafter", "tree", "options", "schedule", "measured"}
_ADAPTIVE_BEFORE_3 = {
    "hope": "prior_acceptance",
    "credit": "loss_budget",
    "share": "loss_per_token",
    "memory": "decay_rounds",
    "weight": "prior_rounds",
}
"""Fields of the schedule "adaptive" in files of versions 1 and 2, with their names since version 3."""


@dataclasses.dataclass(frozen=True, repr=False)
class Drafting:
    """What drafts, along which tree, how deep each round, and which rule decides.

    `generate(..., drafting=...)` takes it, or the file that `jaxspec tune` wrote.

    Attributes:
        drafter: a registered name, or a drafter object, which brings its own tree.
        rule: a registered name, or a rule object.
        tree: the topology, or how to choose one every round; a number is a chain of that length. None: the drafter's
            default.
        schedule: a registered name, or a schedule object. None: all of the tree in every round; where it is copied
            from the text, only while that pays.
        draft: the draft model of the drafter "model"; None: that of the target's preset, if it has one.
        heads: the heads of the drafter "medusa", or where they are, see `load_heads`; None: those that come with the
            target's preset, if it has some.
        options: options of the drafter's own, by name, such as {"exit_layers": 10} of "early-exit".
        draft_params: parameters of a drafter object.
        measured: figures, which nothing reads.
    """

    drafter: str | Drafter = DRAFTER
    rule: str | Rule = "coupled"
    tree: Topology | Dynamic | int | None = None
    schedule: str | Schedule | None = None
    draft: Model | None = None
    heads: DraftHeads | str | os.PathLike | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    draft_params: Any = None
    measured: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        def brief(value: Any) -> str:
            if isinstance(value, (Topology, Dynamic)):
                return f"a tree of {value.shape.nodes} nodes, {value.shape.depth} deep"
            return repr(value) if value is None or isinstance(value, (str, int, dict)) else type(value).__name__

        given = {"tree": self.tree, "schedule": self.schedule, "draft": self.draft, "heads": self.heads}
        given |= {"rule": None if self.rule == "coupled" else self.rule, "options": self.options or None}
        parts = [brief(self.drafter), *(f"{name}={brief(value)}" for name, value in given.items() if value is not None)]
        return f"Drafting({', '.join(parts)})"

    def only_taken(self) -> Self:
        """Leaves out the draft model, the heads and the options that the drafter does not take."""
        takes = find("drafter", self.drafter).takes if isinstance(self.drafter, str) else frozenset()
        return dataclasses.replace(
            self,
            draft=self.draft if "draft" in takes else None,
            heads=self.heads if "heads" in takes else None,
            options={name: value for name, value in self.options.items() if name in takes},
        )

    def inputs(self, target: Model) -> DrafterInputs:
        """What the drafter is built from, by name; what it was not given comes from the target's preset.

        Raises:
            JaxspecError: something of it is not what it should be.
        """
        heads = self.heads
        if isinstance(heads, (str, os.PathLike)):
            heads = load_heads(heads, target=target)
        if self.draft is not None:
            need_model("draft", self.draft)
        if heads is not None:
            check_heads(heads)
        if clash := self.options.keys() & {field.name for field in dataclasses.fields(DrafterInputs)}:
            raise InvalidConfig(f"{min(clash)} is an argument of its own, and none of drafter_options")
        inputs = DrafterInputs(target, self.draft, as_topology(self.tree), heads, dict(self.options))
        return inputs if not isinstance(self.drafter, str) else with_companions(inputs, self.drafter)

    def member(self, target: Model) -> tuple[Drafter, Params]:
        """The drafter, by name or as an object, and its parameters.

        Raises:
            JaxspecError: it cannot be built from these models, or makes no use of something that was given.
        """
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            raise InvalidConfig(f"drafter_options must be a dict from names to values, got {shown(self.options)}")
        shared = {"draft": self.draft, "tree": self.tree, "heads": self.heads}
        given = {name for name, value in shared.items() if value is not None} | self.options.keys()
        drafter, draft_params = self.drafter, self.draft_params
        if isinstance(drafter, str):
            member = find("drafter", drafter)
            inputs = self.inputs(target)
            if unused := given - member.takes:
                raise InvalidConfig(f"the drafter {drafter!r} makes no use of {', '.join(sorted(unused))}")
            if draft_params is not None:
                raise InvalidConfig(f"draft_params are of a drafter object; the drafter {drafter!r} brings its own")
            if inputs.draft is not None and inputs.draft.tokenizer is not None and target.tokenizer is not None:
                check_same_vocab(target.tokenizer, inputs.draft.tokenizer)
            return member.build(inputs)
        if isinstance(drafter, type) or not isinstance(drafter, Drafter):
            raise InvalidConfig(f"drafter must be a registered name or a drafter object, got {shown(drafter)}")
        if given:
            raise InvalidConfig(f"{', '.join(sorted(given))} build a drafter by name; a drafter object has its own")
        if not all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in jax.tree.leaves(draft_params)):
            raise InvalidConfig(f"draft_params must be arrays, or a pytree of them, got {shown(draft_params)}")
        return drafter, draft_params

    def build(self, target: Model, **options: Any) -> tuple[Decoder, Weights]:
        """The decoder of these members for a target, and the weights of both models.

        Args:
            target: the model that decides.
            **options: of `Decoder`.

        Raises:
            JaxspecError: members that do not fit one another, or the target.
        """
        drafter, draft_params = self.member(target)
        rule, schedule = self.rule, self.schedule
        if isinstance(rule, str):
            rule = find("rule", rule)()
        elif isinstance(rule, type) or not isinstance(rule, Rule):
            raise InvalidConfig(f"rule must be a registered name or a rule object, got {shown(rule)}")
        if schedule is None:
            copies = drafter.shape.depth > 0 and not drafter.draws
            schedule = default_lookup_schedule(drafter.shape.nodes, cost_per_node(target)) if copies else Constant()
        elif isinstance(schedule, str):
            schedule = find("schedule", schedule)()
        elif isinstance(schedule, type) or not isinstance(schedule, Schedule):
            raise InvalidConfig(f"schedule must be a registered name or a schedule object, got {shown(schedule)}")
        return Decoder(target.lm, drafter, rule, schedule, **options), Weights(target.params, draft_params)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the file of a drafter by name, with a tree of one shape and a registered schedule.

        Models, heads and the rule are not written: they are given again beside the file.

        Raises:
            InvalidConfig: an object that has no registered name, or no tree.
        """
        place = check_path(path, "the file of jaxspec tune")
        names = {find("schedule", name): name for name in SCHEDULES}
        tree = as_topology(self.tree)
        if not isinstance(self.drafter, str) or not isinstance(tree, Topology) or type(self.schedule) not in names:
            raise InvalidConfig(
                f"{self} cannot be written; give a drafter by name, a static tree, a registered schedule"
            )
        schedule: Any = self.schedule
        record = {
            "version": VERSION,
            "drafter": self.drafter,
            "tree": tree.parents,
            "options": dict(self.options),
            "schedule": {"name": names[type(schedule)], **dataclasses.asdict(schedule)},
            "measured": dict(self.measured),
        }
        place.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Drafting":
        """Reads a file.

        Raises:
            TuningError: it is none, of another version, or does not say what it should; naming the file.
        """
        record = read_json(check_path(path, "the file of jaxspec tune"), TuningError)
        try:
            return cls._parse(record)
        except JaxspecError as error:
            raise TuningError(f"{path}: {error}") from None

    @classmethod
    def _parse(cls, record: dict[str, Any]) -> "Drafting":
        if type(got := record.get("version")) is not int or not 1 <= got <= VERSION:
            raise TuningError(f"expected version {VERSION} of what 'jaxspec tune' writes, got {got!r:.40}; tune again")
        fields = _FIELDS if got > 1 else _FIELDS - {"options"} | {"exit_layers"}
        if record.keys() != fields:
            odd = sorted(map(str, record.keys() ^ fields))
            raise TuningError(f"expected the fields {', '.join(sorted(fields))}; missing or unknown: {odd[0]:.40}")
        if got == 1:  # when the one option that there was had a field of its own
            layers = record["exit_layers"]
            record = record | {"options": {} if layers is None else {"exit_layers": layers}}
        drafter, parents, options, given = (record[name] for name in ("drafter", "tree", "options", "schedule"))
        if not isinstance(drafter, str):
            raise TuningError(f"drafter must be a name, got {drafter!r:.40}")
        takes = find("drafter", drafter).takes
        if not isinstance(options, dict):
            raise TuningError(f"options must be an object, got {options!r:.40}")
        if unknown := options.keys() - takes:
            raise TuningError(f"the drafter {drafter!r} has no option {min(unknown)!r:.40}")
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            raise TuningError(f"schedule must be an object with a name, got {given!r:.40}")
        if not isinstance(record["measured"], dict):
            raise TuningError(f"measured must be an object, got {record['measured']!r:.40}")
        member = find("schedule", given["name"])
        names: dict[str, str] = _ADAPTIVE_BEFORE_3 if got < 3 and given["name"] == "adaptive" else {}
        settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k != "name"}
        settings = {names.get(name, name): value for name, value in settings.items()}
        if unknown := settings.keys() - {field.name for field in dataclasses.fields(member)}:
            raise TuningError(f"the schedule {given['name']!r} has no {min(unknown)!r}")
        try:
            schedule = member(**settings)
        except (TypeError, OverflowError) as error:  # a text where a number should be, or too large a number
            raise TuningError(f"the schedule {given['name']!r}: {error}") from None
        return cls(drafter, tree=read_parents(parents), schedule=schedule, options=options, measured=record["measured"])


def as_drafting(given: Any, keywords: Drafting) -> Drafting:
    """What the keywords of a call say; or, where `drafting=` is given, that object or file, with their models and rule.

    Raises:
        InvalidConfig: `drafting=` is neither, or keywords beside it also say how to draft.
    """
    if given is None:
        return keywords
    own = any(value is not None for value in (keywords.tree, keywords.schedule, keywords.draft_params))
    if own or keywords.options != {} or not isinstance(keywords.drafter, str) or keywords.drafter != DRAFTER:
        raise InvalidConfig("drafting= says how to draft; give it without drafter, drafter_options, tree or schedule")
    if isinstance(given, (str, os.PathLike)):
        given = Drafting.load(given)
    if not isinstance(given, Drafting):
        raise InvalidConfig(f"drafting must be a jaxspec.Drafting or the path of a file, got {shown(given)}")
    rule = given.rule if isinstance(keywords.rule, str) and keywords.rule == "coupled" else keywords.rule
    draft = given.draft if keywords.draft is None else keywords.draft
    heads = given.heads if keywords.heads is None else keywords.heads
    return dataclasses.replace(given, rule=rule, draft=draft, heads=heads)


def cost_per_node(target: Model) -> float:
    """Returns the assumed cost of one drafted token in a target call, in units of a call with one token."""
    quantized = any(getattr(leaf, "dtype", None) == np.int8 for leaf in jax.tree.leaves(target.params))
    return INT8_NODE_COST if quantized and jax.default_backend() == "cpu" else NODE_COST


def default_lookup_schedule(nodes: int, node_cost: float = NODE_COST) -> Adaptive:
    """Returns the default schedule of prompt lookup, which drafts only while drafting pays.

    A round reads either one token or a whole window. The prior acceptance is high, since copied text is mostly right,
    and the loss budget allows two rejected windows before the first accepted one.

    Args:
        nodes: tokens of a whole window.
        node_cost: cost of each of its tokens but the first, in units of a call with one token.
    """
    more = node_cost * (nodes - 1)
    return Adaptive(
        costs=(1.0, 1 + more, 1 + more),
        prior_acceptance=0.9,
        loss_budget=max(Adaptive.loss_budget, 2 * more),
        widths=(),
    )
