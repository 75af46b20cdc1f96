"""Converts a GGUF file to a directory in Hugging Face's layout, in float32, for systems that read no GGUF."""

import os
import pathlib
import tempfile

import torch
from transformers import AutoModelForCausalLM


def folder_of(path):
    """Returns the path if it is a directory; otherwise a converted one, with the object that removes it at exit."""
    if not path.endswith(".gguf"):
        return path, None
    folder, file = os.path.split(path)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    model.hf_quantizer = None  # or save_pretrained would refuse the dequantised model
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    place = tempfile.TemporaryDirectory()
    model.save_pretrained(place.name)
    return str(pathlib.Path(place.name)), place
