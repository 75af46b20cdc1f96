"""Makes `tests/golden/smollm2_greedy.json`: greedy text of SmolLM2 by transformers, as an oracle.

Run it where torch and transformers are installed (the extra `oracle` of pyproject.toml):

    python scripts/golden/make_greedy.py SmolLM2-135M-Instruct.Q4_1.gguf

Weights are those of the GGUF file, in float32. With every token stands the gap between its logit and the next
best: where it is below the rounding noise of float32 another program may rightly choose the other token.
"""

import argparse
import json
import pathlib

PROMPTS = [
    "What is gravity?",
    "Write a haiku about the sea.",
    "Explain how a bicycle stays upright.",
    "List five uses of a paper clip.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Why is the sky blue?",
    "Translate to French: The cat sleeps on the sofa.",
    "Tell me a short story about a lighthouse keeper.",
    "What is the difference between weather and climate?",
    "Give me a recipe for pancakes.",
]
NEW_TOKENS = 128


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/golden/smollm2_greedy.json"))
    gguf = parser.parse_args().gguf
    out = parser.parse_args().out
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    rows = []
    for prompt in PROMPTS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            result = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                use_cache=True,
                output_logits=True,
                return_dict_in_generate=True,
                eos_token_id=2,
                pad_token_id=2,
            )
        tops = [torch.topk(step[0].float(), 2).values for step in result.logits]
        rows.append(
            {
                "prompt": prompt,
                "prompt_tokens": ids[0].tolist(),
                "tokens": result.sequences[0, ids.shape[1] :].tolist(),
                "gaps": [round(float(top[0] - top[1]), 6) for top in tops],
            }
        )
        print(prompt, len(rows[-1]["tokens"]), "tokens, smallest gap", min(rows[-1]["gaps"]))
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
    out.write_text(json.dumps({"made_with": made_with, "rows": rows}, indent=0) + "\n")


if __name__ == "__main__":
    main()
