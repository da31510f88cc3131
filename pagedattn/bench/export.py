"""The demo model as other engines read it, in float32.

    python -P export.py FILE.gguf FOLDER

Writes FOLDER/model (Hugging Face's format) and FOLDER/model.gguf. The values are
those that the file's quantised weights stand for, so every engine computes the same.
Runs where transformers, accelerate and gguf are; imports nothing of ours.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize
from safetensors.torch import save_file

FLOAT32 = 0  # GGUF's number for a file of float32 tensors
EOS = 2
TIED = "lm_head.weight"  # the demo model's head is its embedding


def write_gguf(source: Path, target: Path) -> None:
    """Write the GGUF file `source` with its tensors in float32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        value = FLOAT32 if name == "general.file_type" else field.contents()
        inner = field.types[-1] if kind is GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(source: Path, target: Path) -> None:
    """Write the GGUF file `source` as a float32 Hugging Face folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    file = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **file)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, dtype=torch.float32, **file
    )
    del model.config.quantization_config  # no longer true
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)
    GenerationConfig(eos_token_id=EOS, pad_token_id=EOS).save_pretrained(target)
    tokenizer.save_pretrained(target)
    weights = {n: w.contiguous() for n, w in model.state_dict().items() if n != TIED}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Write both, unless they are there."""
    source, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    for write, target in (
        (write_folder, folder / "model"),
        (write_gguf, folder / "model.gguf"),
    ):
        if not target.exists():
            write(source, target)


if __name__ == "__main__":
    main()
