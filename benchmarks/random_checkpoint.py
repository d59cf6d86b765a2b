"""Write a checkpoint of LLaDA-8B's shape with random weights, made on the GPU, for timings without a download.

    python benchmarks/random_checkpoint.py /tmp/random-8b
    python inference_model.py LLaDA --checkpoint /tmp/random-8b --dataset problems --num_samples 2 --gen_len 32

Scores and logits keep the spread of a trained model's, so that attention is not flat; the text is nonsense.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from sinks.families import MODELS

VOCABULARY, HIDDEN, LAYERS, HEADS, MLP = 126464, 4096, 32, 32, 12288
SHARD_BYTES = 4 * 2**30


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Official tensor names and shapes."""
    found: dict[str, tuple[int, ...]] = {"wte": (VOCABULARY, HIDDEN), "ln_f": (HIDDEN,), "ff_out": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        block = f"blocks.{layer}."
        found |= {block + name: (HIDDEN, HIDDEN) for name in ("q_proj", "k_proj", "v_proj", "attn_out")}
        found |= {block + name: (MLP, HIDDEN) for name in ("ff_proj", "up_proj")}
        found |= {block + "ff_out": (HIDDEN, MLP), block + "attn_norm": (HIDDEN,), block + "ff_norm": (HIDDEN,)}
    return {f"model.transformer.{name}.weight": shape for name, shape in found.items()}


def config(layers: int) -> dict[str, object]:
    """config.json with the values of LLaDA-8B and the ids of the embedded tokenizer."""
    official = json.loads((Path(MODELS["tiny"][1]) / "config.json").read_text(encoding="utf-8"))
    sizes = {"d_model": HIDDEN, "n_layers": layers, "n_heads": HEADS, "n_kv_heads": HEADS, "mlp_hidden_size": MLP}
    return official | sizes | {"vocab_size": VOCABULARY, "embedding_size": VOCABULARY, "max_sequence_length": 8192}


def write(folder: Path, layers: int, seed: int) -> None:
    """Shards, their index, config.json and the embedded tokenizer."""
    folder.mkdir(parents=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    shard: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    size, number = 0, 0

    def flush() -> None:
        nonlocal shard, size, number
        name = f"model-{number:05d}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard, size, number = {}, 0, number + 1

    for name, shape in tqdm(shapes(layers).items(), desc="tensors"):
        tensor = torch.ones(shape, device=device)
        if len(shape) > 1:
            tensor = torch.randn(shape, device=device, generator=generator) * shape[1] ** -0.5
        shard[name] = tensor.to(torch.bfloat16).cpu()
        size += shard[name].nbytes
        if size > SHARD_BYTES:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config(layers), indent=1))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODELS["tiny"][1]) / file, folder / file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.folder, options.layers, options.seed)
