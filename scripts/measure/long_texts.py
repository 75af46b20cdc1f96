"""Writes prompts of some two thousand tokens for `jaxspec bench`: pages of the documentation, to be summarised.

    python scripts/measure/long_texts.py build/long.jsonl
    jaxspec bench --tasks build/long.jsonl

A page is cut after `LONGEST` characters.
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ("architecture.md", "functional.md", "own-model.md")
LONGEST = 8000  # characters


def main() -> None:
    file = pathlib.Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    texts = ((ROOT / "docs" / page).read_text()[:LONGEST] for page in PAGES)
    lines = (json.dumps({"prompt": f"Summarise this page, and quote its commands.\n\n{text}"}) for text in texts)
    file.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
