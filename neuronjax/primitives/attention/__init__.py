"""The attention family: prefill, decode, backward."""
