"""Makes `tests/golden/eagle_switches.json`: logits of tiny random EAGLE-3 heads, with every switch, by speculators.

Run it where speculators is installed (https://github.com/vllm-project/speculators, 0.9.0):

    python scripts/golden/make_eagle_switches.py

Each head reads a text with the target's states, then two further tokens from its own states, after every token of the
text at once. config.json is written by speculators; weights, texts and states follow from names. Figures in the file
are those of float32 on a CPU.
"""

import argparse
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))

from helpers.eagle_heads import STEPS, SWITCHES, drafted, parameters, switch_inputs


def make_model(name: str, case: Any) -> tuple[Any, dict[str, tuple[int, ...]], Any]:
    """Returns a head of speculators, the shapes of its own tensors, and the ids of the tokens that it drafts."""
    import speculators.models.eagle3 as eagle3  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    layer = transformers.AutoConfig.for_model(case.kind, **case.layer)
    layer._attn_implementation = "eager"
    config = eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=case.draft_vocab_size, **case.switches
    )
    model = eagle3.Eagle3DraftModel(config)
    state = {key: leaf for key, leaf in model.state_dict().items() if not key.startswith("verifier_")}
    shapes = {key: tuple(leaf.shape) for key, leaf in state.items() if key not in ("d2t", "t2d")}
    model.load_state_dict(
        {key: torch.from_numpy(value) for key, value in parameters(name, shapes).items()}, strict=False
    )
    ids = torch.from_numpy(drafted(layer.vocab_size, case.draft_vocab_size))
    if "t2d" in state:
        model.load_vocab_mappings(torch.isin(torch.arange(layer.vocab_size), ids), ids - torch.arange(len(ids)))
    return model, shapes, ids


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/golden/eagle_switches.json"))
    out = parser.parse_args().out
    golden: dict[str, Any] = {"speculators": importlib.metadata.version("speculators"), "cases": {}}
    for name, case in SWITCHES.items():
        model, shapes, _ = make_model(name, case)
        model.eval()
        states, tokens = (torch.from_numpy(value) for value in switch_inputs(name, case))
        found: list[Any] = []
        hook = model.lm_head.register_forward_hook(lambda module, given, logits, found=found: found.append(logits[0]))
        with torch.no_grad():
            model(states, tokens[:, 1:], torch.zeros_like(tokens[:, 1:]), ttt_steps=STEPS)
        hook.remove()
        golden["cases"][name] = {
            "settings": json.loads(model.config.to_json_string()),
            "shapes": {key: list(shape) for key, shape in shapes.items()},
            "logits": [[[round(float(x), 7) for x in row] for row in step] for step in found],
        }
        print(f"{name}: {len(shapes)} tensors, logits from {min(a.min() for a in found):.2f}")
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
