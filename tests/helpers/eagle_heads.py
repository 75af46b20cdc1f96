"""Tiny random EAGLE heads, which follow from a name; shared with `scripts/golden/make_eagle.py`."""

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from helpers.families import random_tensor

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "pad_token_id": None,
    "pretraining_tp": 1,
}
"""The entries of config.json."""
LENGTHS = (9, 13)
"""Tokens of the text in the first round and in the second, the root included."""
TREES = ((2, 3, 8), (3, 2, 10), (1, 4, 9), (4, 4, 26), (0, 3, 3))
"""Depth, width and size, in the numbers of EAGLE's code: it counts one level less."""


@dataclasses.dataclass(frozen=True)
class EagleCase:
    """A head: its version, and what its config.json has beside `SIZES`."""

    version: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def entries(self) -> dict[str, Any]:
        """The content of config.json."""
        return {**SIZES, **self.settings}


CASES = {
    "eagle1": EagleCase(1, {"bias": True}),
    "eagle1, two layers": EagleCase(1, {"bias": False, "num_hidden_layers": 2, "rope_theta": 500000.0}),
    "eagle1, qkv bias": EagleCase(1, {"bias": True, "qkv_bias": True, "num_key_value_heads": 4}),
    "eagle3": EagleCase(3, {"draft_vocab_size": 20}),
    "eagle3, whole vocabulary": EagleCase(3, {"draft_vocab_size": 48, "rope_theta": 1000000.0}),
}


def reference_shapes(case: EagleCase) -> dict[str, tuple[int, ...]]:
    """The tensors of the reference's file, and the target's projection; without the maps of a reduced vocabulary."""
    sizes = case.entries
    e, f, width = sizes["hidden_size"], sizes["intermediate_size"], sizes["hidden_size"] // sizes["num_attention_heads"]
    queries, keys = sizes["num_attention_heads"] * width, sizes["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (e, 2 * e if case.version == 1 else 3 * e)}
    if case.version == 1 and case.settings.get("bias", True):
        shapes["fc.bias"] = (e,)
    for layer in range(sizes["num_hidden_layers"]):
        at, reads = (f"layers.{layer}.", e) if case.version == 1 else ("midlayer.", 2 * e)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, reads)
            if case.settings.get("qkv_bias"):
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        shapes |= {f"{at}self_attn.o_proj.weight": (e, queries), f"{at}mlp.gate_proj.weight": (f, e)}
        shapes |= {f"{at}mlp.up_proj.weight": (f, e), f"{at}mlp.down_proj.weight": (e, f)}
        norms = ["post_attention_layernorm"] + ["input_layernorm"] * (layer > 0)
        norms = norms if case.version == 1 else ["post_attention_layernorm", "input_layernorm", "hidden_norm"]
        shapes |= {f"{at}{norm}.weight": (e,) for norm in norms}
    if case.version == 3:
        shapes |= {"norm.weight": (e,), "lm_head.weight": (sizes["draft_vocab_size"], e)}
    v = sizes["vocab_size"]
    return shapes | {"embed_tokens.weight": (v, e), "target.lm_head.weight": (v, e)}


def parameters(name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The tensors of a case, float32."""
    return {key: random_tensor(name, key, list(shape)) for key, shape in shapes.items()}


def drafted_ids(case: EagleCase) -> np.ndarray:
    """The ids that are drafted, ascending: all, or some of those after the first."""
    v, count = case.entries["vocab_size"], case.entries["draft_vocab_size"]
    return np.arange(v) if count == v else np.sort(np.random.default_rng(0).choice(np.arange(1, v), count, False))


def inputs(name: str, case: EagleCase) -> tuple[np.ndarray, np.ndarray]:
    """The states of the target `[1, T - 1, *]` that a head reads, and its text `[1, T]`."""
    width = SIZES["hidden_size"] * case.version
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    states = rng.standard_normal((1, max(LENGTHS) - 1, width)).astype(np.float32)
    return states, rng.integers(0, SIZES["vocab_size"], (1, max(LENGTHS)))


def write(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Writes the head of a case as the reference does."""
    case, shapes = CASES[name], reference_shapes(CASES[name])
    tensors = {key: value for key, value in parameters(name, shapes).items() if not key.startswith("target.")}
    if case.version == 3:
        v, ids = SIZES["vocab_size"], drafted_ids(case)
        tensors["d2t"] = (ids - np.arange(len(ids))).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(v), ids)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(case.entries))
    return folder


# Heads with every switch, for `scripts/golden/make_eagle_switches.py`.

STEPS = 3
"""Tokens that each head reads after each token of the text, the first with the target's state."""
LAYER: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SwitchCase:
    """A head: the settings of its layers of a kind, and its switches."""

    kind: str
    layer: Mapping[str, Any]
    switches: Mapping[str, Any]
    draft_vocab_size: int = 14


SWITCHES = {
    "plain": SwitchCase("llama", LAYER, {"norm_before_residual": False}),
    "3.1": SwitchCase("llama", LAYER, {"fc_norm": True, "norm_output": True}, 40),
    "one-norm-before": SwitchCase(
        "llama", {**LAYER, "rope_theta": 500000.0}, {"norm_before_fc": True, "norm_before_residual": True}
    ),
    "two-layers-of-Qwen3": SwitchCase(
        "qwen3",
        {**LAYER, "num_hidden_layers": 2, "attention_bias": True},
        {"norm_output": True, "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [3, 8]},
    ),
    "biases": SwitchCase("llama", {**LAYER, "attention_bias": True, "mlp_bias": True}, {"fc_norm": True}),
}


def drafted(vocab: int, count: int) -> np.ndarray:
    """The ids of a reduced vocabulary, ascending."""
    return np.sort(np.random.default_rng(1).choice(vocab, count, replace=False))


def switch_inputs(name: str, case: SwitchCase) -> tuple[np.ndarray, np.ndarray]:
    """The taps of the target `[1, T - 1, *]`, and the text `[1, T]`."""
    taps = len(case.switches.get("eagle_aux_hidden_state_layer_ids", range(3)))
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    states = rng.standard_normal((1, 9, taps * case.layer["hidden_size"])).astype(np.float32)
    return states, rng.integers(0, case.layer["vocab_size"], (1, 10))


def supervision(name: str, case: SwitchCase) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The target's features `[1, T, E]`, its projection `[V, E]`, and the tokens `[1, T]` that are trained on."""
    _, text = switch_inputs(name, case)
    rng = np.random.default_rng(zlib.crc32(f"{name}, supervision".encode()))
    e, size = case.layer["hidden_size"], text.shape[1]
    features, table = rng.standard_normal((1, size, e)), rng.standard_normal((case.layer["vocab_size"], e))
    return features.astype(np.float32), table.astype(np.float32), np.arange(size)[None] >= 4
