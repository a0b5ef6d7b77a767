"""Builds the daemon and its command line."""
