"""Fine-tunes a GPT-2 from a Hugging Face directory with LoRA, on Python's standard library, and writes a directory that transformers reads.

python examples/from_huggingface.py [--directory runs/from_huggingface] [--model DIRECTORY] [--steps 200]

Without `--model`, it creates a small model with random weights. It needs transformers and PyTorch to compare the results.
"""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import shutil

import numpy as np
from pretrained import gpt2

import fitflax
from fitflax import adapters, optimizers
from fitflax.callbacks import ModelCheckpoint

MODULES = ("ast", "calendar", "configparser", "difflib", "fractions", "heapq", "inspect", "shutil", "statistics", "textwrap")
CARD = """---
library_name: transformers
base_model: {base}
---
GPT-2, fine-tuned with LoRA of rank {rank} on the sources of Python's standard library; the adapters are merged into the weights.
"""


def make_model(directory: pathlib.Path) -> pathlib.Path:
    """Writes a small GPT-2 with random weights, with `save_pretrained`."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, initializer_range=0.1)
    transformers.GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


def windows(model: pathlib.Path, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns windows of tokens, `[windows, length]`, and for each token the one that follows it."""
    text = "".join(importlib.util.find_spec(name).loader.get_source(name) for name in MODULES)
    if (model / "tokenizer.json").exists():
        import transformers

        tokens = np.array(transformers.AutoTokenizer.from_pretrained(model)(text)["input_ids"], np.int32)
    else:
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)  # The vocabulary of the small model is bytes.
    count = (len(tokens) - 1) // length
    return tokens[: count * length].reshape(count, length), tokens[1 : count * length + 1].reshape(count, length)


def difference(directory: pathlib.Path, trainer: fitflax.Trainer, tokens: np.ndarray) -> float:
    """Returns the largest difference between the logits of a trainer and those of transformers with the model in a directory."""
    import torch
    import transformers

    model = transformers.GPT2LMHeadModel.from_pretrained(directory).eval()
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens).long()).logits.numpy()
    return float(np.abs(theirs - trainer.predict(tokens)).max())


def main(
    directory: str | pathlib.Path = "runs/from_huggingface",
    model: str | pathlib.Path | None = None,
    steps: int = 200,
    *,
    rank: int = 8,
    length: int = 64,
    verbose: int | str = "auto",
) -> dict[str, float]:
    """Fine-tunes a model; returns the loss before and after, and the differences from transformers for the loaded model and for the saved one."""
    directory = pathlib.Path(directory)
    source = make_model(directory / "base") if model is None else pathlib.Path(model)
    config = json.loads((source / "config.json").read_text())
    module, mapping = gpt2.GPT2.of(config), gpt2.mapping(config["n_head"])
    x, y = windows(source, length)
    held_out = (x[-64:], y[-64:])

    base = fitflax.Trainer(module)
    base.load_weights(source, mapping=mapping)
    read = difference(source, base, x[:4])

    trainer = fitflax.Trainer(adapters.lora(module, ["**/attention/*/kernel", "**/up", "**/down"], rank=rank))
    trainer.compile(optimizers.train_only(optimizers.get("adam", 1e-2), "lora"), "sparse_categorical_crossentropy")
    trainer.build((x[:1], y[:1]))
    trainer.load_weights(source, mapping=mapping, partial=True)
    before = trainer.evaluate(*held_out, verbose=0)["loss"]
    checkpoints = ModelCheckpoint(directory / "checkpoints", overwrite=True)
    trainer.fit(x[:-64], y[:-64], batch_size=16, steps=steps, callbacks=[checkpoints], resume="auto", verbose=verbose)
    after = trainer.evaluate(*held_out, verbose=0)["loss"]

    state = trainer.inference_state()
    base.replace_state(dataclasses.replace(state, params=adapters.merge(trainer.model, state.params)))
    tuned = directory / "tuned"
    base.save_weights(tuned / "model.safetensors", mapping=mapping)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, tuned / name)
    (tuned / "README.md").write_text(CARD.format(base=source.name, rank=rank))
    written = difference(tuned, base, x[:4])
    if verbose:
        print(f"loss on held-out text: {before:.3f} before, {after:.3f} after")
        print(f"largest difference from transformers: {read:.1e} after loading, {written:.1e} after saving")
        print(f"model for transformers: {tuned}")
    return {"before": before, "after": after, "read": read, "written": written}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int)
    main(**vars(parser.parse_args()))
