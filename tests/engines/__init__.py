"""Engines and their connectors against the real daemon."""
