"""fp8 values, their scales, and products with them."""
