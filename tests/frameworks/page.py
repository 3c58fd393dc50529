"""Lines of the documents that tests run as they are."""

import itertools
import textwrap
from pathlib import Path

import megatron_magi

DOCS = Path(megatron_magi.__file__).parents[1] / "docs"


def blocks(page, heading):
    """Indented blocks of code of the part of a page under a heading, but those of lists."""
    lines = (DOCS / page).read_text().splitlines()
    begin = lines.index(heading) + 1
    level = heading.split()[0]
    part = itertools.takewhile(
        lambda line: not line.startswith("#") or len(line.split()[0]) > len(level), lines[begin:]
    )
    found, before = [[]], ""
    for line in part:
        is_code = line.startswith("    ") and (found[-1] or not before)
        if is_code or (not line and found[-1]):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
        before = line
    return [textwrap.dedent("\n".join(block)).strip() for block in found if block]
