"""Callbacks: what happens beside the steps of a run. Subclass `Callback` for your own."""

from fitflax.callbacks.base import Callback, Phase, TrainerView
from fitflax.callbacks.best_checkpoint import BestCheckpoint
from fitflax.callbacks.early_stopping import EarlyStopping
from fitflax.callbacks.lambda_callback import LambdaCallback
from fitflax.callbacks.model_checkpoint import ModelCheckpoint
from fitflax.callbacks.progress_bar import ProgressBar
from fitflax.callbacks.terminate_on_nan import TerminateOnNaN

__all__ = ["BestCheckpoint", "Callback", "EarlyStopping", "LambdaCallback", "ModelCheckpoint", "Phase", "ProgressBar", "TerminateOnNaN", "TrainerView"]
