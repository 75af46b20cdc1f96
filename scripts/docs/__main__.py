"""Writes what the documentation takes from the code and from records: the tables of members, the pictures, the chart.

python -m scripts.docs
"""

from scripts.docs import chart, members, pictures

PICTURES = pictures.PICTURES | {"docs/speedup.svg": chart.speedups}
"""What draws each picture, by its path."""


def main() -> None:
    """Writes all of them."""
    members.main()
    for path, draw in PICTURES.items():
        (pictures.ROOT / path).write_text(draw())
        print(path)


if __name__ == "__main__":
    main()
