"""The single truth about blocks."""
