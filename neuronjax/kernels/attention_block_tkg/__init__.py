"""The fused decode block: norm, QKV, rotation, attention, caches, output projection."""
