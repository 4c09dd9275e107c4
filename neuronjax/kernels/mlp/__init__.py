"""The feed-forward block: dense weights, and the plain form of the same equations."""
