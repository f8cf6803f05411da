"""GPT-2 and ViT-B/16 in PyTorch, compiled by `torch.compile` and trained by Lightning with bfloat16 precision, on a GPU if there is one."""

import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from benchmarks.real.contenders import Contender, Stretch, batches_of
from benchmarks.real.workloads import SEED

try:
    import lightning.pytorch as pl
except ModuleNotFoundError:
    import pytorch_lightning as pl

EPSILON = 1e-6


class Block(nn.Module):
    """A transformer block with the norms before attention and MLP."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width, eps=EPSILON), nn.LayerNorm(width, eps=EPSILON)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """A decoder of tokens. The output layer is tied to the embedding."""

    def __init__(self, vocabulary: int = 50257, positions: int = 1024, width: int = 768, heads: int = 12, blocks: int = 12) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        return F.linear(self.norm(self.blocks(x)), self.wte.weight).float()


class ViT(nn.Module):
    """A vision transformer with a class token, for images `[batch, side, side, 3]`."""

    def __init__(self, side: int, classes: int = 1000, patch: int = 16, width: int = 768, heads: int = 12, blocks: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width, eps=EPSILON), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0]).float()


class _Module(pl.LightningModule):
    """AdamW with warm-up and cosine decay, and a mask for weight decay."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.model = torch.compile(model)
        decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, learning_rate, betas=(0.9, 0.95), eps=1e-8)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._scale)

    @staticmethod
    def _scale(step: int) -> float:
        return step / 100 if step < 100 else 0.5 * (1 + math.cos(math.pi * min(1.0, (step - 100) / 9900)))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(y))
        return loss

    def configure_optimizers(self) -> Any:
        return [self._optimizer], [{"scheduler": self._schedule, "interval": "step"}]


class _Steps(IterableDataset):  # type: ignore[type-arg]
    """A dataset with `steps` batches per epoch, which repeats the same batches."""

    def __init__(self, contender: Contender) -> None:
        self.steps = 0
        self._batches = batches_of(contender.x, contender.y.astype(np.int64), contender.batch)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.steps):
            x, y = next(self._batches)
            yield torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(np.ascontiguousarray(y))


class _Marks(pl.Callback):
    """Records when the epoch begins."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.marks.append((time.perf_counter(), time.thread_time()))


class Lightning(Contender):
    """Lightning's `Trainer.fit`, with `torch.compile` and `bf16-mixed`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._has_gpu = torch.cuda.is_available()
        if self.size == "full" and not self._has_gpu:
            raise RuntimeError("PyTorch has no GPU")
        sizes = self.workload.sizes[self.size]
        torch.manual_seed(SEED)
        model = GPT2(**sizes.model) if self.workload.name == "gpt2" else ViT(sizes.length, **sizes.model)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self._module, self._data, self._watch = _Module(model, self.workload.learning_rate), _Steps(self), _Marks()
        quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
        warnings.filterwarnings("ignore", module="lightning|pytorch_lightning")
        device: Any = {"accelerator": "gpu" if self._has_gpu else "cpu", "devices": 1, "precision": "bf16-mixed"}
        self._trainer = pl.Trainer(**device, max_epochs=1, num_sanity_val_steps=0, gradient_clip_val=1.0, callbacks=[self._watch], **quiet)
        self._calls = 0

    @override
    def train(self, steps: int, *, validates: bool = False) -> Stretch:
        self._calls += 1
        self._data.steps = steps
        self._trainer.fit_loop.max_epochs = self._calls
        self._trainer.fit(self._module, DataLoader(self._data, batch_size=None))
        if self._has_gpu:
            torch.cuda.synchronize()
        began, host = self._watch.marks[-1]
        return Stretch(time.perf_counter() - began, time.thread_time() - host, float(self._trainer.callback_metrics["loss"]))

    @override
    def evaluate(self) -> float:
        raise NotImplementedError("Only training is compared with Lightning.")

    predict = evaluate
