"""Large numbers in words."""

_PREFIXES = ("", "k", "M", "G", "T", "P")


def with_prefix(number: float, unit: str) -> str:
    """Three digits and a prefix.

    Example:
        >>> with_prefix(2_718_000_000, "FLOP"), with_prefix(999.7, "B")
        ('2.72 GFLOP', '1 kB')
    """
    size, power = float(f"{number:.3g}"), 0
    while size >= 1000 and power + 1 < len(_PREFIXES):
        size, power = size / 1000, power + 1
    return f"{size:.3g} {_PREFIXES[power]}{unit}"
