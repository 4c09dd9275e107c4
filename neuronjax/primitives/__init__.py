"""What a user calls: checks, the macro primitives and their derivatives."""
