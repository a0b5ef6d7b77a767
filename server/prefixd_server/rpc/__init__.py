"""The wire: check, call, translate."""
