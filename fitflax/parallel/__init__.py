"""Strategies: how the state and batches are laid out on devices, and how steps are compiled. `DataParallel` is the default."""

from fitflax.parallel import processes
from fitflax.parallel.data_parallel import DataParallel, check_replicas
from fitflax.parallel.launch import initialize
from fitflax.parallel.sharded import Sharded
from fitflax.parallel.strategy import Strategy

__all__ = ["DataParallel", "Sharded", "Strategy", "check_replicas", "initialize", "processes"]
