"""Speculative decoding in JAX, compiled to one XLA program.

`load` a model and `generate` text: the same key gives the same text with any drafter, or without one. The public names
are imported on first use, so that `import jaxspec` is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxspec.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxspec.analysis.watermark import detect_watermark as detect_watermark
    from jaxspec.api import generate as generate
    from jaxspec.api import stream as stream
    from jaxspec.checkpoints.hf_write import export_model as export_model
    from jaxspec.checkpoints.load import load as load
    from jaxspec.checkpoints.saved import save as save
    from jaxspec.core.automaton import ByteAutomaton as ByteAutomaton
    from jaxspec.core.automaton import TokenAutomaton as TokenAutomaton
    from jaxspec.core.bias import LogitBias as LogitBias
    from jaxspec.core.cache import append_to_cache as append_to_cache
    from jaxspec.core.cache import empty_cache as empty_cache
    from jaxspec.core.drafter import DrafterInputs as DrafterInputs
    from jaxspec.core.mesh import make_mesh as make_mesh
    from jaxspec.core.networks import HeadTarget as HeadTarget
    from jaxspec.core.networks import LanguageModel as LanguageModel
    from jaxspec.core.records import KV as KV
    from jaxspec.core.records import Cache as Cache
    from jaxspec.core.records import Status as Status
    from jaxspec.core.records import Window as Window
    from jaxspec.core.sampling import Sampling as Sampling
    from jaxspec.core.topology import Dynamic as Dynamic
    from jaxspec.core.topology import Topology as Topology
    from jaxspec.core.topology import branching as branching
    from jaxspec.core.topology import chain as chain
    from jaxspec.core.topology import dynamic as dynamic
    from jaxspec.core.topology import from_paths as from_paths
    from jaxspec.core.tree_search import best_tree as best_tree
    from jaxspec.core.tree_search import expected_tokens as expected_tokens
    from jaxspec.core.tree_search import fastest_tree as fastest_tree
    from jaxspec.core.tree_spec import named_tree as named_tree
    from jaxspec.decode.loop import Decoder as Decoder
    from jaxspec.decode.session import Session as Session
    from jaxspec.decode.state import Request as Request
    from jaxspec.decode.state import Result as Result
    from jaxspec.decode.state import Weights as Weights
    from jaxspec.decode.stats import Stats as Stats
    from jaxspec.errors import JaxspecError as JaxspecError
    from jaxspec.generation.drafting import Drafting as Drafting
    from jaxspec.generation.history import History as History
    from jaxspec.generation.output import Chunk as Chunk
    from jaxspec.generation.output import Generation as Generation
    from jaxspec.generation.output import Output as Output
    from jaxspec.generation.precompile import precompile as precompile
    from jaxspec.generation.rollout import Rollout as Rollout
    from jaxspec.generation.rollout import log_probs as log_probs
    from jaxspec.generation.rollout import rollout as rollout
    from jaxspec.grammar.compilation import compile_grammar as compile_grammar
    from jaxspec.heads.dflash_config import DFlashConfig as DFlashConfig
    from jaxspec.heads.eagle_config import EagleConfig as EagleConfig
    from jaxspec.heads.export import export_heads as export_heads
    from jaxspec.heads.files import load_heads as load_heads
    from jaxspec.heads.files import save_heads as save_heads
    from jaxspec.heads.medusa_config import HeadsConfig as HeadsConfig
    from jaxspec.heads.network import DraftHeads as DraftHeads
    from jaxspec.models.attention import attend as attend
    from jaxspec.models.functional import FunctionLM as FunctionLM
    from jaxspec.models.functional import from_flax as from_flax
    from jaxspec.models.model import Model as Model
    from jaxspec.models.sharding import shard as shard
    from jaxspec.processors.budget import ThinkingBudget as ThinkingBudget
    from jaxspec.processors.grammar import Grammar as Grammar
    from jaxspec.processors.masks import AllowedTokens as AllowedTokens
    from jaxspec.processors.masks import SuppressTokens as SuppressTokens
    from jaxspec.processors.minimum import MinNewTokens as MinNewTokens
    from jaxspec.processors.penalties import FrequencyPenalty as FrequencyPenalty
    from jaxspec.processors.penalties import PresencePenalty as PresencePenalty
    from jaxspec.processors.penalties import RepetitionPenalty as RepetitionPenalty
    from jaxspec.processors.watermark import Watermark as Watermark
    from jaxspec.processors.words import BadWords as BadWords
    from jaxspec.processors.words import NoRepeatNgram as NoRepeatNgram
    from jaxspec.train.dflash_settings import DFlashSettings as DFlashSettings
    from jaxspec.train.dflash_settings import DSparkSettings as DSparkSettings
    from jaxspec.train.dflash_settings import JetSpecSettings as JetSpecSettings
    from jaxspec.train.eagle_settings import Eagle1Settings as Eagle1Settings
    from jaxspec.train.eagle_settings import Eagle3Settings as Eagle3Settings
    from jaxspec.train.medusa_settings import MedusaSettings as MedusaSettings
    from jaxspec.train.online import OnlineHeads as OnlineHeads
    from jaxspec.train.pard_settings import PardSettings as PardSettings
    from jaxspec.train.run import train_heads as train_heads
    from jaxspec.tuning.tune import tune as tune

_MODULES = {
    "jaxspec.analysis.watermark": ("detect_watermark",),
    "jaxspec.api": ("generate", "stream"),
    "jaxspec.core.bias": ("LogitBias",),
    "jaxspec.core.tree_search": ("best_tree", "expected_tokens", "fastest_tree"),
    "jaxspec.core.cache": ("append_to_cache", "empty_cache"),
    "jaxspec.core.mesh": ("make_mesh",),
    "jaxspec.core.tree_spec": ("named_tree",),
    "jaxspec.core.networks": ("HeadTarget", "LanguageModel"),
    "jaxspec.core.drafter": ("DrafterInputs",),
    "jaxspec.core.records": ("Cache", "KV", "Status", "Window"),
    "jaxspec.core.sampling": ("Sampling",),
    "jaxspec.core.topology": ("Dynamic", "Topology", "branching", "chain", "dynamic", "from_paths"),
    "jaxspec.decode.loop": ("Decoder",),
    "jaxspec.decode.session": ("Session",),
    "jaxspec.decode.state": ("Request", "Result", "Weights"),
    "jaxspec.decode.stats": ("Stats",),
    "jaxspec.errors": ("JaxspecError",),
    "jaxspec.models.attention": ("attend",),
    "jaxspec.models.functional": ("FunctionLM", "from_flax"),
    "jaxspec.heads.export": ("export_heads",),
    "jaxspec.heads.files": ("load_heads", "save_heads"),
    "jaxspec.heads.dflash_config": ("DFlashConfig",),
    "jaxspec.heads.eagle_config": ("EagleConfig",),
    "jaxspec.heads.medusa_config": ("HeadsConfig",),
    "jaxspec.heads.network": ("DraftHeads",),
    "jaxspec.models.model": ("Model",),
    "jaxspec.checkpoints.hf_write": ("export_model",),
    "jaxspec.checkpoints.load": ("load",),
    "jaxspec.checkpoints.saved": ("save",),
    "jaxspec.models.sharding": ("shard",),
    "jaxspec.generation.output": ("Chunk", "Generation", "Output"),
    "jaxspec.generation.drafting": ("Drafting",),
    "jaxspec.generation.history": ("History",),
    "jaxspec.generation.precompile": ("precompile",),
    "jaxspec.generation.rollout": ("Rollout", "log_probs", "rollout"),
    "jaxspec.processors.budget": ("ThinkingBudget",),
    "jaxspec.processors.masks": ("AllowedTokens", "SuppressTokens"),
    "jaxspec.core.automaton": ("ByteAutomaton", "TokenAutomaton"),
    "jaxspec.grammar.compilation": ("compile_grammar",),
    "jaxspec.processors.grammar": ("Grammar",),
    "jaxspec.processors.minimum": ("MinNewTokens",),
    "jaxspec.processors.penalties": ("FrequencyPenalty", "PresencePenalty", "RepetitionPenalty"),
    "jaxspec.processors.watermark": ("Watermark",),
    "jaxspec.processors.words": ("BadWords", "NoRepeatNgram"),
    "jaxspec.train.dflash_settings": ("DFlashSettings", "DSparkSettings", "JetSpecSettings"),
    "jaxspec.train.eagle_settings": ("Eagle1Settings", "Eagle3Settings"),
    "jaxspec.train.medusa_settings": ("MedusaSettings",),
    "jaxspec.train.online": ("OnlineHeads",),
    "jaxspec.train.pard_settings": ("PardSettings",),
    "jaxspec.train.run": ("train_heads",),
    "jaxspec.tuning.tune": ("tune",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *(name for names in _MODULES.values() for name in names)])
