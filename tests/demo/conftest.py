"""The modules of demo/, and models for them to play with."""

import sys

import pytest

from helpers.made_players import save_players
from helpers.places import ROOT

sys.path.append(str(ROOT / "demo"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return save_players(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def models(checkpoints):
    from trained_models import TrainedModels

    return TrainedModels(checkpoints)
