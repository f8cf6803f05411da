"""The models in examples/pretrained match those of transformers: random weights, loaded with the mappings, give equal outputs and are saved unchanged."""

import importlib

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import fitflax

torch = pytest.importorskip("torch", reason="make peers installs it")
transformers = pytest.importorskip("transformers", reason="make peers installs it")

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 31, (3, 9)).astype(np.int32)
MASK = (np.arange(9) < np.array([[9], [5], [7]])).astype(np.int32)
SEGMENTS = (np.arange(9) >= 4).astype(np.int32) * np.ones((3, 1), np.int32)
IMAGES = RNG.normal(size=(2, 32, 32, 3)).astype(np.float32)


def gpt2(kind):
    module = importlib.import_module("examples.pretrained.gpt2")
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=31, n_positions=16, n_embd=24, n_layer=2, n_head=3))
    sizes = {"vocabulary": 31, "positions": 16, "width": 24, "heads": 3, "blocks": 2}
    if kind == "linen":
        return peer, module.GPT2(**sizes), module.mapping(3), (TOKENS,), {"input_ids": TOKENS}
    return peer, module.NNXGPT2(**sizes, rngs=nnx.Rngs(0)), module.mapping(3, block="blocks/{layer}"), (TOKENS,), {"input_ids": TOKENS}


def bert(kind):
    module = importlib.import_module("examples.pretrained.bert")
    names = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "max_position_embeddings": 16}
    peer = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=31, num_labels=4, **names))
    sizes = {"classes": 4, "vocabulary": 31, "positions": 16, "width": 24, "heads": 3, "layers": 2, "hidden": 40}
    inputs = {"input_ids": TOKENS, "attention_mask": MASK, "token_type_ids": SEGMENTS}
    if kind == "linen":
        return peer, module.Bert(**sizes), module.mapping(3), (TOKENS, MASK, SEGMENTS), inputs
    return peer, module.NNXBert(**sizes, rngs=nnx.Rngs(0)), module.mapping(3, layer="layers/{layer}"), (TOKENS, MASK, SEGMENTS), inputs


def vit(kind):
    module = importlib.import_module("examples.pretrained.vit")
    names = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "image_size": 32, "patch_size": 8}
    peer = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=5, **names))
    sizes = {"classes": 5, "patch": 8, "width": 24, "heads": 3, "blocks": 2, "hidden": 40}
    inputs = {"pixel_values": IMAGES.transpose(0, 3, 1, 2)}
    if kind == "linen":
        return peer, module.ViT(**sizes), module.mapping(3), (IMAGES,), inputs
    return peer, module.NNXViT(**sizes, size=32, rngs=nnx.Rngs(0)), module.mapping(3, block="blocks/{layer}"), (IMAGES,), inputs


def resnet(kind):
    module = importlib.import_module("examples.pretrained.resnet")
    names = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "bottleneck"}
    peer = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=5, **names))
    with torch.no_grad():  # Statistics other than 0 and 1.
        for name, buffer in peer.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand_like(buffer) + (0.5 if name.endswith("var") else 0))
    sizes = {"classes": 5, "stages": (2, 2), "features": (16, 32), "stem": 8}
    inputs = {"pixel_values": IMAGES.transpose(0, 3, 1, 2)}
    if kind == "linen":
        return peer, module.ResNet(**sizes), module.mapping(), (IMAGES,), inputs
    return peer, module.NNXResNet(**sizes, rngs=nnx.Rngs(0)), module.mapping(block="stages/{stage}/{block}"), (IMAGES,), inputs


def outputs_of(peer, inputs):
    peer.eval()
    with torch.no_grad():
        return peer(**{name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in inputs.items()}).logits.numpy()


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("case", [gpt2, bert, vit, resnet])
def test_outputs_match_transformers_and_weights_are_saved_back_unchanged(case, kind, tmp_path):
    torch.manual_seed(0)
    peer, model, mapping, x, inputs = case(kind)
    with torch.no_grad():  # Biases and scales other than 0 and 1.
        for parameter in peer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    peer.save_pretrained(tmp_path / "theirs")
    trainer = fitflax.Trainer(model)
    report = trainer.load_weights(tmp_path / "theirs", mapping=mapping)
    assert not report.initialized and not report.unused
    with jax.default_matmul_precision("highest"):
        ours = trainer.predict(x if len(x) > 1 else x[0])
    np.testing.assert_allclose(ours, outputs_of(peer, inputs), rtol=1e-5, atol=1e-5)

    trainer.save_weights(tmp_path / "theirs/model.safetensors", mapping=mapping)
    again = type(peer).from_pretrained(tmp_path / "theirs")
    np.testing.assert_array_equal(outputs_of(again, inputs), outputs_of(peer, inputs))
    peer.save_pretrained(tmp_path / "once_more")
    written, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "once_more"))
    assert written.keys() == wanted.keys() and all(np.array_equal(written[name], wanted[name]) for name in wanted)
