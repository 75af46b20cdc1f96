"""Makes the heads that come with jaxspec: collects prompts, trains on the target's answers, and packs the files.

    python scripts/heads/ship.py FOLDER [--out DIR]

Every step saves its results in FOLDER, and a repeated command continues where it stopped. The packed heads are written
to `--out`, by default in the package, in bfloat16 and with their card. `jaxspec train medusa` prints their accuracy on
held-out texts, and `scripts/heads/evaluate.py DIR` measures it on MT-bench.
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
from jaxspec.checkpoints.presets import SHIPPED
from jaxspec.train.card import CARD, FIGURES

TARGET = "smollm2-135m-instruct"
PROMPTS = "--own 2500"
SETTINGS = (
    "--dtype bfloat16 --precision bfloat16 --heads 4 --inputs recurrent --draft-vocab 6144 --answer-tokens 192 "
    "--answer-batch 64 --loss kl --batch 4 --steps 1600 --learning-rate 2e-3 --weight-decay 0.1 --fit-prompts 4 "
    "--fit-dtype float32"
)


def run(*words: str) -> None:
    print("$", shlex.join(words), flush=True)
    subprocess.run([sys.executable, *words], check=True)


def pack(run: pathlib.Path, out: pathlib.Path) -> None:
    """Writes the heads of a run in bfloat16, with their card, their figures and the command."""
    heads = jaxspec.load_heads(run / "heads")
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.ndim == 2 else a, heads.params)
    shutil.rmtree(out, ignore_errors=True)
    jaxspec.save_heads(dataclasses.replace(heads, params=params), out)
    for name in (CARD, FIGURES):
        shutil.copy(run / "heads" / name, out / name)
    with (out / CARD).open("a") as card:
        card.write(
            "Matrices are stored in bfloat16. Made by `python scripts/heads/ship.py FOLDER`, which runs\n\n```\n"
        )
        card.write(f"python scripts/heads/prompts.py FOLDER/prompts.jsonl {PROMPTS}\n")
        card.write(f"jaxspec train medusa --target {TARGET} --prompts FOLDER/prompts.jsonl --out FOLDER/run \\\n")
        card.write(f"    {SETTINGS}\n```\n\n")
        card.write(
            "The prompts are those of Arena-Hard 2.0, IFEval, IFBench, WritingBench and of BFCL's live part (all "
            "Apache-2.0); the\nanswers are the target's own. The heads are under the target's licence, Apache-2.0.\n"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=SHIPPED / TARGET)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    prompts, folder = given.folder / "prompts.jsonl", given.folder / "run"
    here = pathlib.Path(__file__).parent
    if not prompts.exists():
        run(str(here / "prompts.py"), str(prompts), *shlex.split(PROMPTS))
    words = ["--target", TARGET, "--prompts", str(prompts), "--out", str(folder), *shlex.split(SETTINGS)]
    run("-m", "jaxspec", "train", "medusa", *words)
    pack(folder, given.out)
    print(f"{given.out}: {sum(path.stat().st_size for path in given.out.iterdir()) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
