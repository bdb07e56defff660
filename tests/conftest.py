"""Settings of the whole suite, and small models to test."""

import os
import sys
from pathlib import Path

# Before any import of torch: two workers with two threads each would fight for two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before any import of Triton: its interpreter runs the kernels on the processor. On a GPU, 0 tests them as compiled.
os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_buffers():
    """Fills torch.empty with NaN, so that a value read before it was written shows up."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_test_sets(monkeypatch):
    """Builds of datasets with a few rows in each test set; what is tested does not depend on their number."""
    # Not needed by most tests, and slow to import.
    from mamba3_nplr.datasets_scripts import build
    from mamba3_nplr.datasets_scripts.task_kinds import BehaviorCloning, PrefixClassification
    from mamba3_nplr.datasets_scripts.tasks import make_task

    monkeypatch.setattr(build, "make_task", lambda name: make_task(name, test_size=6))
    monkeypatch.setattr(PrefixClassification, "rows_in_file", 100)
    monkeypatch.setattr(BehaviorCloning, "rows_in_file", 8)


# Used by the tests of transformers; unknown markers are errors here.
TRANSFORMERS_MARKERS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "torch_compile_test",
)


def pytest_configure(config):
    for name in TRANSFORMERS_MARKERS:
        config.addinivalue_line("markers", f"{name}: of the tests of transformers")
