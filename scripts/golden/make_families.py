"""Makes `tests/golden/families.json`: logits of tiny random models of every family by transformers, as an oracle.

Run it where torch and transformers are installed (the extra `oracle` of pyproject.toml):

    python scripts/golden/make_families.py

Each case is a config.json, read by both programs; the weights follow from the names of case and tensor. Texts go
well past sliding windows and original contexts. Figures in the file are those of float32 on a CPU.
"""

import argparse
import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))

from helpers.families import LENGTH, POSITIONS, random_tensor, tokens_of, write_checkpoint

_SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONG = {"type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 5.0, 11.0]}
_PHI3 = {"model_type": "phi3", "original_max_position_embeddings": 32, "sliding_window": None}
_GEMMA = {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 12,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}

_HYBRID = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
CASES: dict[str, dict] = {
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-mha-biases": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "llama-mqa-llama3": {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3,
        "tie_word_embeddings": False,
    },
    "llama-linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-new-style-rope": {
        "model_type": "llama",
        "rope_parameters": _LLAMA3 | {"rope_theta": 20000.0, "factor": 32.0},
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 11, "head_dim": 16, "tie_word_embeddings": False},
    "mistral-small-window": {"model_type": "mistral", "sliding_window": 3},
    "mistral-no-window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "use_sliding_window": False},
    "qwen2-yarn": {
        "model_type": "qwen2",
        "tie_word_embeddings": False,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    },
    "qwen2-half-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 10,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "rope_theta": 1000000.0, "tie_word_embeddings": True},
    "qwen3-yarn-biases": {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "num_key_value_heads": 1,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 6.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
    },
    "phi3-window": _PHI3 | {"sliding_window": 13, "original_max_position_embeddings": 256},
    "phi3-longrope-short": _PHI3 | {"rope_scaling": _LONG, "original_max_position_embeddings": 128},
    "phi3-longrope-long": _PHI3 | {"rope_scaling": _LONG},
    "phi4-partial-longrope": _PHI3
    | {"rope_scaling": _LONG, "hidden_size": 64, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    "gemma3": _GEMMA | {"num_hidden_layers": 3, "sliding_window_pattern": 3},
    "gemma3-linear-global": _GEMMA
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_key_value_heads": 1,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "qwen3.5": _HYBRID,
    "qwen3.5-tied": _HYBRID
    | {
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 8,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "num_hidden_layers": 3,
    },
    "qwen3-moe": {"model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": True} | _EXPERTS,
    "qwen3-moe-dense-layers": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "mlp_only_layers": [3],
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
    }
    | _EXPERTS,
    "qwen3.5-moe": _HYBRID
    | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 24, "intermediate_size": None}
    | _EXPERTS,
    "qwen3-next": _HYBRID
    | {
        "model_type": "qwen3_next",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [2],
        "norm_topk_prob": False,
    }
    | _EXPERTS,
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "sliding_window": 11,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
}


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/golden/families.json"))
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="only these; other cases keep their figures")
    arguments = parser.parse_args()
    out: pathlib.Path = arguments.out
    golden: dict = {"transformers": transformers.__version__, "cases": {}}
    if len(arguments.cases) < len(CASES):
        golden["cases"] = json.loads(out.read_text())["cases"]
    for name in arguments.cases:
        settings = _SIZES | CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(pathlib.Path(folder), name, settings, {})
            config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(config)
        shapes = {key: list(tensor.shape) for key, tensor in empty.state_dict().items()}
        if config.tie_word_embeddings:
            shapes.pop("lm_head.weight")
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(pathlib.Path(folder), name, settings, shapes)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
        for key, tensor in model.state_dict().items():  # what was read is what was written
            if key in shapes:
                assert torch.equal(tensor, torch.from_numpy(random_tensor(name, key, shapes[key]))), key
        with torch.no_grad():
            logits = model(torch.tensor([tokens_of(name)])).logits[0]
        figures = [[round(float(x), 6) for x in logits[i]] for i in POSITIONS]
        golden["cases"][name] = {"settings": settings, "shapes": shapes, "logits": figures}
        print(f"{name}: {len(shapes)} tensors, {LENGTH} tokens, logits from {logits.min():.2f} to {logits.max():.2f}")
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
