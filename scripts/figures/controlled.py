"""Renders the records about processors and grammars as Markdown tables."""

from scripts.figures.tables import Values, between, table


def processors(values: Values) -> str:
    """Renders the share of a round's time that each processor adds."""
    names = list(dict.fromkeys(row["processor"] for rows in values.values() for row in rows))
    ratios = {(place, row["processor"]): row for place, rows in values.items() for row in rows}

    def cell(place: str, name: str) -> str:
        row = ratios.get((place, name))
        if row is None:
            return ""
        low, median, high = (100 * (value - 1) for value in row["ratio"])
        return f"{median:+.1f} % ({low:+.1f} to {high:+.1f})"

    plain = ["none, ms", *(f"{rows[0]['ms_without'][1]:.1f}" for rows in values.values())]
    rows = ([f"`{name}`", *(cell(place, name) for place in values)] for name in names)
    return table(["processor", *values], [plain, *rows])


def masks(values: Values) -> str:
    """Renders the agreement with llguidance, and what is refused."""
    rows, refused = [], []
    for name, found in values.items():
        cells = [name, str(found["given"]), str(found["schemas"])]
        for kind in ("expression", "schema"):
            states = found[f"{kind}: states"]
            cells += [f"{found[f'{kind}: equal states']:,} of {states:,}"]
        cells += [f"{found['schema: valid texts']} of {found['schema: finished texts']}"]
        rows.append(cells)
        refused += [[name, reason, str(count)] for reason, count in list(found["refused"].items())[:12]]
    headings = ["schemas", "given", "compiled", "states with equal masks, same expression",
                "states with equal masks, same schema", "finished texts that are valid"]  # fmt: skip
    more = table(["schemas", "why a schema is refused (the twelve most frequent reasons)", "number"], refused)
    return table(headings, rows) + ("\n" + more if refused else "")


def transformers(values: Values) -> str:
    """Renders the agreement with the logits processors of transformers."""
    rows = [[name, str(found["tokens"]), str(found["equal"]), f"{max(found['gaps'], default=0):.1g}",
             str(found["texts that the processor changed"])] for name, found in values.items()]  # fmt: skip
    return table(
        ["setting", "tokens", "equal to transformers' choice", "largest gap, logits", "texts that it changed"], rows
    )


def grammar_speed(values: Values) -> str:
    """Renders the speed of JSON with forced tokens beside plain decoding."""
    rows = [[row["text"], f"`{row['drafter']}`", str(row["tokens"]), str(row["rounds"]), between(row["plain"]),
             between(row["drafted"]), between(row["ratio"], 2)] for row in values["rows"]]  # fmt: skip
    headings = ["JSON of", "drafter", "tokens", "rounds", "tokens/s, plain", "tokens/s, drafted", "speed-up"]
    return table(headings, rows)


CONTROLLED = {
    "processors": processors, "masks": masks, "processors-transformers": transformers, "grammar-speed": grammar_speed,
}  # fmt: skip
