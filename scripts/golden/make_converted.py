"""Makes `tests/golden/converted.json`: what the converter of llama.cpp writes for tiny random models, as an oracle.

Run it where torch is installed (the extra `oracle` of pyproject.toml), with a checkout of llama.cpp:

    PYTHONPATH=LLAMA_CPP:LLAMA_CPP/gguf-py python scripts/golden/make_converted.py

Models follow from names, as in `make_families.py`; they have no tokenizer. For each tensor, the file holds its shape
and a sum of its numbers with fixed weights, so that a changed order of rows or a missing offset changes the sum.
"""

import argparse
import json
import pathlib
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))

from helpers.converted import digest, read_metadata
from helpers.families import split_experts, write_checkpoint
from helpers.gpt_oss_files import CASE as GPT_OSS
from helpers.gpt_oss_files import SETTINGS, SHAPES, write_blocks

GOLDEN = pathlib.Path("tests/golden")
ARCHITECTURES = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def models() -> dict[str, dict[str, Any]]:
    """Returns the settings and shapes of each case."""
    families = json.loads((GOLDEN / "families.json").read_text())["cases"]
    layers = json.loads((GOLDEN / "mtp.json").read_text())["cases"]
    cases = {name: {key: layers[name][key] for key in ("settings", "shapes")} for name in layers}
    cases["qwen3-moe"] = families["qwen3-moe"]
    next_, moe = families["qwen3-next"], layers["qwen3.5-moe-mtp"]
    other = {"mlp_only_layers": [], "norm_topk_prob": True, "decoder_sparse_step": 1, "mtp_num_hidden_layers": 1}
    shapes = {name: shape for name, shape in next_["shapes"].items() if "layers.2.mlp." not in name}
    shapes |= {
        name.replace("layers.1.", "layers.2."): shape for name, shape in shapes.items() if "layers.1.mlp." in name
    }
    shapes |= {name: shape for name, shape in moe["shapes"].items() if name.startswith("mtp.")}
    cases["qwen3-next-mtp"] = {"settings": next_["settings"] | other, "shapes": shapes}
    # Layers whose kinds do not follow an interval.
    case = cases["qwen3.5-mtp"]
    types = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    shapes = {}
    for i, kind in enumerate(types):
        like = "layers.3." if kind == "full_attention" else "layers.0."
        own = {name: shape for name, shape in case["shapes"].items() if name.startswith("model." + like)}
        shapes |= {name.replace(like, f"layers.{i}."): shape for name, shape in own.items()}
    shapes |= {name: shape for name, shape in case["shapes"].items() if not name.startswith("model.layers.")}
    cases["qwen3.5-types-mtp"] = {"settings": case["settings"] | {"layer_types": types}, "shapes": shapes}
    return cases


def _write_vocab_size(model: Any) -> None:
    model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])


def convert(folder: pathlib.Path, settings: dict[str, Any], joined: bool) -> dict[str, Any]:
    """Returns the metadata and the tensors of the converted file."""
    import conversion  # pyright: ignore[reportMissingImports]
    import gguf
    import torch  # pyright: ignore[reportMissingImports]

    kind = conversion.get_model_class(settings["architectures"][0])
    own = type(kind.__name__, (kind,), {"model_arch": kind.model_arch, "set_vocab": _write_vocab_size})
    out = folder / "model.gguf"
    more = {"fuse_qkv": True, "fuse_gate_up_exps": "num_experts" in settings} if joined else {}
    with torch.inference_mode():
        own(folder, gguf.LlamaFileType.ALL_F32, out, **more).write()
    tensors = {tensor.name: digest(tensor.data) for tensor in gguf.GGUFReader(out).tensors}
    return {"metadata": read_metadata(out), "tensors": tensors}


def convert_gpt_oss(path: pathlib.Path) -> dict[str, Any]:
    """Returns the converted files of gpt-oss by the type of the experts."""
    write_checkpoint(path / "model", GPT_OSS, SETTINGS, SHAPES)
    cases = {}
    for kind, folder in (("float32", path / "model"), ("mxfp4", write_blocks(path)[0])):
        settings = json.loads((folder / "config.json").read_text()) | {"architectures": ["GptOssForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(settings))
        cases[kind] = convert(folder, settings, False)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=GOLDEN / "converted.json")
    arguments = parser.parse_args()
    cases = {}
    for case, model in models().items():
        settings = model["settings"] | {"architectures": [ARCHITECTURES[model["settings"]["model_type"]]]}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            write_checkpoint(path, case, settings, model["shapes"])
            if settings["model_type"] in ("qwen3_moe", "qwen3_next"):
                split_experts(path)
            forms = {"separate": convert(path, settings, False)}
            if case.startswith("qwen3.5-"):
                forms["joined"] = convert(path, settings, True)
        cases[case] = model | forms
        print(f"{case}: {len(forms['separate']['tensors'])} tensors")
    with tempfile.TemporaryDirectory() as folder:
        found = {"cases": cases, GPT_OSS: convert_gpt_oss(pathlib.Path(folder))}
    arguments.out.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
