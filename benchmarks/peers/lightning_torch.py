"""Lightning with PyTorch on the CPU: the same models with the same parameters. It shuffles differently, so losses agree only roughly."""

from collections.abc import Callable

import numpy as np
from typing_extensions import override

from benchmarks.peers import Contender, Once, Setup, Stretch, Unavailable, Watch
from benchmarks.workloads import Workload, initial, make_data

try:
    import torch
except ModuleNotFoundError as error:
    raise Unavailable("torch is not installed") from error
try:
    import lightning.pytorch as pl
except ModuleNotFoundError:
    try:
        import pytorch_lightning as pl
    except ModuleNotFoundError as error:
        raise Unavailable("neither lightning nor pytorch_lightning is installed") from error
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset


class Dense(nn.Module):
    def __init__(self, inputs: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.names = [f"hidden_{index}" for index in range(len(hidden))]
        for name, before, width in zip(self.names, (inputs, *hidden), hidden, strict=False):
            self.add_module(name, nn.Linear(before, width))
        self.head = nn.Linear(hidden[-1], 10)

    def forward(self, x):
        for name in self.names:
            x = F.relu(getattr(self, name)(x))
        return self.head(x)


class CNN(nn.Module):
    def __init__(self, side: int, features: int) -> None:
        super().__init__()
        self.conv_0 = nn.Conv2d(1, features, 3, padding=1)
        self.conv_1 = nn.Conv2d(features, 2 * features, 3, padding=1)
        self.hidden = nn.Linear(2 * features * (side // 4) ** 2, 4 * features)
        self.head = nn.Linear(4 * features, 10)

    def forward(self, x):
        x = x.permute(0, 3, 1, 2)
        for conv in (self.conv_0, self.conv_1):
            x = F.max_pool2d(F.relu(conv(x)), 2)
        return self.head(F.relu(self.hidden(x.flatten(1))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_up = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        before = self.before_attention(x)
        query, key, value = (layer(before).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_up(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.before_head, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.before_head(self.blocks(self.embed(tokens) + self.positions)))


class ManyLeaves(nn.Module):
    def __init__(self, inputs: int, pairs: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(inputs) for _ in range(pairs))
        self.shifts = nn.ParameterList(torch.ones(inputs) for _ in range(pairs))
        self.head = nn.Linear(pairs * inputs, 10)

    def forward(self, x):
        return self.head(torch.tanh(x[:, None, :] * torch.stack(list(self.weights)) + torch.stack(list(self.shifts))).flatten(1))


MODELS: dict[str, Callable[..., nn.Module]] = {"dense": Dense, "cnn": CNN, "lm": Transformer, "leaves": ManyLeaves}


def linen_path(name: str, shape: tuple[int, ...]) -> str:
    """Returns the path in linen of a parameter of these models."""
    parts = name.split(".")
    if parts[0] in {"weights", "shifts"}:
        return f"leaves/{parts[0].removesuffix('s')}_{parts[1]}"
    if parts[0] == "positions":
        return "positions/table"
    if parts[0] == "blocks":
        _, index, layer, _ = parts
        parts = [f"attention_{index}/{layer}" if layer in {"query", "key", "value", "out"} else f"{layer}_{index}", parts[-1]]
    if parts[-1] == "weight":
        parts[-1] = "embedding" if parts[0] == "embed" else "kernel" if len(shape) > 1 else "scale"
    return "/".join(parts)


def linen_shape(path: str, shape: tuple[int, ...], heads: int) -> tuple[int, ...]:
    """Returns the shape of the parameter in linen: the output axis is last, and attention has an axis of heads."""
    if not path.endswith("kernel"):
        return shape
    outputs, inputs, *window = shape
    if "attention_" in path:
        return (heads, inputs // heads, outputs) if path.endswith("out/kernel") else (inputs, heads, outputs // heads)
    return (*window, inputs, outputs)


def share_parameters(model: nn.Module, heads: int) -> None:
    """Gives all parameters the initial values that the peers share.

    A hidden layer after convolutions has its inputs in another order than in linen. They are random, so this does not affect the measurements.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            path = linen_path(name, tuple(parameter.shape))
            value = initial(path, linen_shape(path, tuple(parameter.shape), heads))
            if path.endswith("kernel"):
                outputs, *rest = parameter.shape
                value = np.moveaxis(value.reshape(*rest[1:], rest[0], outputs), (-1, -2), (0, 1))
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)).reshape(parameter.shape))


class Module(pl.LightningModule):
    def __init__(self, workload: Workload, *, own_parameters: bool) -> None:
        super().__init__()
        self.model = MODELS[workload.kind](**workload.sizes)
        if not own_parameters:
            share_parameters(self.model, workload.sizes.get("heads", 1))
        optimizer = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[workload.optimizer]
        self._optimizer = optimizer(self.model.parameters(), workload.learning_rate)

    def training_step(self, batch, index):
        x, y = batch
        logits = self.model(x)
        loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        values = {"loss": loss, "accuracy": (logits.argmax(-1) == y).float().mean()}
        self.log_dict(values, prog_bar=True, on_step=False, on_epoch=True, batch_size=len(y))
        return loss

    def configure_optimizers(self):
        return self._optimizer  # The same in each call of fit, so that it keeps its moments.


class Events(pl.Callback):
    """Calls the functions of the current call."""

    def __init__(self) -> None:
        self.on_begin: Callable[[], None] = lambda: None
        self.on_step: Callable[[], None] | None = None

    def on_train_epoch_start(self, trainer, pl_module):
        self.on_begin()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.on_step is not None:
            self.on_step()


class Lightning(Contender):
    def __init__(self, workload: Workload, setup: Setup) -> None:
        x, y = make_data(workload)
        data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)))
        # Takes a batch by its indices, which is much faster than DataLoader(data, batch_size, shuffle=True), which takes rows one by one.
        self._loader = DataLoader(data, sampler=BatchSampler(RandomSampler(data), workload.batch_size, drop_last=False), batch_size=None)
        self._module = Module(workload, own_parameters=setup.own_parameters)
        self._events = Events()
        without = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
        self._trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, num_sanity_val_steps=0, callbacks=[self._events], **without)
        self._passes = 0

    @override
    def train(self, passes: int, on_first_step: Callable[[], None] | None = None) -> Stretch:
        watch = Watch()
        self._events.on_begin, self._events.on_step = watch.begin, None if on_first_step is None else Once(on_first_step)
        self._passes += passes
        self._trainer.fit_loop.max_epochs = self._passes
        self._trainer.fit(self._module, self._loader)
        found = self._trainer.callback_metrics
        return watch.stretch({name: float(found[name]) for name in ("loss", "accuracy")})

    @override
    def evaluate(self) -> Stretch:
        raise NotImplementedError("Only training is compared with Lightning.")

    predict = evaluate


def make(workload: Workload, setup: Setup) -> Contender:
    """Returns Lightning's `Trainer.fit`. Its progress bar draws on standard output, which the worker has replaced.

    Raises:
        Unavailable: The other peers would compute on a GPU.
    """
    if torch.cuda.is_available():
        raise Unavailable("compared on the CPU alone")
    return Lightning(workload, setup)
