"""Feed-forward experts over blocks of tokens, forwards and backwards."""
