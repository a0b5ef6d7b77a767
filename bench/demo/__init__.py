"""The demo: two engine processes share the KV of a long prefix through one daemon."""
