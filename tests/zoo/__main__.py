"""``python -m tests.zoo`` tests the compiler on every model of the zoo; ``--page`` writes docs/coverage.md."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.zoo import ZOO
from tests.zoo.measure import MESHES, Coverage, Record, named
from tests.zoo.page import page
from tests.zoo.refused import REFUSED
from tests.zoo.sweep import measured

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"


def main() -> int:
    asked = _arguments()
    names = [n for n in ZOO if not asked.only or any(fnmatch.fnmatchcase(n, glob) for glob in asked.only)]
    found = {r.name: r for r in _stored(asked.json)}
    meshes = tuple(tuple(map(int, m.split("x"))) for m in asked.mesh or ()) or MESHES
    missing = [n for n in names if n not in found or not set(map(named, meshes)) <= set(found[n].equal)]
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        task = progress.add_task("models", total=len(missing))
        for record in measured(missing, asked.jobs, meshes):
            found[record.name] = record
            if asked.json:
                _store(asked.json, found)
            progress.update(task, advance=1, description=record.name)
    records = [found[n] for n in names if n in found]
    if asked.json is None or asked.page:
        Console().print(_table(records))
    if asked.page:
        PAGE.write_text(page(records, [(r.name, r.why) for r in REFUSED]))
    for record in records:
        for where, why in record.failures.items():
            console.print(f"{record.name} on {where}: {why}", markup=False)
    return int(not all(r.is_well for r in records))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", action="append", metavar="GLOB", help="names of models to test; may be repeated")
    parser.add_argument("--mesh", action="append", metavar="2x2", help="a mesh to use instead of all; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--json", type=Path, help="file that keeps results; models in it are not measured again")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    return parser.parse_args()


def _stored(path: Path | None) -> Iterator[Record]:
    if path is not None and path.exists():
        for row in json.loads(path.read_text()):
            coverage = row.pop("coverage")
            if coverage:
                coverage["without_rule"] = tuple(coverage["without_rule"])
            row["equal"] = tuple(row["equal"])
            yield Record(coverage=Coverage(**coverage) if coverage else None, **row)


def _store(path: Path, found: dict[str, Record]) -> None:
    path.write_text(json.dumps([dataclasses.asdict(r) for r in found.values()], indent=1))


def _table(records: list[Record]) -> Table:
    table = Table("model", "nodes", "ops", "FLOPs", "bytes", "seconds", "equal on", "without a rule")
    for r in records:
        c = r.coverage
        shown = (str(c.nodes), str(c.ops), f"{c.flops:.1%}", f"{c.bytes:.1%}") if c else ("", "", "", "")
        equal = "everywhere" if r.is_well else ", ".join(r.equal)
        table.add_row(r.name, *shown, f"{r.seconds:.0f}", equal, ", ".join(c.without_rule) if c else "")
    well = sum(r.is_well for r in records)
    table.caption = f"{well} of {len(records)} equal, {sum(r.seconds for r in records):.0f} s"
    return table


if __name__ == "__main__":
    sys.exit(main())
