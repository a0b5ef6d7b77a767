"""The way of a block through the node."""
