"""Meshes, and what each family may split over them."""
