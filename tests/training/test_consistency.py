"""The term of the loss by which a state lasts: what it is 0 for, what it weighs, and that a state does last with it."""

import math
import os
import signal
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from helpers.training_program import WORDS, call_at_step, load_program
from mamba3_nplr.training.arguments import parse_run
from mamba3_nplr.training.consistency import Consistency, Schedule, noise_like, unexplained_parts
from mamba3_nplr.training.models import new_model
from mamba3_nplr.training.trainer import ResumableTrainer

HEADS, CHANNELS, TOKENS, LABELS = 3, 5, 4, 6


@pytest.fixture
def words():
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, size, (16, 40), generator=generator) for size in (TOKENS, LABELS))
    of_both = torch.randn(LABELS, TOKENS, HEADS * CHANNELS, generator=generator)
    noise = torch.randn(16, 40, HEADS * CHANNELS, generator=generator)
    return tokens, labels, of_both[labels, tokens], noise


def test_heads_that_read_label_and_token_are_explained(words):
    tokens, labels, read, noise = words
    assert (unexplained_parts(read, tokens, labels, HEADS) < 1e-12).all()
    assert unexplained_parts(read[:, :, :1] * 0 + tokens[..., None], tokens, labels, 1) < 1e-12
    assert (unexplained_parts(torch.ones_like(read), tokens, labels, HEADS) == 0).all()
    assert unexplained_parts(noise, tokens, labels, HEADS) == pytest.approx([1] * HEADS, abs=0.1)


def test_it_is_a_part_of_the_variance_beyond_the_token(words):
    """However large the readout is, or what it says of the token alone, as long as that is not nearly all."""
    tokens, labels, read, noise = words
    read = read - torch.stack([read[tokens == token].mean(0) for token in range(TOKENS)])[tokens]
    parts = unexplained_parts(read + noise, tokens, labels, HEADS)
    assert parts == pytest.approx([0.5] * HEADS, abs=0.15)
    of_token = torch.linspace(-1, 1, TOKENS)[tokens][..., None]
    assert unexplained_parts(100 * (read + noise), tokens, labels, HEADS) == pytest.approx(parts, rel=1e-5)
    assert unexplained_parts(read + noise + 30 * of_token, tokens, labels, HEADS) == pytest.approx(parts, rel=0.02)
    rounding = 1e-5 * noise + of_token
    assert (unexplained_parts(rounding, tokens, labels, HEADS) < 1e-3).all()


def test_a_head_gains_nothing_by_closing_its_gate_to_a_token_on_which_it_is_wrong(words):
    tokens, labels, read, noise = words
    wrong = read + (tokens == 1)[..., None] * noise
    closed = torch.where((tokens == 1)[..., None], 1e-2 * wrong, wrong)
    parts = [unexplained_parts(x, tokens, labels, HEADS) for x in (wrong, closed)]
    assert (parts[0] > 0.03).all() and parts[1] == pytest.approx(parts[0].tolist(), rel=0.05)


def test_few_words_do_not_make_it_small(words):
    """Where there are not many more words than kinds of them, their means follow the noise."""
    tokens, labels, _, noise = words
    parts = [unexplained_parts(noise[i : i + 1], tokens[i : i + 1], labels[i : i + 1], HEADS).mean() for i in range(16)]
    assert torch.stack(parts).mean() == pytest.approx(1, abs=0.1)


def test_each_head_counts_by_itself(words):
    tokens, labels, read, noise = words
    mixed = torch.cat([read[..., :CHANNELS], 1000 * noise[..., CHANNELS:]], dim=-1)
    assert unexplained_parts(mixed, tokens, labels, HEADS) == pytest.approx([0, 1, 1], abs=0.05)


def test_positions_without_a_label_do_not_count(words):
    tokens, labels, read, noise = words
    unknown = torch.arange(40) % 3 == 0
    left_out = labels.masked_fill(unknown, -100)
    disturbed = torch.where(unknown[:, None], 1e6 * noise, read + noise)
    wanted = unexplained_parts((read + noise)[:, ~unknown], tokens[:, ~unknown], labels[:, ~unknown], HEADS)
    assert unexplained_parts(disturbed, tokens, left_out, HEADS) == pytest.approx(wanted, rel=1e-5)


def test_it_begins_and_grows_by_factors():
    schedule = Schedule(weight=1e4, start=0.2, full=0.6)
    weights = [schedule.weight_at(part) for part in (0, 0.199, 0.2, 0.3, 0.4, 0.6, 1)]
    assert weights == pytest.approx([0, 0, 1, 10, 100, 1e4, 1e4])


@pytest.mark.parametrize("name", ["nplr", "nplr_exact", "mamba3_2", "gdn", "deltaproduct_2"])
def test_the_gradient_is_that_of_both_and_the_value_that_of_the_answers(name):
    """For every family with heads, of what its last block reads."""
    run = parse_run(["--task=s3", f"--model={name}", "--task.length=12", "--task.batch_size=8"])
    torch.manual_seed(0)
    model = new_model(run.task, run.config).double().train()
    batch, weights = run.task.batch(0, 0, with_states=True), list(model.parameters())
    term = Consistency(model, Schedule(weight=10.0, start=0.0, full=0.5))
    answers = model(**term.begin(batch, part=0.5)).loss
    part = term.unexplained.mean()
    assert 0.1 < part < 2
    gradients = [torch.autograd.grad(x, weights, retain_graph=True, allow_unused=True) for x in (answers, part)]
    last = {id(x) for x in model.base_model.layers[-1].mixer.parameters()}
    assert any(y is not None for x, y in zip(weights, gradients[1], strict=True) if id(x) in last)
    found = term.add_to(answers, share=0.5)
    assert found.item() == answers.item()
    for x, of_answers, of_part in zip(torch.autograd.grad(found, weights), *gradients, strict=True):
        wanted = (of_answers + 5 * (0 if of_part is None else of_part)) / 11
        assert (x - wanted).abs().max() <= 1e-10 * wanted.abs().max()


def test_in_episodes_it_is_that_of_frames_at_rest_however_they_are_laid_out():
    found = []
    for packed in ("true", "false"):
        run = parse_run(["--task=shell_jitter", "--model=nplr_exact", "--task.batch_size=6", f"--task.packed={packed}"])
        torch.manual_seed(0)
        model, batch = new_model(run.task, run.config).train(), run.task.batch(0, 0, with_states=True)
        term, reads = Consistency(model, Schedule(weight=10.0, start=0.0, full=0.5)), []
        term.projection.register_forward_pre_hook(lambda module, inputs, reads=reads: reads.append(inputs[0]))
        assert model(**term.begin(batch, part=0.5)).loss.isfinite()
        found.append(term.unexplained)
        wanted = unexplained_parts(reads[0], batch["kinds"], batch["states"], term.heads)
        assert torch.equal(term.unexplained, wanted) and (wanted > 0.1).all()
    assert found[0].tolist() == pytest.approx(found[1].tolist(), rel=1e-4)


def test_before_it_begins_there_is_only_the_loss():
    run = parse_run(["--task=s3", "--task.length=6", "--task.batch_size=4"])
    model = new_model(run.task, run.config).train()
    term = Consistency(model, Schedule(weight=10.0, start=0.2, full=0.5))
    loss = model(**term.begin(run.task.batch(0, 0, with_states=True), part=0.1)).loss
    assert term.add_to(loss, share=1.0) is loss


@pytest.mark.parametrize(("start", "steps"), [(0.0, 7), (0.12, 8), (0.5, 2000), (0.5, 3), (1 / 3, 3), (0.99, 4)])
def test_heads_are_dropped_when_it_begins_and_when_it_has_grown(start, steps):
    schedule = Schedule(weight=1e4, start=start, full=0.995, limit=0.3)
    first = [step for step in range(steps) if step / steps >= start][:1]
    last = [step for step in range(steps) if step / steps >= 0.995][:1]
    wanted = [math.inf] * steps
    for step, limit in zip(first + last, (0.3, 0.06), strict=False):
        wanted[step] = limit
    assert [schedule.limit_after(step, steps) for step in range(steps)] == wanted
    assert min(Schedule(1e4, start, 0.995).limit_after(step, steps) for step in range(steps)) == math.inf


@pytest.fixture
def trained():
    """A small model after an update that every head had a part in, its optimizer, a batch and the term."""
    run = parse_run(["--task=s3", "--model=nplr_exact", "--task.length=12", "--task.batch_size=8"])
    torch.manual_seed(0)
    model, batch = new_model(run.task, run.config).train(), run.task.batch(0, 0, with_states=True)
    term = Consistency(model, Schedule(weight=10.0, start=0.0, full=0.5, limit=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    update(model, optimizer, term, batch)
    return model, optimizer, term, batch


def update(model, optimizer, term, batch):
    optimizer.zero_grad()
    term.add_to(read(model, term, batch), share=1.0).backward()
    optimizer.step()


def read(model, term, batch):
    return model(**term.begin(batch, part=0.5)).loss


def test_dropped_heads_are_read_no_more_and_stay_dropped(trained):
    model, optimizer, term, batch = trained
    parts = torch.linspace(0, 1, 16)
    term.drop_heads(parts, 0.3, optimizer)
    assert term.kept_heads().tolist() == [part <= 0.3 for part in parts]
    before = read(model, term, batch)
    with torch.no_grad():
        term.projection.weight.unflatten(-1, (16, -1))[:, 5:] = 7.0 * (torch.randn(11, 1) > 0)
        term.drop_heads(parts, 0.3, optimizer)
    assert torch.equal(read(model, term, batch), before)
    for _ in range(3):
        update(model, optimizer, term, batch)
    weight = term.projection.weight.unflatten(-1, (16, -1))
    assert (weight[:, 5:] == 0).all() and (weight[:, :5] != 0).all()
    assert (read(model, term, batch) - before).abs() > 1e-3


def test_the_term_is_that_of_the_heads_that_are_left(trained):
    model, optimizer, term, batch = trained
    term.drop_heads(torch.linspace(0, 1, 16), 0.3, optimizer)
    loss = read(model, term, batch)
    parts = term.unexplained
    weights = list(model.parameters())
    wanted = torch.autograd.grad((loss + 10 * parts[:5].mean()) / 11, weights, retain_graph=True, allow_unused=True)
    found = torch.autograd.grad(term.add_to(loss, share=1.0), weights, allow_unused=True)
    for x, y in zip(found, wanted, strict=True):
        assert (x is None) == (y is None) and (x is None or (x - y).abs().max() <= 1e-5 * y.abs().max())


def test_the_best_quarter_of_the_heads_is_not_dropped(trained):
    _, optimizer, term, _ = trained
    term.drop_heads(torch.full((16,), 0.4), 0.3, optimizer)
    assert term.kept_heads().all()
    parts = torch.linspace(0.4, 1, 16)
    term.drop_heads(parts, 0.3, optimizer)
    assert term.kept_heads().tolist() == [True] * 4 + [False] * 12
    term.drop_heads(parts.flip(0), 0.3, optimizer)
    assert term.kept_heads().tolist() == [False] * 3 + [True] + [False] * 12
    term.drop_heads(parts, 0.3, optimizer)
    assert term.kept_heads().sum() == 1


def test_a_run_that_is_resumed_after_heads_were_dropped_ends_with_the_same_bits(tmp_path, monkeypatch):
    arguments = [*WORDS, "--task=z5", "--task.batch_size=64", "--consistency=10", "--consistency_start=0.3"]
    arguments += ["--consistency_limit=0.5", "--consistency_noise=2"]
    load_program().main([*arguments, f"--output_dir={tmp_path / 'whole'}"])
    weights = (tmp_path / "whole" / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        stop = call_at_step(5, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
        patch.setattr(ResumableTrainer, "training_step", stop)
        with pytest.raises(SystemExit):
            load_program().main([*arguments, f"--output_dir={tmp_path / 'run'}"])
    load_program().main([*arguments, f"--output_dir={tmp_path / 'run'}", "--resume_from_checkpoint"])
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    zeros = (model.model.layers[0].mixer.out_proj.weight == 0).unflatten(-1, (model.config.num_heads, -1))
    assert torch.equal(zeros.all(0).all(-1), zeros.any(0).any(-1)) and zeros.any() and not zeros.all()


def test_nothing_is_kept_of_an_evaluation():
    run = parse_run(["--task=s3", "--task.length=6", "--task.batch_size=4"])
    model = new_model(run.task, run.config).eval()
    term = Consistency(model, Schedule(weight=10.0, start=0.0, full=0.5))
    model(**term.begin(run.task.batch(0, 0, with_states=True), part=0.4))
    assert term.unexplained is None


def test_noise_grows_with_the_weight_and_is_a_multiple_of_what_is_unexplained():
    schedule = Schedule(weight=1e4, start=0.2, full=0.6, noise=100.0)
    assert [schedule.noise_at(part) for part in (0.1, 0.2, 0.4, 1)] == pytest.approx([0, 1e-2, 1, 100])
    torch.manual_seed(0)
    heads = torch.randn(8, 500, HEADS, CHANNELS) * torch.tensor([1.0, 10.0, 0.1])[:, None] + 5
    noise = noise_like(heads, torch.tensor([4.0, 0.01, 0.0]))
    assert noise.var((0, 1, 3)).tolist() == pytest.approx([4.0, 1.0, 0.0], rel=0.05)
    assert noise.mean((0, 1, 3)).abs().max() < 0.05 and noise_like(heads[:1, :1], torch.ones(HEADS)).isfinite().all()


def test_a_head_is_disturbed_by_as_much_as_is_unexplained_of_it_but_never_drowned(trained):
    model, _, quiet, batch = trained
    term = Consistency(model, replace(quiet.schedule, noise=5.0))
    torch.manual_seed(0)
    noise = torch.randn(8, 12, 16, 16)
    read = batch["labels"][..., None, None] + torch.logspace(-4, 0, 16)[:, None] * noise
    read[:, :, 3] = batch["labels"][..., None].float()
    term.begin(batch, part=0.5)
    [disturbed] = term.note(term.projection, (read.flatten(-2),))
    added = (disturbed.unflatten(-1, (16, -1)) - read).var((0, 1, 3)) / read.var((0, 1)).mean(-1)
    assert added[3] < 1e-6
    wanted = (5 * term.unexplained).clamp(max=0.1)
    assert (wanted < 0.05).sum() > 8 and (wanted == 0.1).sum() > 2
    assert added.tolist() == pytest.approx(wanted.tolist(), rel=0.15, abs=1e-6)


def test_the_answers_have_to_do_with_noise_and_the_term_has_not(trained):
    model, _, quiet, batch = trained
    alone = read(model, quiet, batch), quiet.unexplained
    quiet.projection._forward_pre_hooks.clear()
    loud = Consistency(model, replace(quiet.schedule, noise=5.0))
    losses = torch.stack([read(model, loud, batch) for _ in range(3)])
    assert torch.stack([alone[0], *losses]).unique().numel() == 4
    assert torch.equal(loud.unexplained, alone[1])
    model.eval()
    assert read(model, loud, batch) == read(model, loud, batch)


def test_s3_is_followed_far_beyond_the_lengths_of_training(tmp_path):
    """All six elements as letters, in words of up to 64; then in 128 words of 4,096."""
    settings = ["--task=s3", "--model=nplr_exact", "--preset=exact", f"--output_dir={tmp_path}", "--max_steps=2000"]
    settings += ["--task.test_lengths=[4096]", "--task.test_size=128", "--save_steps=2000", "--eval_strategy=no"]
    settings += ["--task.batch_size=16", "--report_to=none", "--disable_tqdm=true"]
    load_program().main(settings)
    run = parse_run(settings)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    rows = run.task.rows("test_4096", 0, 128)
    with torch.no_grad():
        predicted = model(torch.from_numpy(rows["input_ids"])).logits.argmax(-1)
    assert torch.equal(predicted, torch.from_numpy(rows["labels"][:, -1]))
