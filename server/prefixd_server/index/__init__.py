"""The durable index of the NVMe tier."""
