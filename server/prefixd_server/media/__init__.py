"""Slots and bytes, never keys."""
