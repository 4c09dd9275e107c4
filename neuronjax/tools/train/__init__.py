"""Trains a decoder of macros on a text: settings, data, steps, checkpoints.

`config.TrainConfig` says what is trained, `loop.train` does it, `run.load_run` reads
what it left, `sample.sample` lets that speak. Nothing is imported here: orbax takes
seconds, and the settings alone are needed to explain the flags of a command.
"""
