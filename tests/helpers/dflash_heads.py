"""Tiny random DFlash, DSpark and JetSpec heads, as z-lab, DeepSpec, speculators and JetSpec write them."""

from typing import Any

import numpy as np

from helpers.families import random_tensor
from helpers.head_files import File

V, E, F, LAYERS, RANK, BLOCK, MASK = 48, 32, 40, 2, 6, 4, 47
IDS = np.sort(np.random.default_rng(0).choice(np.arange(1, V), 20, False))
"""A reduced vocabulary."""
LAYER: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": V, "hidden_size": E, "intermediate_size": F, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1000000.0, "attention_bias": False,
    "tie_word_embeddings": False,
}  # fmt: skip


def tensors(taps: int = 3, rows: int = V, markov: str | None = None, confidence: int = 0, own: bool = False) -> dict:
    """The tensors of a head; `confidence` is the width that its confidence head reads, `own` whether it has tables."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (E, taps * E), "hidden_norm.weight": (E,), "norm.weight": (E,)}
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        shapes |= {f"{at}{norm}.weight": (E,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}self_attn.{name}_norm.weight": (8,) for name in "qk"}
        shapes |= {f"{at}self_attn.{name}_proj.weight": (size, E) for name, size in (("q", 32), ("k", 16), ("v", 16))}
        shapes |= {f"{at}self_attn.o_proj.weight": (E, 32), f"{at}mlp.gate_proj.weight": (F, E)}
        shapes |= {f"{at}mlp.up_proj.weight": (F, E), f"{at}mlp.down_proj.weight": (E, F)}
    if own:
        shapes |= {"embed_tokens.weight": (V, E), "lm_head.weight": (rows, E)}
    if markov:
        shapes |= {"markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (rows, RANK)}
    if markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, E + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if markov == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + E),
            "markov_head.joint_proj.bias": (3 * RANK,),
        }
    if confidence:
        shapes |= {"confidence_head.proj.weight": (1, confidence), "confidence_head.proj.bias": (1,)}
    return {key: random_tensor("dflash", key, list(shape)) for key, shape in shapes.items()}


def zlab(**switches: Any) -> File:
    """A head as z-lab's DFlash writes it."""
    own = {"mask_token_id": MASK, "target_layer_ids": [1, 4, 8], **switches}
    told = {"architectures": ["DFlashDraftModel"], "block_size": BLOCK, "num_target_layers": 12, "dflash_config": own}
    return File("dflash", tensors(), {**LAYER, **told, "layer_types": ["full_attention"] * LAYERS})


def second(**switches: Any) -> File:
    """A DFlash 2 head as z-lab writes it."""
    shapes: dict[str, tuple[int, ...]] = {"candidate_selector.hidden_projection.weight": (RANK, E)}
    shapes |= {f"candidate_selector.{name}_codebook": (V, RANK) for name in ("predecessor", "successor")}
    for layer in range(LAYERS):
        for part in ("attention", "mlp"):
            at = f"layers.{layer}.{part}_conv."
            shapes |= {f"{at}base_kernel": (2, 2, E), f"{at}kernel_projection.weight": (4 * E // 8, E)}
    sizes = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": RANK, "selector_top_k": 5}
    file = zlab(**{"block_size": BLOCK} | sizes | switches)
    more = {key: random_tensor("dflash", key, list(shape)) for key, shape in shapes.items()}
    return file.changed(more, {"block_size": None, "architectures": ["DFlash2DraftModel"]})


def deepspec(markov: str | None = None, confidence: int = 0) -> File:
    """A head as DeepSpec writes it."""
    told: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "mask_token_id": MASK, "num_anchors": 512,
        "target_layer_ids": [1, 4, 8], "markov_rank": RANK if markov else 0, "num_target_layers": 12,
        "enable_confidence_head": confidence > 0, "layer_types": ["full_attention"] * LAYERS,
    }  # fmt: skip
    told |= {"markov_head_type": markov} if markov else {}
    told |= {"confidence_head_with_markov": confidence > E} if confidence else {}
    return File("deepspec", tensors(3, V, markov, confidence, own=True), {**LAYER, **told})


def speculators(markov: str | None = None, confidence: int = 0, reduced: bool = True, **switches: Any) -> File:
    """A head as speculators writes it."""
    kind = "dspark" if markov else "dflash"
    rows = len(IDS) if reduced else V
    layer = {**LAYER, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    told: dict[str, Any] = {
        "speculators_model_type": kind, "transformer_layer_config": layer, "draft_vocab_size": rows,
        "block_size": BLOCK, "target_hidden_size": None, "aux_hidden_state_layer_ids": [2, 5, 9],
        "mask_token_id": MASK, "sample_from_anchor": kind == "dspark", "sliding_window_non_causal": False,
    }  # fmt: skip
    if markov:
        told |= {"markov_rank": RANK, "markov_head_type": markov, "enable_confidence_head": confidence > 0,
                 "confidence_head_with_markov": confidence > E}  # fmt: skip
    held = tensors(3, rows, markov, confidence, own=True)
    if reduced:
        held |= {"d2t": IDS - np.arange(len(IDS)), "t2d": np.isin(np.arange(V), IDS)}
    return File("dflash-speculators", held, told | switches)


FILES = {
    "z-lab": zlab(),
    "z-lab, causal": zlab(causal=True),
    "z-lab, sliding": zlab(causal=False).changed(
        told={"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 16}
    ),
    "z-lab, DFlash 2": second(),
    "JetSpec": zlab(causal_head=True),
    "JetSpec, shifted": zlab(causal_head=True, draft_shift=True),
    "DeepSpec's DFlash": deepspec(),
    "DSpark": deepspec("vanilla", E + RANK),
    "DSpark, gated": deepspec("gated", E),
    "DSpark, rnn": deepspec("rnn"),
    "speculators": speculators(),
    "speculators, DSpark": speculators("vanilla", E + RANK, sliding_window_non_causal=True),
    "speculators, whole vocabulary": speculators("rnn", E, reduced=False, sample_from_anchor=False),
}
