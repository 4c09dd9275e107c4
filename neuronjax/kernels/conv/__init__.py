"""Convolutions along one axis: all channels, and each channel alone."""
