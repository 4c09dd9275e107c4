"""The `neuronjax` command and what it is made of."""
