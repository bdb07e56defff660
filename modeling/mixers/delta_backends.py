"""The registry of compiled mixers of the delta family, which run beside a backend of the scan where there is one."""

from collections.abc import Callable

from .delta_cpu import delta_cpu

# By the name of the scan's backend: the mixer between its projections, with the arguments and results of `delta_cpu`.
# It runs in torch, around the scan, beside those that have no entry.
DELTA_BACKENDS: dict[str, Callable] = {"cpu": delta_cpu}
