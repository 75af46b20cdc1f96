"""Converts a llama2.c model (`model.bin`, `tokenizer.bin`) to a GGUF file, which jaxspec and llama.cpp read.

    python scripts/prove/llama2c_to_gguf.py stories15M.bin tokenizer.bin stories15M.gguf

The formats are those of the project's `export.py`, version 0, and `tokenizer.py`. Both rotate neighbours, as
GGUF's llama architecture does, so nothing is permuted.
"""

import argparse
import pathlib
import struct

import gguf
import numpy as np


def read_model(path: pathlib.Path) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """The header by name, and the tensors under their GGUF names."""
    data = np.fromfile(path, np.float32)
    names: list[str] = ["dim", "hidden", "layers", "heads", "kv_heads", "vocab", "context"]
    header = dict(zip(names, data[:7].view(np.int32).tolist(), strict=True))
    tied, header["vocab"] = header["vocab"] > 0, abs(header["vocab"])
    dim, hidden, layers = header["dim"], header["hidden"], header["layers"]
    kv, width = dim // header["heads"] * header["kv_heads"], dim // header["heads"]
    at = 7

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        at += int(np.prod(shape))
        return data[at - int(np.prod(shape)) : at].reshape(shape)

    tensors = {"token_embd.weight": take(header["vocab"], dim)}
    stacked = {
        "attn_norm": take(layers, dim),
        "attn_q": take(layers, dim, dim),
        "attn_k": take(layers, kv, dim),
        "attn_v": take(layers, kv, dim),
        "attn_output": take(layers, dim, dim),
        "ffn_norm": take(layers, dim),
        "ffn_gate": take(layers, hidden, dim),
        "ffn_down": take(layers, dim, hidden),
        "ffn_up": take(layers, hidden, dim),
    }
    for name, array in stacked.items():
        tensors |= {f"blk.{i}.{name}.weight": array[i] for i in range(layers)}
    tensors["output_norm.weight"] = take(dim)
    take(2, header["context"], width // 2)  # tables of cosines and sines
    if not tied:
        tensors["output.weight"] = take(header["vocab"], dim)
    if at != data.size:
        raise SystemExit(f"{path}: {data.size} numbers, the header says {at}: not a model of this format")
    return header, tensors


def read_tokens(path: pathlib.Path, size: int) -> tuple[list[str], list[float], list[int]]:
    """Spelling, score and GGUF type of every token."""
    data, at = path.read_bytes(), 4
    tokens, scores = [], []
    for _ in range(size):
        score, length = struct.unpack_from("<fi", data, at)
        tokens.append(data[at + 8 : at + 8 + length])
        scores.append(score)
        at += 8 + length
    if at != len(data):
        raise SystemExit(f"{path}: {len(data)} bytes, {size} tokens take {at}: not a tokenizer of this format")
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts = [token.decode("utf-8").replace(" ", "▁") for token in tokens[len(first) :]]
    types = [2, 3, 3, *[6] * 256, *[1] * len(texts)]
    return first + texts, scores, types


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "tokenizer", "out"):
        parser.add_argument(name, type=pathlib.Path)
    args = parser.parse_args()
    header, tensors = read_model(args.model)
    tokens, scores, types = read_tokens(args.tokenizer, header["vocab"])
    writer = gguf.GGUFWriter(args.out, "llama")
    writer.add_context_length(header["context"])
    writer.add_embedding_length(header["dim"])
    writer.add_block_count(header["layers"])
    writer.add_feed_forward_length(header["hidden"])
    writer.add_head_count(header["heads"])
    writer.add_head_count_kv(header["kv_heads"])
    writer.add_rope_dimension_count(header["dim"] // header["heads"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{args.out}: {header}")


if __name__ == "__main__":
    main()
