"""Times and memory of NeuronJAX beside its peers, measured in one interleaved run."""
