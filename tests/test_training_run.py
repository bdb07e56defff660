"""The command line of training: names, presets, files and fields make one run, and mistakes are named."""

import json

import pytest
from mamba3_nplr.configuration.presets import MODELS, PRESETS
from mamba3_nplr.datasets_scripts import training_run
from mamba3_nplr.datasets_scripts.evaluate_checkpoint import auto_class
from mamba3_nplr.datasets_scripts.tasks import TASKS
from mamba3_nplr.datasets_scripts.training_run import LAST, OFTEN_USED, UsageError, help_text, parse_run
from transformers import TrainingArguments

PARAMETERS = {"mamba3": 57_408, "mamba3_2": 112_640, "mamba3_4": 223_104, "nplr": 74_832}


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("model", PARAMETERS)
def test_the_models_of_the_paper_have_its_numbers_of_parameters(model):
    run = parse_run(["--task=shell", f"--model={model}"])
    assert auto_class(run.task).from_config(run.config).num_parameters() == PARAMETERS[model]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("task", TASKS)
def test_every_model_fits_every_task(task, preset):
    for model in MODELS:
        run = parse_run([f"--task={task}", f"--model={model}", f"--preset={preset}"])
        assert run.args.max_steps == run.task.total_steps
        assert run.args.per_device_train_batch_size == run.task.batch_size
        assert run.args.output_dir == f"runs/{task}-{model}-{preset}-seed0"
        assert {name: getattr(run.config, name) for name in run.task.model_fields} == run.task.model_fields


@pytest.mark.parametrize(
    ("task", "updates", "batch"), [("z5", 20_000, 64), ("s5_generators", 60_000, 64), ("shell", 20_000, 32)]
)
def test_the_paper_preset_is_the_papers(task, updates, batch):
    run = parse_run([f"--task={task}", "--preset=paper", "--seed=4"])
    args = run.args
    assert (args.max_steps, args.per_device_train_batch_size, args.seed) == (updates, batch, 4)
    assert (args.learning_rate, args.weight_decay, args.max_grad_norm) == (1e-3, 0.0, 1.0)
    assert args.lr_scheduler_type == "cosine" and args.warmup_steps == 0 and args.optim.startswith("adamw_torch")


def test_parts_of_a_run_become_updates():
    run = parse_run(["--max_steps=30", "--save_steps=0.05", "--eval_steps=0.1", "--logging_steps=7"])
    assert (run.args.save_steps, run.args.eval_steps, run.args.logging_steps) == (2, 3, 7)
    assert (run.arguments["save_steps"], run.arguments["eval_steps"]) == (0.05, 0.1)


def test_file_and_command_line_have_precedence_in_this_order(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "task: shell\nmodel: mamba3\nlearning_rate: 5e-4\nmax_steps: 7\nbf16: false\nreport_to: [none]\n"
        "task.windows: 4\ntask.max_swaps: 3\nmodel.beta_bias_init: 1e-1\nmodel.use_rope: false\n"
    )
    run = parse_run([f"--config={file}", "--max_steps", "9", "--task.windows=5", "--model", "nplr"])
    assert (run.task_name, run.model_name, run.preset) == ("shell", "nplr", "quick")
    assert (run.args.learning_rate, run.args.max_steps, run.task.total_steps) == (5e-4, 9, 9)
    assert (run.task.windows, run.task.max_swaps) == (5, 3)
    assert (run.config.beta_bias_init, run.config.use_rope) == (0.1, False)
    (tmp_path / "run.json").write_text(json.dumps({"arguments": run.arguments}))
    again = parse_run([f"--config={tmp_path / 'run.json'}"])
    assert again.differences(json.loads(json.dumps(run.arguments))) == []
    assert again.task.settings == run.task.settings and again.config.to_dict() == run.config.to_dict()


def test_sizes_agree_however_they_are_given(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    run = parse_run(["--per_device_train_batch_size=4", "--gradient_accumulation_steps=2", "--task.total_steps=30"])
    assert (run.task.batch_size, run.args.max_steps) == (8, 30)
    run = parse_run(["--task.batch_size=12", "--gradient_accumulation_steps=3", "--max_steps=10"])
    assert (run.args.per_device_train_batch_size, run.task.total_steps) == (4, 10)
    run = parse_run(["--max_steps=10", "--task.total_steps=20"])  # the first half of a curriculum
    assert (run.args.max_steps, run.task.total_steps) == (10, 20)


def test_values():
    run = parse_run(
        ["--task.start_length=null", "--task.test_lengths", "[4, 8]", "--model.a_min", "1e-3", "--bf16", "false"]
    )
    assert run.task.start_length is None and run.task.test_lengths == (4, 8) and run.config.a_min == 1e-3
    assert parse_run(["--resume_from_checkpoint"]).args.resume_from_checkpoint == LAST
    assert parse_run(["--resume_from_checkpoint", "x"]).args.resume_from_checkpoint == "x"
    assert parse_run(["--max-steps=3"]).args.max_steps == 3


WRONG = {
    "--lerning_rate=1": "--lerning_rate is unknown. Did you mean `--learning_rate`?",
    "--state_size=8": "--state_size is unknown. Did you mean `--model.state_size`?",
    "--widows=8": "Did you mean `--task.windows`?",
    "--xyzzy": "--xyzzy is unknown. train_hf.py --help lists the fields.",
    "--learn=1": "--learn is unknown",
    "--model.stat_size=8": "has no field `stat_size` (given: 8). Did you mean `state_size`?",
    "--model.expand=0.5": "expand",
    "--model.head_dim=5": "head_dim=5 is not allowed",
    "--model.use_rope": "--model.use_rope needs a value",
    "--task.widows=8": "has no setting `widows`",
    "--task.length=0": "length=0 is not allowed",
    "--task=shel": "task='shel' is unknown. Did you mean `shell`?",
    "--model=nprl": "model='nprl' is unknown. Did you mean `nplr`?",
    "--preset=papr": "preset='papr' is unknown. Did you mean `paper`?",
    "stray": "'stray' is not expected here",
    "--num_train_epochs=3": "--num_train_epochs cannot be used",
    "--label_smoothing_factor=0.1": "give --model.label_smoothing",
    "--num_processes=4": "num_processes=4 were asked for and 1 started",
    "--gradient_accumulation_steps=7": "task.batch_size=64 is not allowed",
    "--config=/nowhere.yaml": "config='/nowhere.yaml' cannot be read",
}


@pytest.mark.parametrize(("argument", "message"), WRONG.items())
def test_mistakes_are_named(argument, message):
    with pytest.raises(UsageError) as error:
        parse_run([argument])
    assert message in str(error.value)


def test_a_field_of_the_wrong_type_is_named(capsys):
    with pytest.raises(SystemExit):
        parse_run(["--learning_rate=fast"])
    assert "argument --learning_rate: invalid float value: 'fast'" in capsys.readouterr().err


def test_two_batch_sizes_must_agree():
    with pytest.raises(UsageError, match="do not agree"):
        parse_run(["--per_device_train_batch_size=4", "--task.batch_size=5"])


def test_a_launcher_that_started_one_process_of_several_is_noticed(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # as `accelerate launch --cpu --num_processes 2` leaves it
    with pytest.raises(UsageError, match="only this one started"):
        parse_run([])


def test_what_is_to_be_reported_to_must_be_installed(monkeypatch):
    monkeypatch.setattr(training_run, "get_available_reporting_integrations", lambda: ["trackio"])
    assert parse_run([]).args.report_to == []
    assert parse_run(["--report_to", "trackio", "none"]).args.report_to == ["trackio", "none"]
    with pytest.raises(UsageError, match="report_to=tensorboard needs the package of that name.*here: trackio"):
        parse_run(["--report_to=tensorboard"])
    monkeypatch.setattr(training_run, "get_available_reporting_integrations", lambda: ["tensorboard"])
    assert parse_run([]).args.report_to == ["tensorboard"]


def test_help_is_short_and_complete():
    text = help_text()
    assert len(text.splitlines()) < 110 and max(map(len, text.splitlines())) <= 110
    assert text.index("--task TASK") < text.index("--output_dir")
    for name in [*MODELS, *TASKS, *PRESETS, *OFTEN_USED, *(f for f in TrainingArguments.__dataclass_fields__)]:
        assert name in text, name
    everything = help_text(everything=True)
    assert "--adam_beta2" in everything and len(everything) > 2 * len(text)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", ["gdn", "nplr_exact"])
def test_help_is_about_the_task_and_the_model_that_are_named(task, model, tmp_path):
    run = parse_run([f"--task={task}", f"--model={model}", "--preset=paper"])
    (tmp_path / "run.json").write_text(json.dumps({"arguments": run.arguments}))
    for arguments in (
        ["--task", task, "--help", f"--model={model}", "--preset", "paper", "--task.length=3"],
        [f"--config={tmp_path / 'run.json'}", "--help"],
    ):
        text = help_text(arguments).replace("\n  ", " ")
        assert f"here of {task} (" in text and f"here of {model} (" in text
        for name, x in [*run.task.settings.items(), *MODELS[model].fields.items()]:
            assert f" {name}={x!r}" in text, name


def test_help_refuses_unknown_names():
    with pytest.raises(UsageError, match="task='shel' is unknown. Did you mean `shell`"):
        help_text(["--help", "--task=shel"])


def test_the_record_says_what_was_tested():
    run = parse_run(["--task=shell", "--task.windows=8", "--task.max_swaps=8"])
    assert run.arguments["task.test_windows"] == run.changed["task.test_windows"] == (8, 16)
    assert "task.test_windows" not in parse_run(["--task=shell"]).changed


def test_secrets_are_not_recorded():
    run = parse_run(["--hub_token=hf_secret"])
    assert "hf_secret" not in json.dumps(run.arguments) and "hf_secret" not in json.dumps(run.changed)
