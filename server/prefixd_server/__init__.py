"""The prefixd daemon."""

__version__ = "0.1.0"
