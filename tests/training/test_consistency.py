"""The term of the loss by which a state lasts: what it is 0 for, what it weighs, and that a state does last with it."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from helpers.training_program import load_program
from mamba3_nplr.training.arguments import parse_run
from mamba3_nplr.training.consistency import Consistency, Schedule, unexplained_part
from mamba3_nplr.training.models import new_model

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
    assert unexplained_part(read, tokens, labels, HEADS) < 1e-12
    assert unexplained_part(read[:, :, :1] * 0 + tokens[..., None], tokens, labels, 1) < 1e-12
    assert unexplained_part(torch.ones_like(read), tokens, labels, HEADS) == 0
    assert unexplained_part(noise, tokens, labels, HEADS) == pytest.approx(1, abs=0.05)


def test_it_is_a_part_of_the_variance_beyond_the_token(words):
    """However large the readout is, or what it says of the token alone, as long as that is not nearly all."""
    tokens, labels, read, noise = words
    read = read - torch.stack([read[tokens == token].mean(0) for token in range(TOKENS)])[tokens]
    part = unexplained_part(read + noise, tokens, labels, HEADS)
    assert part == pytest.approx(0.5, abs=0.1)
    of_token = torch.linspace(-1, 1, TOKENS)[tokens][..., None]
    assert unexplained_part(100 * (read + noise), tokens, labels, HEADS) == pytest.approx(part.item(), rel=1e-5)
    assert unexplained_part(read + noise + of_token, tokens, labels, HEADS) == pytest.approx(part.item(), rel=0.02)
    assert unexplained_part(read + noise + 1000 * of_token, tokens, labels, HEADS) < 1e-3


def test_few_words_do_not_make_it_small(words):
    """Where there are not many more words than kinds of them, their means follow the noise."""
    tokens, labels, _, noise = words
    parts = [unexplained_part(noise[i : i + 1], tokens[i : i + 1], labels[i : i + 1], HEADS) for i in range(16)]
    assert torch.stack(parts).mean() == pytest.approx(1, abs=0.1)


def test_each_head_counts_by_itself(words):
    tokens, labels, read, noise = words
    mixed = torch.cat([read[..., :CHANNELS], 1000 * noise[..., CHANNELS:]], dim=-1)
    assert unexplained_part(mixed, tokens, labels, HEADS) == pytest.approx(2 / 3, abs=0.05)


def test_positions_without_a_label_do_not_count(words):
    tokens, labels, read, noise = words
    unknown = torch.arange(40) % 3 == 0
    left_out = labels.masked_fill(unknown, -100)
    disturbed = torch.where(unknown[:, None], 1e6 * noise, read + noise)
    wanted = unexplained_part((read + noise)[:, ~unknown], tokens[:, ~unknown], labels[:, ~unknown], HEADS)
    assert unexplained_part(disturbed, tokens, left_out, HEADS) == pytest.approx(wanted.item(), rel=1e-5)


def test_it_begins_and_grows_by_factors():
    schedule = Schedule(weight=1e4, start=0.2, full=0.6)
    weights = [schedule.weight_at(part) for part in (0, 0.199, 0.2, 0.3, 0.4, 0.6, 1)]
    assert weights == pytest.approx([0, 0, 1, 10, 100, 1e4, 1e4])


@pytest.mark.parametrize("name", ["nplr", "nplr_exact", "mamba3_2", "gdn", "deltaproduct_2"])
def test_the_gradient_is_that_of_both_and_the_value_that_of_the_answers(name):
    """For every family with heads, of what its last block reads."""
    run = parse_run(["--task=s3", f"--model={name}", "--task.length=12", "--task.batch_size=8"])
    torch.manual_seed(0)
    model = new_model(run.task, run.config).train()
    batch, weights = run.task.batch(0, 0), list(model.parameters())
    term = Consistency(model, Schedule(weight=10.0, start=0.0, full=0.5))
    answers = model(**batch).loss
    part = unexplained_part(term.read, batch["input_ids"], batch["labels"], run.config.num_heads)
    assert 0.1 < part < 2
    gradients = [torch.autograd.grad(x, weights, retain_graph=True, allow_unused=True) for x in (answers, part)]
    last = {id(x) for x in model.base_model.layers[-1].mixer.parameters()}
    assert any(y is not None for x, y in zip(weights, gradients[1], strict=True) if id(x) in last)
    found = term.add_to(answers, batch, part=0.5, share=0.5)
    assert found.item() == answers.item()
    for x, of_answers, of_part in zip(torch.autograd.grad(found, weights), *gradients, strict=True):
        wanted = (of_answers + 5 * (0 if of_part is None else of_part)) / 11
        assert (x - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_before_it_begins_there_is_only_the_loss():
    run = parse_run(["--task=s3", "--task.length=6", "--task.batch_size=4"])
    model = new_model(run.task, run.config).train()
    term = Consistency(model, Schedule(weight=10.0, start=0.2, full=0.5))
    loss = model(**run.task.batch(0, 0)).loss
    assert term.add_to(loss, run.task.batch(0, 0), part=0.1, share=1.0) is loss


def test_nothing_is_kept_of_an_evaluation():
    run = parse_run(["--task=s3", "--task.length=6", "--task.batch_size=4"])
    model = new_model(run.task, run.config).eval()
    term = Consistency(model, Schedule(weight=10.0, start=0.0, full=0.5))
    model(**run.task.batch(0, 0))
    assert term.read is None


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
