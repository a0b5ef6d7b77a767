"""The prefixd client library: what an engine imports."""
