"""
Draws the pictures of the page, one of each tab, with the models of the repository.

    python tests/programs/demo_pictures.py docs          # make demo-pictures
"""

import argparse
import sys
from pathlib import Path

from helpers.chromium import Visitor, open_chromium
from helpers.places import ROOT

sys.path.append(str(ROOT / "demo"))

LETTERS = 2000  # as long as shows where each model goes wrong


def draw(visitor: Visitor, folder: Path) -> None:
    page = visitor.page

    def keep(name: str) -> None:
        page.wait_for_timeout(1000)
        page.screenshot(path=folder / f"demo_{name}.png", full_page=True)

    visitor.start_game(8)
    visitor.wait_for_cue()
    page.keyboard.press("3")
    visitor.wait_for_ball()
    keep("shell_game")
    visitor.open_tab("Words")
    visitor.fill("size", LETTERS)
    visitor.press("Draw it")
    visitor.wait_for_answer("length", LETTERS)
    keep("words")
    visitor.open_tab("Inside")
    page.wait_for_selector("figure")
    keep("inside")


def main() -> None:
    import app
    from trained_models import TrainedModels

    parser = argparse.ArgumentParser(description="Draws the pictures of the page.")
    parser.add_argument("folder", type=Path, help="where they go")
    folder = parser.parse_args().folder
    address = app.launch(TrainedModels()).local_url
    with open_chromium() as browser:
        visitor = Visitor(browser, address, height=1000)
        draw(visitor, folder)
        visitor.leave()
    if visitor.problems:
        sys.exit(f"The page has problems: {visitor.problems}")


if __name__ == "__main__":
    main()
