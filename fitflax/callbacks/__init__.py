"""Callbacks, which `fit` calls at fixed points of a run. Subclass `Callback` to write a custom one."""

from fitflax.callbacks.base import Callback, Phase, TrainerView
from fitflax.callbacks.best_checkpoint import BestCheckpoint
from fitflax.callbacks.csv_logger import CSVLogger
from fitflax.callbacks.early_stopping import EarlyStopping
from fitflax.callbacks.json_logger import JSONLogger
from fitflax.callbacks.lambda_callback import LambdaCallback
from fitflax.callbacks.learning_rate_scheduler import LearningRateScheduler
from fitflax.callbacks.media import FigureSummary, HistogramSummary, ImageSummary
from fitflax.callbacks.model_checkpoint import ModelCheckpoint
from fitflax.callbacks.preemption_notice import PreemptionNotice
from fitflax.callbacks.profiler import Profiler
from fitflax.callbacks.progress_bar import ProgressBar
from fitflax.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from fitflax.callbacks.summary_logger import SummaryLogger
from fitflax.callbacks.tensorboard import TensorBoard
from fitflax.callbacks.terminate_on_nan import TerminateOnNaN
from fitflax.callbacks.watchdog import Watchdog

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
