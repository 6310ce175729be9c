"""Parameter servers: roles, placement of variables, and updates that workers hand in one by one."""

from tfparallel.coordination.timeouts import Timeouts
from tfparallel.parameter_server.evaluator import (
    CheckpointsForEvaluator,
    evaluate_checkpoints,
    is_evaluator,
)
from tfparallel.parameter_server.recovery import ServerLost, WorkerLost

__all__ = [
    "CheckpointsForEvaluator",
    "ServerLost",
    "Timeouts",
    "WorkerLost",
    "evaluate_checkpoints",
    "is_evaluator",
]
