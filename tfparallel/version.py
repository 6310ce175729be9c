"""The version of tfparallel, in the one place that pyproject.toml and users read it from."""

__version__ = "0.1.0"
