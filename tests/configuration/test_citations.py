"""The papers are named wherever someone may want to cite them."""

import re

import pytest
import yaml

from helpers.places import ROOT
from mamba3_nplr.configuration.citations import CITATIONS, PAPER, bibtex
from mamba3_nplr.configuration.presets import MODELS


def field(entry: str, name: str) -> str:
    """A field of a BibTeX entry as plain text."""
    value = re.search(rf"^  {name} = \{{(.*?)\}},?$", entry, re.MULTILINE | re.DOTALL)[1]
    return " ".join(value.replace("{", "").replace("}", "").split())


def cited() -> list[dict]:
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    return [content["preferred-citation"], *content["references"]]


def test_the_citation_file_has_every_paper_and_the_paper_first():
    assert [x["title"] for x in cited()] == [field(entry, "title") for entry in CITATIONS.values()]
    assert cited()[0]["title"] == field(CITATIONS[PAPER], "title")
    for entry, found in zip(CITATIONS.values(), cited(), strict=True):
        names = " and ".join(f"{x['family-names']}, {x['given-names']}" for x in found["authors"])
        assert names == field(entry, "author") and str(found["year"]) == field(entry, "year")


def test_the_readme_names_every_paper():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert CITATIONS[PAPER] in text
    for entry in CITATIONS.values():
        assert field(entry, "title") in " ".join(text.replace("{", "").replace("}", "").split())


@pytest.mark.parametrize("name", MODELS)
def test_every_model_names_its_paper(name):
    entries = bibtex(*MODELS[name].papers).split("\n\n")
    assert entries[0] == CITATIONS[PAPER] and len(entries) == 2
