"""The command line of training: names, presets, files and fields make one run, and mistakes are named."""

import json
from pathlib import Path

import pytest
from transformers import TrainingArguments

from mamba3_nplr.configuration.presets import MODELS, PRESETS
from mamba3_nplr.datasets_scripts.tasks import TASKS
from mamba3_nplr.training.arguments import parse_run
from mamba3_nplr.training.command_line import LAST, OFTEN_USED, make_parser
from mamba3_nplr.training.help import help_text
from mamba3_nplr.training.limits import LIMITS
from mamba3_nplr.training.models import new_model
from mamba3_nplr.training.usage import UsageError, make_folder

PARAMETERS = {"mamba3": 57_408, "mamba3_2": 112_640, "mamba3_4": 223_104, "nplr": 74_832}


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("model", PARAMETERS)
def test_the_models_of_the_paper_have_its_numbers_of_parameters(model):
    run = parse_run(["--task=shell", f"--model={model}"])
    assert new_model(run.task, run.config).num_parameters() == PARAMETERS[model]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("task", TASKS)
def test_every_model_fits_every_task(task, preset):
    if PRESETS[preset].auto_class not in (None, TASKS[task].auto_class):
        with pytest.raises(UsageError, match=f"preset={preset} is not allowed: {task} is not one of its tasks"):
            parse_run([f"--task={task}", f"--preset={preset}"])
        return
    for model in MODELS:
        if preset.startswith("exact") and (model == "ids4" or task == "shell_hand"):
            continue  # without heads, or without states that are known, which are errors of their own
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


# Numbers that mean something to others: launchers, and fields that are refused or compared with what was started.
WITHOUT_LIMITS = {"local_rank", "num_processes", "num_train_epochs", "label_smoothing_factor"}
NUMBERS = {action.dest: action.type for action in make_parser()._actions if action.type in (int, float)}


def test_every_number_has_limits():
    assert set(NUMBERS) == set(LIMITS) | WITHOUT_LIMITS


@pytest.mark.parametrize("name", LIMITS)
def test_numbers_that_no_run_can_have_are_refused_by_name(name):
    for value in ["-1", "-7"] + ["nan", "-inf"] * (NUMBERS[name] is float):
        with pytest.raises(UsageError, match=rf"^{name}=\S+ is not allowed: it must be "):
            parse_run([f"--{name}={value}"])


TOO_MUCH = ["seed=4294967296", "data_seed=4294967296", "max_steps=2147483648", "adam_beta1=1", "adam_beta2=1.5"]
TOO_MUCH += [f"{name}=inf" for name in NUMBERS if NUMBERS[name] is float and name not in WITHOUT_LIMITS]
TOO_MUCH.remove("max_grad_norm=inf")
FROM_1 = ["gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size", "max_steps"]
FROM_1 += ["logging_steps", "save_steps", "eval_steps", "ddp_timeout", "dataloader_prefetch_factor"]


@pytest.mark.parametrize("given", [*TOO_MUCH, *(f"{name}=0" for name in FROM_1)])
def test_numbers_out_of_bounds_are_refused_by_name(given):
    with pytest.raises(UsageError, match=f"^{given.partition('=')[0]}=.* is not allowed: it must be "):
        parse_run([f"--{given}"])


def test_numbers_at_their_bounds_are_taken():
    at_0 = [
        "learning_rate",
        "warmup_steps",
        "weight_decay",
        "adam_beta1",
        "adam_epsilon",
        "max_grad_norm",
        "eval_delay",
    ]
    at_0 += ["save_total_limit", "seed", "data_seed", "dataloader_num_workers"]
    args = parse_run([f"--{name}=0" for name in at_0] + ["--max_steps=1", "--save_steps=1e-9"]).args
    assert all(getattr(args, name) == 0 for name in at_0) and args.max_steps == args.save_steps == 1
    assert parse_run(["--max_grad_norm=inf", "--seed=4294967295"]).args.max_grad_norm == float("inf")


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
    "--task=shell_hand --consistency=10": "consistency=10.0 is not allowed: shell_hand does not say what to know",
    "--model=ids4 --consistency=10": "consistency=10.0 is not allowed: ids4 has no heads",
    "--consistency=0.5": "consistency=0.5 is not allowed: it must be 0, or a finite number of at least 1",
    "--consistency=10 --consistency_start=0.7": "consistency_start=0.7 is not allowed: it must be below",
    "--task.curriculum_start=0.6": "curriculum_start=0.6 is not allowed: it must be at least 0 and below",
    "--label_smoothing_factor=0.1": "give --model.label_smoothing",
    "--num_processes=4": "num_processes=4 were asked for and 1 started",
    "--gradient_accumulation_steps=7": "task.batch_size=64 is not allowed",
    "--config=/nowhere.yaml": "config='/nowhere.yaml' cannot be read",
}
# What a run would need only later, some of it when all training is done.
NEEDED_LATER = {
    "--task.test_lengths=[]": "test_lengths=() is not allowed",
    "--task.test_lengths=[16,16]": "test_lengths=(16, 16) is not allowed: it must be a list of one or more different",
    "--task.test_lengths=[16,0]": "test_lengths=0 is not allowed",
    "--task.test_lengths=[-4]": "test_lengths=-4 is not allowed",
    "--task.test_lengths=[16,2.5]": "test_lengths=2.5 is not allowed",
    "--task.test_lengths=[true]": "test_lengths=True is not allowed",
    "--task.test_lengths=[[4]]": "test_lengths=[4] is not allowed",
    "--task.test_lengths=16": "test_lengths=16 is not allowed",
    "--task.test_lengths=16,32": "test_lengths='16,32' is not allowed",
    "--task.test_size=0": "test_size=0 is not allowed",
    "--task.test_size=1.5": "test_size=1.5 is not allowed",
    "--task.group=3": "group=3 is not allowed",
    "--task.curriculum_part=all": "curriculum_part='all' is not allowed",
    "--task=shell --task.test_windows=[]": "test_windows=() is not allowed",
    "--task=shell --task.test_windows=[4,4]": "test_windows=(4, 4) is not allowed",
    "--task=shell --task.test_windows=[-1]": "test_windows=-1 is not allowed",
    "--task=shell --task.test_windows=[1.0]": "test_windows=1.0 is not allowed",
    "--task=shell --task.test_size=0": "test_size=0 is not allowed",
    "--task=shell --task.start_swaps=0.5": "start_swaps=0.5 is not allowed",
    "--task=shell --task.packed=3": "packed=3 is not allowed",
    "--metric_for_best_model=loss": "metric_for_best_model='loss' is not allowed: measured are accuracy, final",
    "--task=shell --metric_for_best_model=accuracy": "measured are success",
    "--load_best_model_at_end --save_steps=0.1": "metric_for_best_model='loss' is not allowed",
    "--lr_scheduler_type=warmup_stable_decay": "lr_scheduler_type=warmup_stable_decay with lr_scheduler_kwargs=None",
    '--lr_scheduler_kwargs={"typo":1}': "lr_scheduler_kwargs={'typo': 1} is not allowed",
    "--optim=lomo": "optim=lomo with optim_args=None cannot be used",
    "--optim_args=foo": "optim_args=foo cannot be used",
    "--accelerator_config=/nowhere.json": "/nowhere.json",
}


@pytest.mark.parametrize(("arguments", "message"), [*WRONG.items(), *NEEDED_LATER.items()])
def test_mistakes_are_named(arguments, message):
    with pytest.raises(UsageError) as error:
        parse_run(arguments.split())
    assert message in str(error.value)


def test_what_a_run_measures_can_choose_its_best_model():
    for task, metric in (("s5_generators", "final_accuracy"), ("shell_jitter", "eval_success")):
        arguments = [f"--task={task}", f"--metric_for_best_model={metric}", "--load_best_model_at_end"]
        assert parse_run([*arguments, "--save_steps=0.1"]).args.load_best_model_at_end


@pytest.mark.parametrize("content", ["arguments: 3", "arguments: [1, 2]", "arguments:", "- task", "3", "", '"text"'])
def test_a_configuration_file_without_fields_is_refused(content, tmp_path):
    (tmp_path / "run.yaml").write_text(content)
    for read in (parse_run, help_text):
        with pytest.raises(UsageError, match="run.yaml.*must hold names and values"):
            read([f"--config={tmp_path / 'run.yaml'}"])


def test_a_folder_is_made_and_tried(tmp_path):
    make_folder("output_dir", tmp_path / "a" / "b")
    assert list((tmp_path / "a").rglob("*")) == [tmp_path / "a" / "b"]
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "a", Path("/proc/a")):
        with pytest.raises(UsageError, match=f"^output_dir='{folder}' cannot be written: "):
            make_folder("output_dir", folder)


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
    installed = "mamba3_nplr.training.arguments.get_available_reporting_integrations"
    monkeypatch.setattr(installed, lambda: ["trackio"])
    assert parse_run([]).args.report_to == []
    assert parse_run(["--report_to", "trackio", "none"]).args.report_to == ["trackio", "none"]
    with pytest.raises(UsageError, match="report_to=tensorboard needs the package of that name.*here: trackio"):
        parse_run(["--report_to=tensorboard"])
    monkeypatch.setattr(installed, lambda: ["tensorboard"])
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
        for name, x in [*run.task.settings.items(), *MODELS[model].fields_of(run.task.auto_class).items()]:
            assert f" {name}={x!r}" in text, name


def test_help_refuses_unknown_names():
    with pytest.raises(UsageError, match="task='shel' is unknown. Did you mean `shell`"):
        help_text(["--help", "--task=shel"])


def test_a_schedule_with_options_is_in_the_record_and_read_again(tmp_path):
    run = parse_run(["--task=s3", "--model=nplr_exact", "--preset=exact", "--seed=3"])
    assert run.args.lr_scheduler_kwargs == run.arguments["lr_scheduler_kwargs"] == {"power": 3.0}
    (tmp_path / "run.json").write_text(json.dumps({"arguments": run.arguments}))
    again = parse_run([f"--config={tmp_path / 'run.json'}"])
    assert again.args.lr_scheduler_kwargs == {"power": 3.0} and again.consistency == run.consistency is not None
    assert again.differences(json.loads(json.dumps(run.arguments))) == [] and not again.changed


def test_the_record_says_what_was_tested():
    run = parse_run(["--task=shell", "--task.windows=8", "--task.max_swaps=8"])
    assert run.arguments["task.test_windows"] == run.changed["task.test_windows"] == (8, 16)
    assert "task.test_windows" not in parse_run(["--task=shell"]).changed


def test_secrets_are_not_recorded():
    run = parse_run(["--hub_token=hf_secret"])
    assert "hf_secret" not in json.dumps(run.arguments) and "hf_secret" not in json.dumps(run.changed)
