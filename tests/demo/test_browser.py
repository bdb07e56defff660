"""The page in a real browser: what visitors do, see and are told. Run by make test-demo."""

import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

from helpers.chromium import Visitor, open_chromium
from helpers.made_players import called_directly, save_player
from helpers.places import ROOT
from mamba3_nplr.datasets_scripts.shell_game_episodes import CUPS, X, Y, chosen_slot
from mamba3_nplr.training import publish
from programs.demo_pictures import draw

pytestmark = pytest.mark.browser

RIGHTMOST = "Math.max(...[...document.querySelectorAll('.panel *')].map((x) => x.getBoundingClientRect().right))"


@pytest.fixture(scope="module")
def chromium():
    with open_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(models):
    """Of the page's server, which may connect to no other machine either."""
    import app

    reached, connect = [], socket.socket.connect

    def noted(self, place):
        if self.family != socket.AF_UNIX and place[0] not in ("127.0.0.1", "localhost", "::1"):
            reached.append(place)
        return connect(self, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", noted)
        yield app.launch(models).local_url
    assert reached == []


@pytest.fixture
def visit(chromium, address):
    """Makes visitors; whatever they did, nothing may have gone wrong in the console, or left the machine."""
    visitors = []

    def enter(**options):
        visitors.append(Visitor(chromium, address, **options))
        return visitors[-1]

    yield enter
    problems = [problem for visitor in visitors for problem in visitor.problems]
    for visitor in visitors:
        visitor.leave()
    assert problems == []


def check_game(visitor, models, timing, swaps, cup):
    """What the page was told and shows at the end of a game is what the models do when called directly."""
    from shell_games import draw_episode, policies_of_timing

    ended = visitor.wait_for_answer("seed")
    started = next(x for x in reversed(visitor.answers) if "moves" in x)
    episode = draw_episode(timing, swaps, ended["seed"])
    ball, chosen = episode.ball_slot + 1, {"you": cup}
    policies = policies_of_timing(models, timing)
    for before, after in zip(started["players"], ended["players"], strict=True):
        actions = called_directly(policies[before["name"]], episode.observations)
        assert np.allclose(before["path"] + after["path"], actions[:, 0], atol=2e-3)
        chosen[before["name"]] = int(chosen_slot(actions[None], np.array([len(actions)]))[0]) + 1
    marks = {name: f"{'✓' if its == ball else '✗'} cup {its}" for name, its in chosen.items()}
    shown = visitor.scores()
    assert list(chosen) == ["you", *policies] and {name: shown[name] for name in marks} == marks
    assert visitor.status().startswith(f"The ball is under cup {ball}.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1180, 390])
def test_the_page_loads_and_fits(visit, width, scheme):
    visitor = visit(width=width, height=844, scheme=scheme)
    for tab in ("Words", "Inside", "Shell game"):
        visitor.open_tab(tab)
        visitor.page.wait_for_timeout(300)
        assert visitor.page.evaluate(RIGHTMOST) <= width, tab
    ink = visitor.page.evaluate("getComputedStyle(document.querySelector('.panel')).color")
    assert (sum(map(int, re.findall(r"\d+", ink)[:3])) > 3 * 128) == (scheme == "dark")


@pytest.mark.parametrize("timing", ["fixed", "jittered"])
def test_a_game_is_played_to_the_end_by_clicking(visit, models, timing):
    visitor = visit()
    visitor.start_game(4, timing)
    visitor.wait_for_cue()
    visitor.page.locator(".cup").nth(1).click()
    visitor.wait_for_ball()
    check_game(visitor, models, timing, 4, cup=2)
    # The ball is shown, under a cup that is up.
    assert visitor.page.locator(".ball").get_attribute("visibility") == "visible"
    hands = {hand.get_attribute("data-player") for hand in visitor.page.locator(".hand").all()}
    assert hands == {"you", "nplr_exact", "nplr", "mamba3"}


def test_a_score_is_kept_with_the_keyboard_alone(visit, models):
    visitor = visit(width=390, height=844)
    right = 0
    for game, key in enumerate("315", 1):
        visitor.page.locator("button.main:visible").focus()
        visitor.fill("swaps", 2)
        visitor.page.locator("[name=speed][value='256']").focus()
        visitor.page.keyboard.press("Space")
        visitor.page.locator("button.main:visible").focus()
        visitor.page.keyboard.press("Enter")
        visitor.wait_for_cue()
        # Digits that are typed into a field choose no cup.
        visitor.page.locator("[name=swaps]:visible").press(key)
        visitor.page.locator("button.main:visible").focus()
        assert visitor.page.locator("svg.choosing").count() == 1
        visitor.page.keyboard.press(key)
        visitor.wait_for_ball()
        check_game(visitor, models, "fixed", 2, cup=int(key))
        right += visitor.answers[-1]["right"]
        row = visitor.page.locator("tr[data-player=you] td").all()
        assert row[1].inner_text() == f"{right} of {game}"
        visitor.page.wait_for_timeout(500)


def test_a_cup_before_the_cue_is_no_answer(visit):
    visitor = visit()
    visitor.start_game(3, speed="16")
    visitor.page.wait_for_function("document.querySelector('.status').textContent.startsWith('Watch')")
    visitor.page.keyboard.press("2")
    assert visitor.status() == "Wait for the green light." and len(visitor.answers) >= 1
    assert not any("ball" in answer for answer in visitor.answers)


def test_visitors_at_once_do_not_mix(visit, models):
    first, second = visit(), visit()
    first.start_game(6)
    second.start_game(3)
    first.wait_for_cue()
    second.wait_for_cue()
    second.page.keyboard.press("4")
    first.page.keyboard.press("1")
    for visitor in (first, second):
        visitor.wait_for_ball()
    check_game(first, models, "fixed", 6, cup=1)
    check_game(second, models, "fixed", 3, cup=4)
    third = visit()
    assert third.scores() == dict.fromkeys(["you", "nplr_exact", "nplr", "mamba3", "chance"], "\u2013")


@pytest.mark.parametrize("timing", ["fixed", "jittered"])
def test_cups_are_drawn_where_the_episode_has_them(visit, timing):
    from shell_games import draw_episode

    visitor = visit()
    episode = draw_episode(timing, 12, seed=21)
    moves = [move._asdict() for move in episode.moves()]
    script = "([moves, frames]) => [...Array(frames).keys()].map((t) => document.querySelector('.stage')"
    script += ".closest('.page-part').cupsAt(moves, t))"
    drawn = np.array(visitor.page.evaluate(script, [moves, episode.cue]))  # (frames, cups, 2)
    order = np.lexsort((drawn[..., 1].round(5), drawn[..., 0].round(5)))
    drawn = np.take_along_axis(drawn, order[..., None], axis=1)
    seen = episode.observations[: episode.cue]
    assert np.allclose(drawn[..., 0], seen[:, X:Y], atol=1e-5)
    assert np.allclose(drawn[..., 1], seen[:, Y : Y + CUPS], atol=1e-5)


def test_bad_numbers_get_a_sentence(visit):
    visitor = visit()
    visitor.page.evaluate("document.querySelector('.controls').noValidate = true")
    visitor.start_game(300)
    visitor.page.wait_for_selector(".status.error")
    assert visitor.status() == "swaps is 300; it must be a whole number from 0 to 256."
    visitor.start_game("")
    assert visitor.status() == "Give a number of swaps from 0 to 256."
    visitor.start_game(0)
    visitor.wait_for_cue()


def test_words_are_followed_letter_by_letter(visit, models):
    from swap_words import SwapWords

    visitor = visit()
    visitor.open_tab("Words")
    visitor.fill("word", "s0 s1 oops")
    visitor.press("Follow it")
    visitor.page.wait_for_selector(".status.error:visible")
    assert visitor.status().startswith("Letter 3 of the word, 'o', is unknown.")
    visitor.fill("word", "0 1")
    visitor.press("Follow it")
    visitor.page.wait_for_function("document.querySelector('[name=word]').value === 's0 s1'")
    visitor.press("+ s3")
    visitor.page.wait_for_function("document.querySelector('[name=word]').value === 's0 s1 s3'")
    # A click between the third and the fourth strand, once they are drawn anew.
    visitor.page.wait_for_function("document.querySelectorAll('.braid.drawable .letter').length === 3")
    visitor.page.wait_for_timeout(300)
    left, top, width, height = visitor.page.evaluate(
        "(({ x, y, width, height }) => [x, y, width, height])"
        "(document.querySelector('.braid.drawable').getBoundingClientRect())"
    )
    visitor.page.mouse.click(left + width / 2, top + height * (36 + 2.5 * 26) / 152)
    visitor.page.wait_for_function("document.querySelector('[name=word]').value === 's0 s1 s3 s2'")
    visitor.page.wait_for_function("document.querySelectorAll('.braid.drawable .letter').length === 4")
    expected = SwapWords(models).follow("s5_generators", text="0132")
    assert visitor.wait_for_answer("length", 4) == expected
    shown = visitor.page.locator(".braid-row.truth .point").all_text_contents()
    described = SwapWords(models).describe()["s5_generators"]
    assert len(shown) == 25 and [int(x) - 1 for x in shown[:5]] == described["arrangements"][0]
    rows = [row.get_attribute("data-model") for row in visitor.page.locator(".braid-row[data-model]").all()]
    assert rows == ["nplr_exact", "nplr", "mamba3"]
    # All of it is seen, so that there is no bar of the whole.
    assert visitor.page.locator(".strip").count() == 0


def test_what_is_not_all_right_is_not_a_hundred_per_cent(visit):
    shared = (ROOT / "demo" / "page.js").read_text(encoding="utf-8")
    shares = {
        0: "0 %",
        1e-5: "0.1 %",
        0.02: "2.0 %",
        0.27: "27 %",
        0.9: "90 %",
        0.99874: "99.9 %",
        0.99999: "99.9 %",
        1: "100 %",
    }
    shown = visit().page.evaluate(f"(shares) => {{ {shared}\nreturn shares.map(percent); }}", list(shares))
    assert shown == list(shares.values())


def test_an_answer_does_not_replace_what_was_typed_since_it_was_asked_for(visit):
    visitor = visit()
    visitor.open_tab("Words")
    visitor.page.evaluate(
        "() => { const typed = document.querySelector('[name=word]'); typed.value = '0 1'; typed.form.requestSubmit();"
        " typed.value = 's3 s'; }"
    )
    visitor.wait_for_answer("length", 2)
    visitor.page.wait_for_function("document.querySelectorAll('.braid.drawable .letter').length === 2")
    assert visitor.page.input_value("[name=word]") == "s3 s"


def test_the_longest_word_is_followed_and_paged_through(visit):
    visitor = visit()
    visitor.open_tab("Words")
    visitor.fill("size", 100_000)
    visitor.press("Draw it")
    visitor.page.wait_for_function("document.querySelectorAll('.status')[1].textContent.startsWith('100,000 letters')")
    assert visitor.page.input_value("[name=word]") == ""
    assert visitor.page.get_attribute("[name=word]", "placeholder") == "too long to write out"
    visitor.press("To the end")
    assert visitor.page.locator(".pages:visible output").inner_text().endswith("to 100,000")
    told = {model["name"]: model for model in visitor.wait_for_answer("length", 100_000)["models"]}
    lost = told["mamba3"]["first_wrong"]
    visitor.page.locator("[data-model=mamba3] .link").click()
    assert f"{lost + 1:,}" in visitor.page.locator("[data-model=mamba3] .verdict").inner_text()
    assert visitor.page.locator(".strip").count() == len(told)
    first, last = (
        int(x.replace(",", ""))
        for x in re.findall(r"[\d,]+", visitor.page.locator(".pages:visible output").inner_text())
    )
    assert first <= lost + 1 <= last
    visitor.fill("size", 100_001)
    visitor.press("Draw it")
    visitor.page.wait_for_selector(".status.error:visible")


def test_the_inside_of_a_game_and_of_a_word_is_drawn(visit, models):
    from insides import Insides

    visitor = visit()
    visitor.start_game(2)
    visitor.wait_for_cue()
    visitor.page.keyboard.press("1")
    visitor.wait_for_ball()
    seed = visitor.wait_for_answer("seed")["seed"]
    visitor.press("Look inside this episode")
    visitor.page.wait_for_function(f"document.querySelector('[name=seed]').value === '{seed}'")
    assert visitor.wait_for_answer("cosines") == Insides(models).of_episode("nplr_exact", "fixed", 2, seed)
    titles = visitor.page.locator(".pictures figure b").all_inner_texts()
    assert titles[:2] == ["Gate of the reflection, beta", "Decay"] and titles[-1].startswith("Cosine")
    visitor.choose("kind", "word")
    visitor.page.locator("[name=model]:visible").select_option("mamba3")
    visitor.press("Look inside")
    visitor.page.wait_for_selector(".note:visible")
    word = visitor.page.input_value("[name=text]")
    expected = Insides(models).of_word("mamba3", "s5_generators", word)
    assert visitor.wait_for_answer("length", expected["length"]) == expected
    assert "has no reflection" in visitor.page.locator(".note:visible").inner_text()
    visitor.page.locator(".pictures canvas").first.scroll_into_view_if_needed()
    visitor.page.locator(".pictures canvas").first.hover()
    assert re.search(r"Decay: head \d+, letter \d+ \(s\d\): \d\.\d\d", visitor.page.locator(".reading").inner_text())
    visitor.open_tab("Shell game")
    assert re.fullmatch(r"[✓✗] cup 1", visitor.scores()["you"])  # what was there is still there


def test_the_pictures_that_pages_show_are_those_of_the_tabs(visit, tmp_path):
    """As make demo-pictures writes them to docs/."""
    draw(visit(height=1000), tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    for page in ("README.md", "docs/demo.md"):
        assert set(re.findall(r"demo_\w+\.png", (ROOT / page).read_text(encoding="utf-8"))) == drawn
    assert len(drawn) == 3 and all((ROOT / "docs" / name).is_file() for name in drawn)


@pytest.fixture
def space(tmp_path):
    """The page as it is published, with its own copy of the package, and nothing else."""
    folder = tmp_path / "space"
    page = tmp_path / "checkout" / "demo"
    page.mkdir(parents=True)
    for path in (ROOT / "demo").iterdir():
        if path.is_file():
            (page / path.name).write_bytes(path.read_bytes())
    save_player(page.parent / "checkpoints", "shell", "nplr")
    for name, content in publish.plan(page, "user").files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    return folder


def test_what_is_published_runs_by_itself(space, chromium):
    program = "import mamba3_nplr; print(mamba3_nplr.__file__); import app; app.main()"
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-u", "-c", program]
    with subprocess.Popen(command, cwd=space, env=environment, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout.readline().startswith(str(space))
            told = re.fullmatch(r"The page is at (\S+) until Ctrl-C ends it\.\n", running.stdout.readline())
            visitor = Visitor(chromium, told[1])
            visitor.start_game(1)
            visitor.wait_for_cue()
            visitor.page.keyboard.press("5")
            visitor.wait_for_ball()
            assert visitor.problems == [] and set(visitor.scores()) == {"you", "nplr", "chance"}
            visitor.leave()
        finally:
            running.terminate()
