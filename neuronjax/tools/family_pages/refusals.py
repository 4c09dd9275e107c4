"""Every refusal of a page: contract rows, and options that refuse."""

import string
from collections.abc import Iterable

from neuronjax.primitives.contracts import CONTRACTS, Contract
from neuronjax.tools.family_pages.arguments import refused_options
from neuronjax.tools.family_pages.public import public
from neuronjax.tools.family_pages.table import code, table


def prose(message: str) -> str:
    """The message of a contract as prose: fields show their expression."""
    parts = []
    for text, field, _, _ in string.Formatter().parse(message):
        parts.append(text.replace("*", "\\*"))
        if field is not None:
            parts.append(f"*{field}*")
    return "".join(parts).replace("|", "\\|")


def rows(functions: Iterable[str]) -> list[Contract]:
    """The rows that some of `functions` keep."""
    wanted = {*functions}
    return [row for row in CONTRACTS.values() if wanted & {*row.functions}]


def kind(row: Contract) -> str:
    """Whether mathematics or the chip refuse, and in whose words."""
    return row.tag + (", to the letter" if row.literal else "")


def refusal_sections(functions: Iterable[str]) -> list[str]:
    """The table of the contract rows, and that of the options that refuse."""
    functions = tuple(functions)
    refused = [
        (f"`{function}`", f"`{option}`", reason.removeprefix(f"{function}: "))
        for function in functions
        for option, reason in refused_options(public(function)).items()
    ]
    options = table(("function", "option", "refused"), refused)
    kept = [
        (
            row.id,
            code(f for f in row.functions if f in functions),
            kind(row),
            prose(row.message).removeprefix("*function*: "),
        )
        for row in rows(functions)
    ]
    contracts = table(("rule", "functions", "kind", "message"), kept)
    if not contracts and not options:
        return []
    told = (
        "`math` is refused always; `hw` is a limit of the chip, which "
        "`neuronjax.can` reports and only tiles are refused for."
    )
    return ["## Refusals", told if contracts else "", contracts, options]
