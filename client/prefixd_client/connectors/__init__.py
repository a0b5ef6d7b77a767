"""Connectors of inference engines."""
