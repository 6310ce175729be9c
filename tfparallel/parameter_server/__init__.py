"""Parameter servers: roles, placement of variables, and updates that workers hand in one by one."""

from tfparallel.parameter_server.cluster import Timeouts

__all__ = ["Timeouts"]
