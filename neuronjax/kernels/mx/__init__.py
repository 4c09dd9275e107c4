"""Block-scaled (MX) values: formats, blocks, layouts, and products with them."""
