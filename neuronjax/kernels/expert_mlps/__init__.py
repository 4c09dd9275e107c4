"""Feed-forward experts of a decode step, over the block loop of `blockwise_mm`."""
