"""Renders the figures of README.md and docs/ from the records in measurements/: `make figures`.

python -m scripts.figures            # write the blocks
python -m scripts.figures --check    # exit status 1 if a page differs from its records
"""

import argparse
import sys

from jaxspec.bench.measurements import RECORDS_FOLDER
from scripts.figures.pages import ROOT, pages, rendered
from scripts.figures.records import read_records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, records, stale = parser.parse_args().check, read_records(ROOT / RECORDS_FOLDER), []
    for page in pages():
        text = page.read_text()
        made = rendered(text, records)
        if made != text:
            stale.append(page.relative_to(ROOT))
            if not check:
                page.write_text(made)
    for page in stale:
        print(f"{page}: " + ("differs from its records; run `make figures`" if check else "written"))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
