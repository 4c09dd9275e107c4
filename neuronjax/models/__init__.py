"""Decoders built from `neuronjax.nn`, their checkpoints and their text."""

from neuronjax.models.config import LlamaConfig as LlamaConfig
from neuronjax.models.llama import Llama as Llama
from neuronjax.models.load import load_llama as load_llama
from neuronjax.models.mesh_decoder import MeshDecoder as MeshDecoder
from neuronjax.models.moe_config import MoEConfig as MoEConfig
from neuronjax.models.moe_lm import MoELM as MoELM
from neuronjax.models.perplexity import perplexity as perplexity
from neuronjax.models.pretrained import load_pretrained as load_pretrained
