"""Makes `tests/golden/dflash.json` and `dflash_losses.json`: tiny DFlash, DSpark and JetSpec heads by their code.

It reads checkouts of https://github.com/z-lab/dflash (its module `dflash/model.py`), of
https://github.com/deepseek-ai/DeepSpec (`deepspec/modeling/dspark`) and of https://github.com/hao-ai-lab/JetSpec
(`jetspec/models/draft_head.py`), and runs where torch and transformers are installed (the extra `oracle` of
pyproject.toml):

    python scripts/golden/make_dflash.py path/to/dflash path/to/DeepSpec path/to/JetSpec

Weights, texts and the target's states follow from names. Each head reads the text before a root and names a block, and
then the further text before another root, with the context that it kept. The published code has masks for attention
kernels of a GPU; here the same masks are dense. In training, DeepSpec draws the anchors, which the file holds, and of
each gradient its norm and its product with a random array that follows from names.
"""

import argparse
import importlib
import json
import pathlib
import sys
import types
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))

from helpers.dflash_golden import CASES, ROOTS, TRAINED, directions, inputs, supervision
from helpers.dflash_heads import BLOCK, E, File, V

SEEDS = {"anchors": 3}


def rounded(array: Any) -> Any:
    return [[round(float(x), 6) for x in row] for row in array]


def config_of(file: File) -> Any:
    from transformers import Qwen3Config  # pyright: ignore[reportMissingImports]

    config = Qwen3Config(**{key: value for key, value in file.told.items() if key != "architectures"})
    config._attn_implementation = "eager"
    return config


def dense(query: Any, keys: int, file: File) -> Any:
    """Returns the mask of a block of rows at the positions `query` over all positions before its end, to be added."""
    import torch  # pyright: ignore[reportMissingImports]

    key, query = torch.arange(keys)[None], query[:, None]
    seen = key >= 0
    if file.told.get("dflash_config", {}).get("causal"):
        seen = seen & (key <= query)
    if "sliding_attention" in file.told["layer_types"]:
        seen = seen & (key > query - file.told["sliding_window"])
    return torch.where(seen.expand(len(query), keys), 0.0, -torch.inf)[None, None]


def draft(name: str, file: File, zlab: Any, deepspec: Any, jetspec: Any) -> dict[str, Any]:
    """Plays two rounds of a head."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import DynamicCache  # pyright: ignore[reportMissingImports]

    ours, own = file.layout == "deepspec", file.told.get("dflash_config", {})
    jets = own.get("causal_head", False)
    published = jetspec.DFlashDraftModel if jets else zlab.DFlashDraftModel
    model = (deepspec.Qwen3DSparkModel if ours else published)(config_of(file)).eval()
    held = {key: torch.from_numpy(a) for key, a in file.held.items()}
    table = held.get("embed_tokens.weight")
    unknown = model.load_state_dict(held, strict=True)
    assert not any(unknown)
    taps, tokens, embed, project = (torch.from_numpy(a) for a in inputs(name))
    embed, project = (embed, project) if table is None else (table, held["lm_head.weight"])
    found: dict[str, Any] = {"context": rounded(model.hidden_norm(model.fc(taps))[0, -2:]), "rounds": []}
    cache, read, most = DynamicCache(), 0, 0.0
    for root in ROOTS:
        block = torch.full((1, BLOCK), file.told.get("mask_token_id", V - 1))
        block[0, 0] = tokens[0, root]
        more = {"past_key_values": cache, "use_cache": True, "noise_embedding": embed[block]}
        more |= {"position_ids": torch.arange(read, root + BLOCK)[None]}
        if not jets:  # JetSpec's code makes its own mask
            more |= {"attention_mask": dense(torch.arange(root, root + BLOCK), root + BLOCK, file)}
        if ours:
            states = model._forward_backbone(target_hidden_states=taps[:, read:root], **more)
        else:
            states = model(target_hidden=taps[:, read:root], **more)
            states = states[:, :-1] if own.get("draft_shift") else states[:, 1:]
        cache.crop(-BLOCK)
        read = root
        logits = states @ project.T
        one: dict[str, Any] = {"states": rounded(states[0])}
        before = tokens[:, root : root + BLOCK]
        if ours and model.markov_head is not None:
            logits = model.markov_head.apply_block_logits(
                logits[:, None], token_ids=before[:, None], hidden_states=states[:, None]
            )[:, 0]
        if ours and model.confidence_head is not None:
            certain = model.predict_confidence_step(states, before).reshape(-1)
            one["certainty"] = rounded(certain[None])[0]
        found["rounds"].append(one | {"logits": rounded(logits[0])})
        most = max(most, float(logits.abs().max()))
    print(f"{name}: logits up to {most:.2f}")
    return found


def train(name: str, file: File, deepspec: Any) -> dict[str, Any]:
    """Takes the loss and the gradients of a step in training on two texts."""
    import torch  # pyright: ignore[reportMissingImports]

    settings = TRAINED[name]
    config = config_of(file)
    config.num_anchors = settings["anchors"]
    model = deepspec.Qwen3DSparkModel(config)
    model.load_state_dict({key: torch.from_numpy(a) for key, a in file.held.items()}, strict=True)
    model.set_embedding_head_trainable(False)
    tokens, mask, features = (torch.from_numpy(a) for a in supervision(name))
    drawn: list[Any] = []
    published = sys.modules["deepspec.modeling.dspark.common"].sample_anchor_positions

    def draw(**more: Any) -> Any:
        torch.manual_seed(SEEDS["anchors"])
        drawn.append(published(**more))
        return drawn[-1]

    deepspec.sample_anchor_positions = draw
    outputs = model(tokens, features[..., E:], mask.float(), features[..., :E])
    losses = sys.modules["deepspec.modeling.dspark.loss"]
    names = {"ce": "ce_loss_alpha", "l1": "l1_loss_alpha", "confidence": "confidence_head_alpha"}
    weights = {names[key]: value for key, value in settings["weights"].items()}
    loss = losses.compute_dspark_loss(outputs=outputs, loss_decay_gamma=4.0, **weights)
    loss.backward()
    metrics = {
        key.removeprefix("train/"): entry for key, entry in sys.modules["deepspec.utils.metrics"]._metrics.items()
    }

    def ratio(key: str) -> float:
        return float(metrics[key]["num"][-1] / metrics[key]["den"][-1])

    gradients = {key: a.grad for key, a in model.named_parameters() if a.grad is not None}
    along = directions(name, {key: tuple(a.shape) for key, a in gradients.items()})
    anchors, kept = drawn[-1]
    print(f"{name}: loss {loss.item():.4f}, {len(gradients)} gradients")
    return {
        "anchors": [row[keep].tolist() for row, keep in zip(anchors, kept)],
        "loss": loss.item(),
        "acceptance": [ratio(f"accept_rate@{k}") for k in range(BLOCK)],
        "tau": ratio("tau_probabilistic"),
        "gradients": {
            key: [float(a.norm()), float((a * torch.from_numpy(along[key])).sum())] for key, a in gradients.items()
        },
    }


def load(dflash: pathlib.Path, checkout: pathlib.Path, jetspec: pathlib.Path) -> tuple[Any, Any, Any]:
    """Returns the modules of the checkouts, with dense masks in place of those of a kernel."""
    import torch  # pyright: ignore[reportMissingImports]

    sys.path[:0] = [str(dflash / "dflash"), str(checkout)]
    zlab = importlib.import_module("model")
    sys.modules["deepspec.utils"] = types.ModuleType("deepspec.utils")  # its own imports more than the heads need
    sys.modules["deepspec.utils"].__path__ = [str(checkout / "deepspec/utils")]  # pyright: ignore[reportAttributeAccessIssue]
    package = types.ModuleType("deepspec.modeling.dspark")
    package.__path__ = [str(checkout / "deepspec/modeling/dspark")]
    sys.modules["deepspec.modeling.dspark"] = package
    deepspec = importlib.import_module("deepspec.modeling.dspark.qwen3.modeling")
    importlib.import_module("deepspec.modeling.dspark.loss")

    def mask_of(seen: Any, B: int, H: Any, Q_LEN: int, KV_LEN: int, device: Any) -> Any:
        rows, query, key = torch.arange(B)[:, None, None], torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)
        # A block that is not kept sees nothing; finite, so that its rows are numbers.
        return torch.where(seen(rows, None, query, key), 0.0, -1e30)[:, None]

    sys.modules["deepspec.modeling.dspark.common"].create_block_mask = mask_of  # pyright: ignore[reportAttributeAccessIssue]
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    sys.path[:0] = [str(jetspec / "jetspec/models")]
    return zlab, deepspec, importlib.import_module("draft_head")


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dflash", type=pathlib.Path)
    parser.add_argument("deepspec", type=pathlib.Path)
    parser.add_argument("jetspec", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/golden"))
    args = parser.parse_args()
    zlab, deepspec, jetspec = load(args.dflash, args.deepspec, args.jetspec)
    systems = ("z-lab/dflash", "deepseek-ai/DeepSpec", "hao-ai-lab/JetSpec")
    source = {"source": ", ".join(f"github.com/{name}" for name in systems), "torch": torch.__version__}
    with torch.no_grad():
        drafted = {name: draft(name, file, zlab, deepspec, jetspec) for name, file in CASES.items()}
    trained = {name: train(name, CASES[name], deepspec) for name in TRAINED}
    for name, cases in (("dflash.json", drafted), ("dflash_losses.json", trained)):
        text = json.dumps(source | {"cases": cases}, separators=(",", ":"))
        (args.out / name).write_text(text + "\n")


if __name__ == "__main__":
    main()
