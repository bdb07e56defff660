"""The README's Python examples run, in order, in one session."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert "torch.Size([2, 120]) torch.Size([2, 64, 120])" in capsys.readouterr().out
    assert namespace["action"].shape == (2,)
    assert namespace["batch"]["labels"].shape == (64, 64)
    assert type(namespace["model"]).__name__ == "Mamba3NPLRForSequenceClassification"
