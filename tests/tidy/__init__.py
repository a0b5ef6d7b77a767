"""How the code reads, kept by tests."""
