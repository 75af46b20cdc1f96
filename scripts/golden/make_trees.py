"""Makes `tests/golden/trees.json`: logits at the nodes of a tree after a text, by transformers on each path.

Run it where torch and transformers are installed (the extra `oracle` of pyproject.toml):

    python scripts/golden/make_trees.py

The models are cases of `make_families.py`. Each node's figures are the last logits of the text and the node's path as
one plain text, in float32 on a CPU.
"""

import argparse
import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))

from helpers.families import PREFIX, paths, tokens_of, write_checkpoint

CASES = ("qwen3.5", "qwen3-moe", "qwen3.5-moe", "gpt-oss")


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/golden/trees.json"))
    out = parser.parse_args().out
    families = json.loads((out.parent / "families.json").read_text())["cases"]
    golden: dict = {"transformers": transformers.__version__, "cases": {}}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(pathlib.Path(folder), case, families[case]["settings"], families[case]["shapes"])
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
        text, nodes = tokens_of(case)[:PREFIX], tokens_of(case)[PREFIX:]
        rows = []
        for path in paths():
            with torch.no_grad():
                logits = model(torch.tensor([text + [nodes[node] for node in path]]), use_cache=False).logits[0, -1]
            rows.append([round(float(x), 6) for x in logits])
        golden["cases"][case] = rows
        print(f"{case}: {len(rows)} nodes after {PREFIX} tokens")
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
