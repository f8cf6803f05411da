"""Rules for layers of PyTorch, in both directions. `test_pretrained.py` uses them for whole models."""

import numpy as np

from fitflax.integrations import torch_layers
from tests.checkpoints.samples import both_ways

RNG = np.random.default_rng(0)


def test_batch_norm_works_without_its_counter():
    arrays = {f"bn.{name}": RNG.normal(size=5) for name in ("weight", "bias", "running_mean", "running_var")}
    assert len(both_ways(arrays, torch_layers.batch_norm("bn", "bn", counter=False))) == 4


def test_torch_layers_round_trip_unchanged():
    layers = {
        "dense.weight": (4, 6), "dense.bias": (4,), "conv1d.weight": (6, 4), "conv1d.bias": (4,), "conv.weight": (8, 3, 5, 7), "conv.bias": (8,),
        "embed.weight": (9, 6), "norm.weight": (6,), "norm.bias": (6,), "fused.in_proj_weight": (18, 6), "fused.in_proj_bias": (18,),
        "fused.out_proj.weight": (6, 6),
        "fused.out_proj.bias": (6,),
        **{f"attn.{name}.{kind}": (6, 6)[: 2 if kind == "weight" else 1] for name in "qkvo" for kind in ("weight", "bias")},
        **{f"bn.{name}": (5,) for name in ("weight", "bias", "running_mean", "running_var")},
    }  # fmt: skip
    arrays = {name: RNG.normal(size=shape) for name, shape in layers.items()} | {"bn.num_batches_tracked": np.zeros((), np.int64)}
    rules = [
        *torch_layers.dense("dense", "dense"),
        *torch_layers.dense("conv1d", "conv1d", transposed=False),
        *torch_layers.conv("conv", "conv"),
        *torch_layers.embedding("embed", "embed"),
        *torch_layers.norm("norm", "norm"),
        *torch_layers.batch_norm("bn", "bn"),
        *torch_layers.fused_attention("fused.in_proj_", "fused.out_proj", "fused", num_heads=2),
        *torch_layers.attention({"query": "attn.q", "key": "attn.k", "value": "attn.v", "out": "attn.o"}, "attn", num_heads=3),
    ]
    ours = both_ways(arrays, rules)
    assert ours["params/conv/kernel"].shape == (5, 7, 3, 8) and ours["params/fused/query/kernel"].shape == (6, 2, 3)
    assert np.array_equal(ours["params/attn/key/kernel"].reshape(6, 6), arrays["attn.k.weight"].T) and ours["params/attn/out/kernel"].shape == (3, 2, 6)
