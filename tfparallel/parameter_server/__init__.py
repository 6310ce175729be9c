"""Parameter servers: roles, placement of variables, and updates that workers hand in one by one."""

from tfparallel.parameter_server.cluster import Timeouts
from tfparallel.parameter_server.evaluator import (
    CheckpointsForEvaluator,
    evaluate_checkpoints,
    is_evaluator,
)

__all__ = ["CheckpointsForEvaluator", "Timeouts", "evaluate_checkpoints", "is_evaluator"]
