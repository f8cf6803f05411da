"""Strategies: on which devices a step runs and what is joined between them. `DataParallel` is the default."""

from fitflax.parallel.base import Strategy
from fitflax.parallel.data_parallel import DataParallel

__all__ = ["DataParallel", "Strategy"]
