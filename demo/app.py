"""
The page: play the shell game beside trained policies, let models follow words of swaps, and look inside them.

    python demo/app.py [--checkpoints FOLDER] [--port PORT] [--open]

The server draws episodes and words and runs the models; the browser draws what it is told. Nothing is asked of any
other machine.
"""

import argparse
import os
from pathlib import Path

# Before gradio is imported, which reads it then.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr
from transformers.utils.logging import disable_progress_bar

from browser import in_sentences
from insides import Insides
from shell_games import TIMINGS, ShellGames
from swap_words import TASKS as WORD_TASKS
from swap_words import SwapWords
from trained_models import CHECKPOINTS, MODELS, TrainedModels

HERE = Path(__file__).resolve().parent
TITLE = "Where is the ball?"


def system_theme() -> gr.themes.Base:
    """Without fonts that would be fetched from elsewhere."""
    return gr.themes.Soft(
        primary_hue="teal",
        neutral_hue="slate",
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    )


def part(name: str, functions: list, **props) -> gr.HTML:
    """A tab's contents, `name`.html with `name`.js, which calls these functions of the server."""
    script = (HERE / "page.js").read_text(encoding="utf-8") + (HERE / f"{name}.js").read_text(encoding="utf-8")
    return gr.HTML(
        html_template=(HERE / f"{name}.html").read_text(encoding="utf-8"),
        js_on_load=script,
        server_functions=[in_sentences(function) for function in functions],
        apply_default_css=False,
        elem_classes=["page-part"],
        **props,
    )


def named_policies(models: TrainedModels) -> dict[str, dict[str, str]]:
    """Timing -> names of those that play -> on the page, in its order."""
    there = {timing: {name for task in tasks for name in models.folders(task)} for timing, tasks in TIMINGS.items()}
    return {timing: {name: MODELS[name] for name in MODELS if name in names} for timing, names in there.items()}


def build(models: TrainedModels) -> gr.Blocks:
    games, words, insides = ShellGames(models), SwapWords(models), Insides(models)
    described, policies = words.describe(), named_policies(models)
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=False) as page:
        gr.HTML((HERE / "heading.html").read_text(encoding="utf-8"), apply_default_css=False, js_on_load=None)
        with gr.Tabs():
            with gr.Tab("Shell game"):
                part("shell_game", [games.start, games.answer], policies=policies)
            with gr.Tab("Words"):
                part("words", [words.follow], tasks=described)
            with gr.Tab("Inside"):
                part("inside", [insides.of_episode, insides.of_word], tasks=described, policies=policies)
    return page


def launch(models: TrainedModels, **options) -> gr.Blocks:
    """The page, served from now on. Every model is loaded first: nobody should wait for that in a game."""
    for task in (*WORD_TASKS, *{task for tasks in TIMINGS.values() for task in tasks}):
        models.of_task(task)
    page = build(models)
    page.launch(
        theme=system_theme(),
        css_paths=[HERE / "style.css"],
        head_paths=[HERE / "head.html"],
        footer_links=[],
        run_history=False,
        share=False,
        pwa=False,
        quiet=True,  # it would offer a public link
        prevent_thread_lock=True,
        **options,
    )
    return page


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A page to play the shell game on, beside trained policies.")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="(default: %(default)s)")
    parser.add_argument("--port", type=int, help="(default: the first free one from 7860 on)")
    parser.add_argument("--open", action="store_true", help="open it in a browser")
    given = parser.parse_args(arguments)
    if not given.checkpoints.is_dir():
        parser.error(f"--checkpoints {given.checkpoints} is not there; it must be a folder of trained models.")
    if given.port is not None and not 0 < given.port < 2**16:
        parser.error(f"--port {given.port} is not allowed; it must be from 1 to {2**16 - 1:,}.")
    disable_progress_bar()
    try:
        page = launch(TrainedModels(given.checkpoints), server_port=given.port, inbrowser=given.open)
    except OSError as error:
        if given.port is None or "empty port" not in str(error):
            raise
        parser.error(f"--port {given.port} is taken by another program; it must be a free one.")
    print(f"The page is at {page.local_url} until Ctrl-C ends it.", flush=True)
    page.block_thread()


if __name__ == "__main__":
    main()
