"""The decoder stack of Llama 3 in prefill: every layer, forwards and backwards."""
