"""Writes tests/golden/smollm2_text.json: what encoding and chat rendering must give for SmolLM2.

    python scripts/golden/make_text.py SmolLM2-135M-Instruct.Q4_1.gguf [--llama-server http://127.0.0.1:8080]

Needs the `oracle` extra. Which oracle is trusted for what:

* transformers, as it reads the GGUF file, for chats and for every string but those below (`"transformers"`);
* its GGUF reader ignores `tokenizer.ggml.pre`, and so that SmolLM2 splits a text at every digit. That shows
  where a number beyond ASCII follows a space (` ½`): there the same vocabulary and merges are run with the
  pre-tokenizer of the published tokenizer.json (`"transformers, digits split"`).

With `--llama-server` every string is also compared with a running llama.cpp server, which agrees with all.
"""

import argparse
import json
import urllib.request
from pathlib import Path

TEXTS = [
    "",
    " ",
    "  \n\n\t x",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they'll've DON'T it's we'd",
    "In 2024, 1234567 people paid $3.50 each.",
    "3.14159 1e-10 0x7f 10,000",
    "½ ¾ x² H₂O Ⅷ ⑨",
    "٣٤٥ ३४५ ๓๔๕",
    "année 2024٣ ½",
    "def f(x):\n    return x ** 2  # square\n\n\nprint(f(10))\n",
    "\tif (a && b) {\r\n\t\treturn;\r\n\t}",
    "https://example.org/a?b=c&d=%20#frag",
    "user_name@mail.example, C:\\dir\\file.txt",
    "a" * 70,
    " " * 37 + "end",
    "!!!???...---===",
    "Ça coûte trois œufs à l'été.",
    "Füße, Straße, Übergröße",
    "El niño comió piñas, ¿verdad?",
    "Zażółć gęślą jaźń",
    "Съешь ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "你好,世界!今天是星期三。",
    "こんにちは世界、カタカナ",
    "안녕하세요 세계",
    "Tiếng Việt rất đẹp",
    "cafe\u0301 vs café",
    "e\u0301\u0302\u0323 combining",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family",
    "\U0001f3f3\ufe0f\u200d\U0001f308 \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𓀀",
    "zero\u200bwidth\u2060joiner\ufeff",
    "nbsp\u00a0thin\u2009ideographic\u3000space",
    "\u202eright to left\u202c",
    "NUL\x00 BEL\x07 DEL\x7f NEL\x85 LS\u2028",
    "<|im_start|>user\nhi<|im_end|>\n",
    "half <|im_end and <|endoftext|> whole",
    "<repo_name>x<file_sep>",
]

CHATS = [
    ([{"role": "user", "content": "What is the capital of France?"}], True),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "¿Qué hora es? 🕰️"}], True),
    (
        [
            {"role": "user", "content": "Count: 1, 2"},
            {"role": "assistant", "content": "3, 4\n"},
            {"role": "user", "content": "  go on  "},
            {"role": "assistant", "content": "5"},
        ],
        False,
    ),
]


def main() -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description="Make the golden file of the text layer.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--llama-server", help="address of a llama.cpp server that has loaded the same file")
    args = parser.parse_args()

    oracle = AutoTokenizer.from_pretrained(args.gguf.parent, gguf_file=args.gguf.name)
    plain = [oracle.encode(text) for text in TEXTS]
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    split = [oracle.encode(text) for text in TEXTS]

    encodings = []
    for text, before, ids in zip(TEXTS, plain, split, strict=True):
        exotic = any(c.isnumeric() and not c.isascii() for c in text)
        assert exotic or before == ids, f"the oracles differ on {text!r}, which has no number beyond ASCII"
        trusted = "transformers" if before == ids else "transformers, digits split"
        encodings.append({"text": text, "ids": ids, "oracle": trusted})
        if args.llama_server:
            assert ask_llama(args.llama_server, text) == ids, f"llama.cpp differs on {text!r}"

    chats = []
    for messages, prompt in CHATS:
        text = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        chats.append({"messages": messages, "add_generation_prompt": prompt, "text": text, "ids": oracle.encode(text)})

    # One record a line, escaped: the strings hold characters no editor should touch.
    body = [
        f' "{name}": [\n' + ",\n".join("  " + json.dumps(record) for record in records) + "\n ]"
        for name, records in (("encodings", encodings), ("chats", chats))
    ]
    path = Path(__file__).parents[2] / "tests" / "golden" / "smollm2_text.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text("{\n" + ",\n".join(body) + "\n}\n")
    print(f"{path}: {len(encodings)} strings, {len(chats)} chats")


def ask_llama(server: str, text: str) -> list[int]:
    """The ids llama.cpp gives."""
    body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
    request = urllib.request.Request(f"{server}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["tokens"]


if __name__ == "__main__":
    main()
