"""Checkpoints as arrays under Hugging Face names: GGUF files, safetensors folders."""

from neuronjax.models.checkpoint.read import read_checkpoint as read_checkpoint
from neuronjax.models.checkpoint.read import read_config as read_config
