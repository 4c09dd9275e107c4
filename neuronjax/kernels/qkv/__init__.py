"""The projection to query, key and value heads, and the plain form of its equations."""
