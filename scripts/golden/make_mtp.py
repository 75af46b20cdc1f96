"""Makes `tests/golden/mtp.json`: states of a tiny random layer for multi-token prediction, by transformers.

Run it where torch and transformers are installed (the extra `oracle` of pyproject.toml):

    python scripts/golden/make_mtp.py

The model and its layer follow from names, as in `make_families.py`. The layer reads a text with the model's features,
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

CASE, ROWS, STEPS = "qwen3.5-mtp", 24, 3
NAMES = {
    "eh_proj.weight": "mtp.fc.weight",
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "post_norm.weight": "mtp.norm.weight",
}
"""The names of transformers' module, and those in checkpoints."""


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from transformers.modeling_layers import MtpLayer  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen3_5 import modeling_qwen3_5 as dense  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/golden/mtp.json"))
    out = parser.parse_args().out
    families = json.loads((out.parent / "families.json").read_text())["cases"]["qwen3.5"]
    settings, shapes = families["settings"] | {"mtp_num_hidden_layers": 1}, dict(families["shapes"])
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(pathlib.Path(folder), CASE, settings, shapes)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    config = copy.deepcopy(model.config)
    config.layer_types, config.num_hidden_layers = ["full_attention"], 1
    layer = MtpLayer(config, dense.Qwen3_5DecoderLayer, dense.Qwen3_5RMSNorm, 0)
    named = {key: NAMES.get(key, key.replace("mtp_block.", "mtp.layers.0.")) for key in layer.state_dict()}
    own = {named[key]: list(tensor.shape) for key, tensor in layer.state_dict().items()}
    weights = {key: torch.from_numpy(random_tensor(CASE, str(name), own[name])) for key, name in named.items()}
    layer.load_state_dict(weights)
    text = torch.tensor([tokens_of(CASE)[: ROWS + STEPS + 1]])
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
    golden = {
        "transformers": transformers.__version__,
        "settings": settings,
        "shapes": shapes | own,
        "rows": ROWS,
        "states": [[round(float(x), 6) for x in row] for row in states[0]],
        "logits": [[round(float(x), 6) for x in row] for row in logits],
    }
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    print(f"{len(own)} tensors, states from {states.min():.2f} to {states.max():.2f}")


if __name__ == "__main__":
    main()
