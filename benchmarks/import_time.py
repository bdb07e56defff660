"""
What `import mamba3_nplr` costs beyond torch and transformers, and what the first use of a model does.

    python benchmarks/import_time.py [--repeats N] [--out results/import_time.json]
"""

import argparse
import statistics
import subprocess
import sys

from record import add_out, heading, write_results

MEASURE = """
import time
import torch, transformers
start = time.perf_counter()
import mamba3_nplr
imported = time.perf_counter()
mamba3_nplr.Mamba3NPLRModel
print(imported - start, time.perf_counter() - imported)
"""


def measure() -> tuple[float, float]:
    """Seconds for the import and for the first use, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    imported, used = map(float, done.stdout.split())
    return imported, used


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the import of the package and the first use of a model.")
    parser.add_argument("--repeats", type=int, default=5, help="processes that count (default: %(default)s)")
    add_out(parser)
    given = parser.parse_args()
    print(heading(repeats=given.repeats))
    measure()  # fills the file cache
    imported, used = zip(*(measure() for _ in range(given.repeats)), strict=True)
    results = {"import_ms": 1000 * statistics.median(imported), "first_use_ms": 1000 * statistics.median(used)}
    print(f"import mamba3_nplr: {results['import_ms']:.1f} ms")
    print(f"first use of a model class: {results['first_use_ms']:.1f} ms, nearly all of it in transformers")
    write_results(given.out, {"settings": {"repeats": given.repeats}, "results": results})


if __name__ == "__main__":
    main()
