"""Makes `tests/golden/eagle_losses.json`: losses and gradients of tiny random EAGLE-3 heads, by speculators.

Run it where speculators is installed (https://github.com/vllm-project/speculators, 0.9.0):

    python scripts/golden/make_eagle_losses.py

The heads are those of `make_eagle_switches.py`. Each is trained on one text, three steps deep, with the KL divergence
and weights 0.8^step. Of each gradient the file holds its norm and its product with a random array that follows from
names.
"""

import argparse
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))

from make_eagle_switches import make_model  # pyright: ignore[reportMissingImports]

from helpers.eagle_heads import STEPS, SWITCHES, parameters, supervision, switch_inputs


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]
    from speculators.losses import resolve_loss_config  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/golden/eagle_losses.json"))
    out = parser.parse_args().out
    golden: dict[str, Any] = {"speculators": importlib.metadata.version("speculators"), "cases": {}}
    for name, case in SWITCHES.items():
        model, _, ids = make_model(name, case)
        features, table, mask = supervision(name, case)
        width = case.layer["hidden_size"]
        verifier = {"verifier_lm_head.weight": torch.from_numpy(table)[ids], "verifier_norm.weight": torch.ones(width)}
        model.load_state_dict(verifier, strict=False)
        model.verifier_norm = torch.nn.Identity()  # the features are normed
        states, tokens = (torch.from_numpy(value) for value in switch_inputs(name, case))
        # Row t predicts token t + 2, whose law follows from the feature of token t + 1; the last two have no row.
        _, loss, parts = model(
            states[:, :-1], tokens[:, 1:-1], torch.zeros_like(tokens[:, 1:-1]), torch.from_numpy(mask[:, 2:]),
            verifier_last_hidden_states=torch.from_numpy(features[:, 1:-1]), ttt_steps=STEPS, ttt_step_loss_decay=0.8,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )  # fmt: skip
        loss.backward()
        gradients = {key: a.grad for key, a in model.named_parameters() if a.grad is not None}
        directions = parameters(f"{name}, direction", {key: tuple(a.shape) for key, a in gradients.items()})
        golden["cases"][name] = {
            "losses": [float(parts[f"loss_{step}_sum"]) for step in range(STEPS)],
            "gradients": {
                key: [float(a.norm()), float((a * torch.from_numpy(directions[key])).sum())]
                for key, a in gradients.items()
            },
        }
        print(f"{name}: loss {loss.item():.4f}, {len(gradients)} gradients")
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
