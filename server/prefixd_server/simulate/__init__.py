"""Replays request logs on a virtual clock."""
