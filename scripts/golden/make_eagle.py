"""Makes `tests/golden/eagle.json`: states, logits and dynamic trees of tiny random heads by EAGLE's own code.

It reads a checkout of https://github.com/SafeAILab/EAGLE (its modules `eagle/model/cnets.py` and `cnets1.py`), and runs
where torch and transformers are installed (the extra `oracle` of pyproject.toml):

    python scripts/golden/make_eagle.py path/to/EAGLE

Weights, texts and the target's states follow from names. Each tree is drafted twice: after a text, and after a longer
one, with the cache that the first left. Figures in the file are those of float32 on a CPU.
"""

import argparse
import importlib
import json
import pathlib
import sys
import types
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))

from helpers.eagle_heads import CASES, LENGTHS, TREES, drafted_ids, inputs, parameters, reference_shapes


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/golden/eagle.json"))
    args = parser.parse_args()
    sys.path.insert(0, str(args.checkout / "eagle/model"))
    golden: dict[str, Any] = {"source": "github.com/SafeAILab/EAGLE", "torch": torch.__version__, "cases": {}}
    for name, case in CASES.items():
        config = types.SimpleNamespace(**case.entries)
        shapes = reference_shapes(case)
        tensors = {key: torch.from_numpy(value) for key, value in parameters(name, shapes).items()}
        features, tokens = (torch.from_numpy(value) for value in inputs(name, case))
        head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        head.weight.data = tensors.pop("target.lm_head.weight")
        made = importlib.import_module("cnets1" if case.version == 1 else "cnets")

        def build(case=case, config=config, tensors=tensors, made=made, **more) -> Any:
            model = made.Model(config, load_emb=False, bias=case.settings.get("bias", True), **more)
            missing, unknown = model.load_state_dict(tensors, strict=False)
            assert not unknown, unknown
            assert set(missing) <= {"d2t", "t2d"}, missing
            if case.settings.get("draft_vocab_size", config.vocab_size) < config.vocab_size:
                ids = torch.from_numpy(drafted_ids(case))
                model.d2t.copy_(ids - torch.arange(len(ids)))
                model.t2d[ids] = True
            model.init_tree()
            model.reset_kv()
            return model.eval()

        with torch.no_grad():
            model = build()
            states = model(features, input_ids=tokens[:, 1:])
            logits = head(states) if case.version == 1 else model.lm_head(model.norm(states))
        trees = []
        for depth, beam, nodes in TREES:
            model, rounds, read = build(depth=depth, top_k=beam, total_tokens=nodes), [], 0
            for length in LENGTHS:
                found = model.topK_genrate(features[:, read : length - 1], tokens[:, :length], head, None)
                drafted, _, mask, positions = found
                bits = ["".join(str(int(bit)) for bit in row) for row in mask[0, 0]]
                rounds.append({"tokens": drafted[0].tolist(), "mask": bits, "positions": positions.tolist()})
                read = length - 1
            trees.append(rounds)
        golden["cases"][name] = {
            "shapes": {key: list(shape) for key, shape in shapes.items()},
            "states": [[round(float(x), 7) for x in row] for row in states[0]],
            "logits": [[round(float(x), 7) for x in row] for row in logits[0]],
            "trees": trees,
        }
        print(f"{name}: logits from {logits.min():.2f} to {logits.max():.2f}")
    args.out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
