"""Established policies to compare with: over the prefix tree, and flat ones over single blocks."""
