"""Converts a GGUF file to a directory in Hugging Face's layout, in float32, for systems that cannot read GGUF."""

import os
import pathlib
import tempfile

import torch
from transformers import AutoModelForCausalLM


def folder_of(path):
    """Returns a directory and None, or for a GGUF file a converted directory and the object that removes it at exit."""
    if not path.endswith(".gguf"):
        return path, None
    folder, file = os.path.split(path)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    model.hf_quantizer = None  # otherwise save_pretrained refuses the dequantised model
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    place = tempfile.TemporaryDirectory()
    model.save_pretrained(place.name)
    return str(pathlib.Path(place.name)), place
