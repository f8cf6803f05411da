"""Callbacks, which `fit` calls at fixed points of a run. Subclass `Callback` to write a custom one."""

import sys

from fitflax.callbacks import debugging, early_stopping, epoch_files, learning_rate, summaries
from fitflax.callbacks.base import Callback, Phase, TrainerView
from fitflax.callbacks.best_checkpoint import BestCheckpoint
from fitflax.callbacks.debugging import LambdaCallback, Profiler, SummaryLogger, TerminateOnNaN, Watchdog
from fitflax.callbacks.early_stopping import EarlyStopping
from fitflax.callbacks.epoch_files import CSVLogger, JSONLogger
from fitflax.callbacks.learning_rate import LearningRateScheduler, ReduceLROnPlateau
from fitflax.callbacks.model_checkpoint import ModelCheckpoint
from fitflax.callbacks.preemption_notice import PreemptionNotice
from fitflax.callbacks.progress_bar import ProgressBar
from fitflax.callbacks.summaries import FigureSummary, HistogramSummary, ImageSummary
from fitflax.callbacks.tensorboard import TensorBoard

__all__ = [
    "BestCheckpoint",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "FigureSummary",
    "HistogramSummary",
    "ImageSummary",
    "JSONLogger",
    "LambdaCallback",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "Phase",
    "PreemptionNotice",
    "Profiler",
    "ProgressBar",
    "ReduceLROnPlateau",
    "SummaryLogger",
    "TensorBoard",
    "TerminateOnNaN",
    "TrainerView",
    "Watchdog",
]

# The modules that defined callbacks in version 0.1, whose names are in pickles of scikit-learn estimators.
_MOVED = {
    debugging: ("lambda_callback", "profiler", "summary_logger", "terminate_on_nan", "watchdog"),
    early_stopping: ("monitor",),
    epoch_files: ("csv_logger", "json_logger"),
    learning_rate: ("learning_rate_scheduler", "reduce_lr_on_plateau"),
    summaries: ("media",),
}
sys.modules.update({f"{__name__}.{name}": module for module, names in _MOVED.items() for name in names})
