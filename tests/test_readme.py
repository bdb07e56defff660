"""The README's Python examples run, in order, in one session, with a Hub to push to."""

import json
import re
import textwrap
from pathlib import Path

import numpy as np
from hub_client import TOKENS, run_script
from hub_server import HubServer

README = Path(__file__).parent.parent / "README.md"

SESSION = textwrap.dedent(
    """
    import json, sys, torch

    torch.manual_seed(0)
    namespace = {}
    for block in json.load(open("blocks.json")):
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["action"].shape == (2,)
    assert namespace["batch"]["labels"].shape == (64, 64)
    track = namespace["pipeline"]("state-tracking", model="switch/checkpoint-60")
    for row in namespace["words"]:
        assert " ".join(entry["label"] for entry in track(row["symbols"])) == row["labels"], row
    assert type(namespace["model"]).__name__ == "Mamba3NPLRForSequenceClassification"
    assert len(namespace["words"]) == 3 and namespace["words"].column_names == ["symbols", "labels"]
    assert namespace["policy"].config.observation_size == 9 and namespace["policy"].config.action_size == 3
    """
)


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def losses(folder):
    [state] = folder.glob("checkpoint-60/trainer_state.json")
    return [entry["loss"] for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]


def test_the_examples_run(tmp_path):
    [table] = blocks("csv")
    (tmp_path / "words.csv").write_text(table)
    random = np.random.default_rng(0)
    observations = random.normal(size=(4, 20, 9))
    np.save(tmp_path / "observations.npy", observations)
    np.save(tmp_path / "actions.npy", observations[..., :3].cumsum(1) / 4)
    assert len(blocks("python")) == 11
    (tmp_path / "blocks.json").write_text(json.dumps(blocks("python")))
    with HubServer(tmp_path / "hub", TOKENS) as hub:
        done = run_script(hub, tmp_path, SESSION)
    assert "torch.Size([2, 120]) torch.Size([2, 64, 120])" in done.stdout
    assert "'token': 'press', 'element'" in done.stdout and "'label': 'LABEL_" in done.stdout
    assert hub.repository("user/policy").private and "mamba3_nplr_pipelines.py" in hub.repository("user/policy").files()
    assert hub.repository("user/words", "datasets").private
    for folder in ("switch", "policy"):  # it learns
        found = losses(tmp_path / folder)
        assert found[-1] < 0.5 * found[0], found
