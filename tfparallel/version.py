"""The version of tfparallel, in the one place that setup.py and users read it from."""

__version__ = "0.1.0"
