"""Loads a model from a GGUF file or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch

from worker.model.gguf_file import load_gguf
from worker.model.hf_folder import load_folder
from worker.model.loaded_model import LoadedModel, ModelLoadError

__all__ = ["LoadedModel", "ModelLoadError", "load_model"]


def load_model(path: Path, dtype: torch.dtype, name: str = "") -> LoadedModel:
    """Reads a whole model into memory, tensor by tensor: at no time more than one tensor is there twice.

    Supported are GGUF files of the architectures llama (with SmolLM2 and Mistral), qwen2, qwen3 and gemma3, in every
    quantization that the `gguf` package can undo, with byte-level or SentencePiece BPE vocabularies; and folders with
    config.json, safetensors and tokenizer.json of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM,
    Qwen3ForCausalLM and Gemma3ForCausalLM.

    Args:
        path: a .gguf file, a folder with exactly one, or a Hugging Face folder.
        dtype: float32, bfloat16 or float16; all tensors are converted to it.
        name: what the model is called; the file's or folder's name if empty.

    Raises:
        ModelLoadError: there is no model, or one that is not supported; says what is.
    """
    if path.is_dir():
        if (path / "config.json").is_file():
            return load_folder(path, dtype, name or path.resolve().name)
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelLoadError(f"{path} has no config.json and {len(files)} .gguf files; expected one or the other")
        path = files[0]
    if not path.is_file():
        raise ModelLoadError(f"{path} does not exist; expected a .gguf file or a Hugging Face folder")
    return load_gguf(path, dtype, name or path.stem)
