"""`Drafting`: the settings of drafting as keywords, command-line options, methods of a benchmark and tuned files."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.core.descriptions import inherit_descriptions
from jaxspec.core.drafter import Drafter, DrafterInputs, require_drafter
from jaxspec.core.records import Params
from jaxspec.core.rule import Rule
from jaxspec.core.sampling import MIN_TEMPERATURE, Sampling
from jaxspec.core.schedule import Constant, Schedule
from jaxspec.core.theory import ExpertReads, assumed_cost
from jaxspec.core.topology import Dynamic, Topology, as_topology, chain
from jaxspec.core.tree import TreeShape
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.errors import InvalidConfig, JaxspecError, TuningError, shown
from jaxspec.generation import drafting_file
from jaxspec.generation.inputs import check_model
from jaxspec.generation.members import check_round, check_together, make_rule, make_schedule
from jaxspec.heads.companions import with_companions
from jaxspec.heads.files import load_heads
from jaxspec.heads.network import DraftHeads, check_heads
from jaxspec.kernels.library import token_cost
from jaxspec.models.columns import gather
from jaxspec.models.experts import count_reads
from jaxspec.models.model import Model
from jaxspec.models.sharding import follow_platform
from jaxspec.registry import AUTO_DRAFTER, DRAFTER, FASTEST, drafter_takes, find, locate
from jaxspec.schedules.adaptive import Adaptive
from jaxspec.schedules.best_width import BestWidth
from jaxspec.storage.reading import check_path, read_json_file
from jaxspec.storage.writing import write_whole


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DraftingOptions:
    """The options of drafting and verification, which `Drafting` and `generate` have in common.

    Attributes:
        drafter: name of a registered drafter, or a drafter object, which brings its own tree. "auto" for the fastest
            drafter that the target has, which is measured once on this machine; see docs/drafters.md.
        rule: name of a registered rule, or a rule object.
        tree: topology of the draft tree, or `jaxspec.dynamic()` for a tree that is chosen in every round; a number is
            the length of a chain. None for the drafter's default.
        schedule: name of a registered schedule, or a schedule object, which limits the draft of each round. None for
            the whole tree in every round; for drafts that are copied from the text (prompt lookup), only what pays
            ("best-width", with the costs of this processor).
        draft: draft model of the drafter "model", of any vocabulary, or "pard"; None for the draft model of the
            target's preset.
        heads: draft heads of "medusa", "eagle" or "dflash", or their location, see `load_heads`; None for the heads of
            the target's preset, if any.
        drafter_options: options of the drafter, by name, such as {"exit_layers": 10} for "early-exit".
        draft_params: parameters of a drafter object.
    """

    drafter: str | Drafter = DRAFTER
    rule: str | Rule = "coupled"
    tree: Topology | Dynamic | int | None = None
    schedule: str | Schedule | None = None
    draft: Model | None = None
    heads: DraftHeads | str | os.PathLike | None = None
    drafter_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    draft_params: Any = None


@inherit_descriptions
@dataclasses.dataclass(frozen=True, repr=False)
class Drafting(DraftingOptions):
    """A drafter with its tree, schedule and options, and the rule that verifies its drafts.

    Pass it to `generate(..., drafting=...)`, or the path of a file that `jaxspec tune` wrote. The drafter may be
    passed by position.

    Attributes:
        measured: measurements of `jaxspec tune`, for information only.
    """

    drafter: str | Drafter = DRAFTER
    measured: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False, kw_only=True)

    def __repr__(self) -> str:
        def brief(value: Any) -> str:
            if isinstance(value, (Topology, Dynamic)):
                return f"a tree of {value.shape.nodes} nodes, {value.shape.depth} deep"
            return repr(value) if value is None or isinstance(value, (str, int, dict)) else type(value).__name__

        fields = {"tree": self.tree, "schedule": self.schedule, "draft": self.draft, "heads": self.heads}
        fields |= {"rule": None if self.rule == "coupled" else self.rule}
        fields |= {"drafter_options": self.drafter_options or None}
        parts = [f"{name}={brief(value)}" for name, value in fields.items() if value is not None]
        return f"Drafting({', '.join([brief(self.drafter), *parts])})"

    @property
    def is_auto(self) -> bool:
        """Whether the drafter is "auto", which stands for the fastest; see `resolve`."""
        return isinstance(self.drafter, str) and self.drafter == AUTO_DRAFTER

    def without_unused(self) -> Self:
        """Returns a copy without the draft model, the heads and the options that the drafter does not take."""
        takes = drafter_takes(self.drafter) if isinstance(self.drafter, str) else frozenset()
        return dataclasses.replace(
            self,
            draft=self.draft if "draft" in takes else None,
            heads=self.heads if "heads" in takes else None,
            drafter_options={name: value for name, value in self.drafter_options.items() if name in takes},
        )

    def resolve(
        self,
        target: Model,
        sampling: Sampling | None = None,
        rows: int = 1,
        mesh: Mesh | None = None,
        report: Callable[[str], Any] = lambda line: None,
    ) -> "Drafting":
        """Returns the drafting itself; or, if its drafter is "auto", the fastest of the target on this machine.

        The fastest is measured at the first call for a target, which takes a minute or more, and is kept in the cache
        directory for later processes; see `jaxspec.tuning.auto`.

        Args:
            target: the target model.
            sampling: the sampling settings, as numbers: whether texts are sampled decides what is measured. None for
                texts without sampling.
            rows: the number of texts that are decoded at once.
            mesh: the devices to decode on; None for the default device.
            report: called with a line of text before and after a measurement.

        Raises:
            InvalidConfig: the drafter is "auto", and the drafting has a tree, a schedule, options or parameters, which
                the measurement chooses.
            JaxspecError: nothing can be measured.
        """
        if not self.is_auto:
            return self
        self.check_auto()
        sampled = sampling is not None and bool(np.max(np.asarray(sampling.temperature)) >= MIN_TEMPERATURE)
        return locate(FASTEST)(target, self, sampled=sampled, rows=rows, mesh=mesh, report=report)

    def check_auto(self) -> None:
        """Checks a drafting with the drafter "auto".

        Raises:
            InvalidConfig: the drafting has a tree, a schedule, options or parameters.
        """
        given = {"tree": self.tree, "schedule": self.schedule, "draft_params": self.draft_params}
        given["drafter_options"] = self.drafter_options or None
        if chosen := [name for name, value in given.items() if value is not None]:
            raise InvalidConfig(
                f"the drafter {AUTO_DRAFTER!r} cannot be combined with {', '.join(chosen)}, because it chooses them; "
                "leave them out, or name a drafter"
            )

    def inputs(self, target: Model) -> DrafterInputs:
        """Returns the inputs of a registered drafter, with draft model and heads of the target's preset as defaults.

        Raises:
            JaxspecError: an input is invalid.
        """
        heads = self.heads
        if isinstance(heads, (str, os.PathLike)):
            heads = load_heads(heads, target=target)
        draft = self.draft
        if draft is not None:
            check_model("draft", draft)
            lm, params = gather(draft.lm, draft.params)  # every device holds the whole draft model
            draft = draft if lm is draft.lm else dataclasses.replace(draft, lm=lm, params=params)
        if heads is not None:
            check_heads(heads)
        if clash := self.drafter_options.keys() & {field.name for field in dataclasses.fields(DrafterInputs)}:
            raise InvalidConfig(f"{min(clash)} is an argument of its own; pass it there, and not in drafter_options")
        inputs = DrafterInputs(target, draft, as_topology(self.tree), heads, dict(self.drafter_options))
        inputs = inputs if not isinstance(self.drafter, str) else with_companions(inputs, self.drafter)
        draft = None if inputs.draft is None else follow_platform(inputs.draft, target)
        return dataclasses.replace(inputs, draft=draft)

    def build_drafter(self, target: Model) -> tuple[Drafter, Params]:
        """Returns the drafter and its parameters.

        Raises:
            JaxspecError: the drafter cannot be built for this target, or does not take one of the inputs.
        """
        if self.is_auto:
            return self.resolve(target).build_drafter(target)
        options = self.drafter_options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise InvalidConfig(f"drafter_options must be a dict from names to values, got {shown(options)}")
        shared = {"draft": self.draft, "tree": self.tree, "heads": self.heads}
        specified = {name for name, value in shared.items() if value is not None} | options.keys()
        drafter, draft_params = self.drafter, self.draft_params
        if isinstance(drafter, str):
            member = find("drafter", drafter)
            inputs = self.inputs(target)
            if unused := specified - member.takes:
                raise InvalidConfig(f"the drafter {drafter!r} does not take {', '.join(sorted(unused))}; leave it out")
            if draft_params is not None:
                raise InvalidConfig(
                    f"draft_params is only for drafter objects; the drafter {drafter!r} has its own parameters"
                )
            return member.build(inputs)
        require_drafter(drafter)
        if specified:
            names = ", ".join(sorted(specified))
            raise InvalidConfig(
                f"a drafter object cannot be combined with {names}; pass the drafter by name, or leave these out"
            )
        if not all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in jax.tree.leaves(draft_params)):
            raise InvalidConfig(f"draft_params must be a pytree of arrays, got {shown(draft_params)}")
        return drafter, draft_params

    def build(self, target: Model, **options: Any) -> tuple[Decoder, Weights]:
        """Builds the decoder for a target, and the parameters of target and drafter.

        Args:
            target: the target model.
            **options: further arguments of `Decoder`.

        Raises:
            JaxspecError: drafter, rule, schedule and target do not fit together.
        """
        if self.is_auto:
            return self.resolve(target).build(target, **options)
        drafter, draft_params = self.build_drafter(target)
        rule, schedule = make_rule(self.rule), self.schedule
        if isinstance(self.drafter, str) and self.tree is None and not _takes(rule, drafter.shape):
            fallback = dataclasses.replace(self, tree=chain(drafter.shape.depth))  # a rule for chains gets a chain
            drafter, draft_params = fallback.build_drafter(target)
        if schedule is None:
            schedule = default_schedule(drafter, target.params, count_reads(target.lm, target.params))
        elif isinstance(schedule, str) and schedule == "best-width":
            schedule = BestWidth(cpu=token_cost(target.params), experts=count_reads(target.lm, target.params))
        schedule = make_schedule(schedule)
        decoder = Decoder(target.lm, drafter, rule, schedule, **options)
        weights = Weights(target.params, draft_params)
        check_together(rule, drafter, target.lm.vocab)
        check_round(decoder, weights)
        return decoder, weights

    def save(self, path: str | os.PathLike) -> None:
        """Writes a file. The drafter must be a name, a tree must be static, and a schedule must be registered.

        Models, heads and the rule are not saved; pass them together with the file.

        Raises:
            InvalidConfig: drafter or schedule is an object without a registered name, or the tree is not static.
            StorageError: the file cannot be written.
        """
        file = check_path(path, "the file of jaxspec tune")
        record = drafting_file.describe(
            self.drafter, as_topology(self.tree), self.schedule, self.drafter_options, self.measured
        )
        text = json.dumps(record, indent=1, allow_nan=False) + "\n"
        write_whole(file, lambda opened: opened.write(text.encode()))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Drafting":
        """Reads a file.

        Raises:
            TuningError: the file is malformed or of an unsupported version; the message names the file.
        """
        record = read_json_file(check_path(path, "the file of jaxspec tune"), TuningError)
        try:
            return cls(**drafting_file.parse(record))
        except JaxspecError as error:
            raise TuningError(f"{path}: {error}") from None


def _takes(rule: Rule, shape: TreeShape) -> bool:
    """Returns whether a rule supports trees of this shape."""
    try:
        rule.check(shape)
    except InvalidConfig:
        return False
    return True


def default_schedule(drafter: Drafter, target: Params, experts: ExpertReads | None = None) -> Schedule:
    """Returns the default schedule of a drafter, for a target with these parameters.

    A drafter that asks how many of its best nodes to propose drafts the most profitable number of nodes. Any other
    drafter that draws its tokens always drafts its whole tree. All other drafters copy tokens: they draft a few tokens
    at first, and a whole window after accepted tokens. Their loss budget allows at least two rejected whole windows.

    In a target with mixtures of experts, each token of a window reads experts of its own. A drafter that draws a chain
    of tokens then drafts as deep as its accepted tokens pay for.

    Args:
        drafter: the drafter.
        target: the parameters of the target.
        experts: what a call of the target reads, if it has mixtures of experts.
    """
    nodes, tokens = drafter.shape.nodes, token_cost(target)
    if nodes > 1 and drafter.needs.node_count:
        return BestWidth(cpu=tokens, experts=experts)
    is_chain = drafter.shape.depth == nodes - 1
    if nodes == 1 or (drafter.draws and not (experts is not None and is_chain)):
        return Constant()
    widths = tuple(width for width in BestWidth.widths if 1 < width < nodes)
    compiled = [next(width for width in (*widths, nodes) if width > depth) for depth in range(1, nodes)]
    costs = (1.0, *(assumed_cost(width, tokens, 1, experts) for width in compiled))
    return Adaptive(costs=costs, loss_budget=max(Adaptive.loss_budget, 2 * (costs[-1] - 1)), widths=widths)
