"""Makes `tests/golden/mtp.json`: states of tiny random layers for multi-token prediction, by transformers.

Run it where torch and transformers are installed (the extra `oracle` of pyproject.toml):

    python scripts/golden/make_mtp.py

A model and its layer follow from names, as in `make_families.py`. The layer reads a text with the model's features,
and then `STEPS` further tokens from its own states. Figures in the file are those of float32 on a CPU.
"""

import argparse
import copy
import json
import pathlib
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))

from helpers.families import random_tensor, tokens_of, write_checkpoint

ROWS, STEPS = 24, 3
CASES = {"qwen3.5-mtp": "qwen3.5", "qwen3.5-moe-mtp": "qwen3.5-moe"}
"""The cases, and those of `make_families.py` that their models are like."""
NAMES = {
    "eh_proj.weight": "mtp.fc.weight",
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "post_norm.weight": "mtp.norm.weight",
}
"""The names of transformers' module, and those in checkpoints."""


def figures(case: str, family: dict[str, Any]) -> dict[str, Any]:
    """Returns the entry of a case; `family` holds the settings and shapes of its model."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from transformers.modeling_layers import MtpLayer  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen3_5 import modeling_qwen3_5 as dense  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe  # pyright: ignore[reportMissingImports]

    settings, shapes = family["settings"] | {"mtp_num_hidden_layers": 1}, dict(family["shapes"])
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(pathlib.Path(folder), case, settings, shapes)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    config = copy.deepcopy(model.config)
    config.layer_types, config.num_hidden_layers = ["full_attention"], 1
    if "num_experts" in settings:
        layer = MtpLayer(config, moe.Qwen3_5MoeDecoderLayer, moe.Qwen3_5MoeRMSNorm, 0)
    else:
        layer = MtpLayer(config, dense.Qwen3_5DecoderLayer, dense.Qwen3_5RMSNorm, 0)
    named = {key: NAMES.get(key, key.replace("mtp_block.", "mtp.layers.0.")) for key in layer.state_dict()}
    own = {named[key]: list(tensor.shape) for key, tensor in layer.state_dict().items()}
    weights = {key: torch.from_numpy(random_tensor(case, str(name), own[name])) for key, name in named.items()}
    layer.load_state_dict(weights)
    text = torch.tensor([tokens_of(case)[: ROWS + STEPS + 1]])
    states: Any = None
    with torch.no_grad():
        hidden = model.model(text, use_cache=False).last_hidden_state[:, :ROWS]
        for _ in range(STEPS + 1):
            size = hidden.shape[1]
            position = torch.arange(size)[None]
            turned = model.model.rotary_emb(hidden, position[None].expand(3, 1, -1))
            mask = torch.zeros(1, 1, size, size).masked_fill(torch.ones(size, size).triu(1).bool(), -1e30)
            embeddings = model.model.embed_tokens(text[:, 1 : size + 1])
            states = layer(embeddings, hidden, turned, mask, position, None)
            hidden = torch.cat([hidden, states[:, -1:]], 1)
        logits = model.lm_head(states[0, -STEPS - 1 :])
    print(f"{case}: {len(own)} tensors, states from {states.min():.2f} to {states.max():.2f}")
    return {
        "settings": settings,
        "shapes": shapes | own,
        "rows": ROWS,
        "states": [[round(float(x), 6) for x in row] for row in states[0]],
        "logits": [[round(float(x), 6) for x in row] for row in logits],
    }


def main() -> None:
    import transformers  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/golden/mtp.json"))
    out = parser.parse_args().out
    families = json.loads((out.parent / "families.json").read_text())["cases"]
    cases = {case: figures(case, families[family]) for case, family in CASES.items()}
    out.write_text(json.dumps({"transformers": transformers.__version__, "cases": cases}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
