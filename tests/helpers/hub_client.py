"""
Programs that talk to a Hub on this machine, in processes of their own: the Hub's client reads its settings once, when
it is imported. Whatever they do, no token may be seen in what they print or write.
"""

import os
import subprocess
import sys
from pathlib import Path

TOKENS = {"hf_right": "user", "hf_reader": "user", "hf_other": "other"}
READ_ONLY = ("hf_reader",)
SECRETS = (*TOKENS, "hf_wrong")

# The beginning of scripts that ask for faults, and look at the errors.
FAULTS = """
import json, os, time, urllib.request

time.sleep = lambda seconds: None  # between the client's attempts


def faults(**kinds):
    data = json.dumps(kinds).encode()
    urllib.request.urlopen(urllib.request.Request(os.environ["HF_ENDPOINT"] + "/faults", data, method="POST"))


def fails(action, kinds, *texts):
    try:
        action()
    except kinds as error:
        assert all(text in str(error) for text in texts), error
    else:
        raise AssertionError("should have failed")
"""


def client_environment(hub, home: Path, **more: str) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "hf_right",
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin",
        "PYTHONPATH": os.pathsep.join(sys.path),
    } | more


def run_client(hub, folder: Path, command: list, code: int = 0, **more: str) -> subprocess.CompletedProcess:
    """
    Runs a program, with a home of its own each time.

    Args:
        folder: Where it runs; everything that it may write into is inside.
        code: What it has to exit with.
        more: Of its environment.
    """
    home = folder / f"home{len(list(folder.glob('home*')))}"
    environment = client_environment(hub, home, **more)
    arguments = [str(argument) for argument in command]
    done = subprocess.run(arguments, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    check_secrets(folder, done)
    return done


def run_script(hub, folder: Path, script: str, *arguments, **more: str) -> subprocess.CompletedProcess:
    return run_client(hub, folder, [sys.executable, "-c", script, *arguments], **more)


def check_secrets(folder: Path, done: subprocess.CompletedProcess) -> None:
    for secret in SECRETS:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if secret in line]
        assert not lines, lines
        for path in folder.rglob("*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path
