"""
What `import mamba3_nplr` costs beyond torch and transformers, and what the first use of a model does.

    python benchmarks/import_time.py
"""

import statistics
import subprocess
import sys

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


def main(repeats: int = 5) -> None:
    measure()  # fills the file cache
    imported, used = zip(*(measure() for _ in range(repeats)), strict=True)
    print(f"import mamba3_nplr: {1000 * statistics.median(imported):.1f} ms (median of {repeats})")
    print(f"first use of a model class: {1000 * statistics.median(used):.1f} ms, nearly all of it in transformers")


if __name__ == "__main__":
    main()
