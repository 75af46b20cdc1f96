"""Compares the time of a training step of an EAGLE-3 head in jaxspec and in speculators, alternating in one process.

    pip install torch speculators==0.9.0
    python -m scripts.measure.compare_speculators_step [--rows 4] [--tokens 256] [--drafted 6144] [--record ID]

Both train the network of `compare_torch_step.py eagle3` from the same parameters, on the same random features in
float32: speculators' own model of the head, with its loss, and AdamW. Both compute the target's distributions in the
step. speculators packs the texts into one row, where jaxspec has one text per row. The first tokens of every text have
no loss, because speculators would compare them with guesses from the end of the text before. The losses of every step
must agree. speculators does not compile its model without a GPU, so `--compile` passes it to `torch.compile`.
"""

import argparse
import importlib.metadata
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.heads import eagle
from jaxspec.heads.network import init_params
from jaxspec.models.config import ModelConfig
from jaxspec.train.eagle import EagleTrainee
from jaxspec.train.eagle_settings import Eagle3Settings
from jaxspec.train.settings import TrainSettings
from scripts.measure.compare_torch_step import TAPS, jax_stepper, take_turns, torch_stepper

WITHOUT_LOSS = 8
"""The number of first tokens of each text without a loss: at least the steps of training-time test, and two."""


def sizes_of(args: argparse.Namespace) -> eagle.EagleConfig:
    """Returns the sizes of SmolLM2-135M's layers."""
    width = args.width
    decoder = ModelConfig(args.vocab, width, width * 8 // 3, 1, width // 64, width // 192, 64)
    return eagle.EagleConfig(decoder, taps=TAPS, fc_norm=True, norm_output=True)


def make_model(config: eagle.EagleConfig, params: dict[str, Any], table: np.ndarray, drafted: int) -> Any:
    """Returns speculators' model of the head, with these parameters."""
    from speculators.models.eagle3 import (  # pyright: ignore[reportMissingImports]
        Eagle3DraftModel,
        Eagle3SpeculatorConfig,
    )
    from transformers import LlamaConfig  # pyright: ignore[reportMissingImports]

    c = config.decoder
    layer = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=1,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim,
        rms_norm_eps=c.norm_eps, rope_theta=c.rope.theta, max_position_embeddings=c.max_position, pad_token_id=None,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=drafted, fc_norm=True, norm_output=True,
            eagle_aux_hidden_state_layer_ids=list(TAPS),
        )
    )  # fmt: skip
    own, heads = params["layers"][0], (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim)
    query, key, value = np.split(own["qkv"], [heads[0], sum(heads)], 1)
    gate, up = np.split(own["gate_up"], 2, 1)
    matrices = {
        "fc": params["fc"],
        "layers.0.self_attn.q_proj": query,
        "layers.0.self_attn.k_proj": key,
        "layers.0.self_attn.v_proj": value,
        "layers.0.self_attn.o_proj": own["out"],
        "layers.0.mlp.gate_proj": gate,
        "layers.0.mlp.up_proj": up,
        "layers.0.mlp.down_proj": own["down"],
    }
    vectors = {"layers.0.input_layernorm": own["attn_norm"], "layers.0.hidden_norm": params["hidden_norm"],
               "layers.0.post_attention_layernorm": own["mlp_norm"], "norm": params["norm"],
               "verifier_norm": np.ones(c.hidden_size), "embed_tokens": table, "lm_head": table[:drafted],
               "verifier_lm_head": table[:drafted]}  # fmt: skip
    vectors |= {f"fc_norm.{i}": params["fc_norms"][i] for i in range(len(TAPS))}
    weights = {name: np.transpose(array) for name, array in matrices.items()} | vectors
    known = dict(model.named_parameters())
    assert set(known) == {f"{name}.weight" for name in weights}, set(known) ^ {f"{name}.weight" for name in weights}
    with torch.no_grad():
        for name, array in weights.items():
            known[f"{name}.weight"].copy_(torch.from_numpy(np.array(array, np.float32)))
    return model.float()


def peer_stepper(
    model: Any, features: np.ndarray, tokens: np.ndarray, mask: np.ndarray, steps: int, settings: TrainSettings
):
    """Returns a function that takes a step in speculators and returns its loss."""
    from speculators.losses.eager import kl_div_loss  # pyright: ignore[reportMissingImports]

    (rows, size), width = tokens.shape, features.shape[-1] // (1 + len(TAPS))

    def pack(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array.reshape(1, rows * (size - 1), *array.shape[2:])))

    counted = np.pad(mask[:, 2:], ((0, 0), (0, 1)))  # the law after token i is that of token i + 1
    given = {
        "hidden_states": pack(features[:, :-1, width:]),
        "input_ids": pack(tokens[:, 1:].astype(np.int64)),
        "document_ids": pack(np.repeat(np.arange(rows)[:, None], size - 1, 1)),
        "loss_mask": pack(counted),
        "position_ids": pack(np.tile(np.arange(1, size), (rows, 1))),
        "verifier_last_hidden_states": pack(features[:, 1:, :width]),
    }
    options = {"ttt_steps": steps, "ttt_step_loss_decay": settings.decay, "loss_config": {"kl": (kl_div_loss, 1.0)}}

    def compute():
        yield model(**given, **options)[1]

    return torch_stepper([p for p in model.parameters() if p.requires_grad], compute, settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"rows": 4, "tokens": 256, "width": 576, "vocab": 49152, "drafted": 6144, "heads": 4, "repeats": 7}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", action="store_true", help="compile speculators' model with torch.compile")
    add_record(parser.add_argument)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    features = rng.normal(size=(args.rows, args.tokens, args.width * (1 + len(TAPS)))).astype(np.float32)
    target = features[..., : args.width]  # speculators normalizes these features: they already have this norm
    target /= np.sqrt(np.mean(target**2, -1, keepdims=True))
    table = (rng.normal(size=(args.vocab, args.width)) * args.width**-0.5).astype(np.float32)
    tokens = rng.integers(0, args.drafted, (args.rows, args.tokens)).astype(np.int32)
    mask = np.broadcast_to(np.arange(args.tokens) >= WITHOUT_LOSS, tokens.shape)
    config = sizes_of(args)
    settings = Eagle3Settings(depth=args.heads, warmup=0, steps=10**6, batch=args.rows, loss="kl", learning_rate=1e-3)
    params = init_params(config, key=jax.random.key(0))
    model = make_model(config, jax.tree.map(np.asarray, params), table, args.drafted)
    peer = torch.compile(model) if args.compile else model
    trainee = EagleTrainee.of(config, args.heads)
    steppers = {
        "jaxspec": jax_stepper(features, tokens, table, args.drafted, trainee, params, settings, jnp.asarray(mask)),
        "speculators": peer_stepper(peer, features, tokens, mask, args.heads, settings),
    }
    seconds, _, apart = take_turns(steppers, args.repeats)
    ratio = statistics.median(b / a for a, b in zip(*seconds.values()))
    took = {name: round_significant(statistics.median(each) * 1e3) for name, each in seconds.items()}
    print(f"{took} ms a step; speculators / jaxspec: {ratio:.2f}; losses differ by {apart:.1e} at most")
    if args.record:
        found = {"kind": "eagle3", "ms": took, "ratio": round_significant(ratio), "losses_apart": apart}
        found |= {name: getattr(args, name) for name in sizes} | {"compiled": args.compile}
        versions = {name: importlib.metadata.version(name) for name in ("torch", "speculators", "transformers")}
        print(f"written: {write_record(args.record, 'torch-step', sys.argv, found, versions)}")
    return 0 if apart < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
