"""Makes the heads that come with jaxspec: collects prompts, trains on the target's answers, and packs the files.

    python -m scripts.heads.ship KIND FOLDER [--out DIR]

KIND is a row of `SETTINGS`. Every step saves its results in FOLDER, and a repeated command continues where it stopped;
FOLDER/prompts.jsonl may be a copy of another kind's, and so may FOLDER/run/answers. "eagle3" and "dspark" have the same
features, too: FOLDER/run/features and FOLDER/run/held-out. The packed heads are written to `--out`, by default in the
package, in bfloat16 and with their card. `jaxspec train` prints their accuracy on held-out texts, and
`scripts/heads/evaluate.py DIR` measures them on MT-bench.
"""

import argparse
import dataclasses
import pathlib
import shlex
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp

import jaxspec
from jaxspec.heads.find import SHIPPED_FOLDER
from jaxspec.train.card import CARD_FILE, FIGURES_FILE

TARGET = "smollm2-135m-instruct"
PROMPTS = "--own 2500"
COMMON = (
    "--dtype bfloat16 --precision bfloat16 --draft-vocab 6144 --answer-tokens 192 --answer-batch 64 --batch 4 "
    "--learning-rate 2e-3 --weight-decay 0.1 --fit-prompts 4 --fit-dtype float32"
)
SETTINGS = {
    "medusa": "--heads 4 --inputs recurrent --loss kl --steps 1600",
    "eagle3": "--depth 3 --steps 1400",
    "dspark": "--layers 1 --taps 2,15,27 --markov-rank 48 --steps 1400",
}
"""The options of `jaxspec train` beside `COMMON`, by the kind of heads."""
LARGEST = 16e6
"""The most bytes of a folder that is shipped."""


def run(*words: str) -> None:
    print("$", shlex.join(words), flush=True)
    subprocess.run([sys.executable, *words], check=True)


def pack(kind: str, run: pathlib.Path, out: pathlib.Path | None) -> pathlib.Path:
    """Writes the heads of a run in bfloat16, with their card, their figures and the command; returns the folder.

    Raises:
        ValueError: they are larger than what is shipped; they are then in a folder of the run.
    """
    heads = jaxspec.load_heads(run / "heads")
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.ndim == 2 else a, heads.params)
    part = run / "packed"
    shutil.rmtree(part, ignore_errors=True)
    jaxspec.save_heads(dataclasses.replace(heads, params=params), part)
    for name in (CARD_FILE, FIGURES_FILE):
        shutil.copy(run / "heads" / name, part / name)
    with (part / CARD_FILE).open("a") as card:
        card.write(
            f"Matrices are stored in bfloat16. Made by `python -m scripts.heads.ship {kind} FOLDER`, which runs\n\n"
            f"```\npython -m scripts.heads.prompts FOLDER/prompts.jsonl {PROMPTS}\n"
            f"jaxspec train {kind} --target {TARGET} --prompts FOLDER/prompts.jsonl --out FOLDER/run \\\n"
            f"    {SETTINGS[kind]} {COMMON}\n```\n\n"
            "The prompts are those of Arena-Hard 2.0, IFEval, IFBench, WritingBench and of BFCL's live part (all "
            "Apache-2.0); the\nanswers are the target's own. The heads are under the target's licence, Apache-2.0.\n"
        )
    if (size := sum(path.stat().st_size for path in part.iterdir())) > LARGEST:
        raise ValueError(f"{part}: {size / 1e6:.1f} MB, more than {LARGEST / 1e6:.0f}: draft fewer tokens")
    place = out or SHIPPED_FOLDER / TARGET / str(heads.config.drafter)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    shutil.move(part, place)
    print(f"{place}: {size / 1e6:.1f} MB")
    return place


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=SETTINGS)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    prompts, folder = given.folder / "prompts.jsonl", given.folder / "run"
    if not prompts.exists():
        run("-m", "scripts.heads.prompts", str(prompts), *shlex.split(PROMPTS))
    words = ["--target", TARGET, "--prompts", str(prompts), "--out", str(folder)]
    run("-m", "jaxspec", "train", given.kind, *words, *shlex.split(f"{SETTINGS[given.kind]} {COMMON}"))
    pack(given.kind, folder, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
