"""A directory of Hugging Face's layout out of a GGUF file, for peers that read no other; by transformers, float32."""

import os
import pathlib
import tempfile

import torch
from transformers import AutoModelForCausalLM


def folder_of(path):
    """The path itself where it is a directory; else a directory that is removed when the process ends."""
    if not path.endswith(".gguf"):
        return path, None
    folder, file = os.path.split(path)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    model.hf_quantizer = None  # it would refuse to be saved as what it now is
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    place = tempfile.TemporaryDirectory()
    model.save_pretrained(place.name)
    return str(pathlib.Path(place.name)), place
