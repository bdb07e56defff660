"""The model card of a finished run."""

from huggingface_hub import EvalResult, ModelCardData

from ..configuration.citations import bibtex
from ..configuration.presets import MODELS
from .arguments import TrainingRun
from .record import PLOT

CARD = """
# {model} on {task}

{description} The model has {parameters:,} parameters and was trained for {updates:,} updates of {batch_size} fresh
sequences each, with the `{preset}` preset and seed {seed}.

## Results

Share of the test sequences whose {answer} is right. *Chance* is the best guess that does not follow the state. The test
sets share no random numbers with training; this is one run with one seed.

| Test set | {size_name} | {model} | Chance |
| --- | --- | --- | --- |
{rows}
{plot}
`results.json` has all figures, {details} too.

## Use

```python
{example}
```

{example_note} {code_note}

## Training

```bash
{command}
```

gives the same run again with the versions that it ran with; `run.json` has its settings in full:

{versions}

## Limits

It knows one synthetic task, and only inputs drawn as in that task. What it does on sequences longer than those it was
trained on is in the table, and nothing is known about longer ones. It was trained in {precision}; other precisions were
not tried.

## Citation

The paper of the tasks and the reflection, and that of the model it is compared with or built on:

```bibtex
{citations}
```
"""


CODE_NOTES = {
    True: "Where `mamba3_nplr` is installed, `import mamba3_nplr` replaces\n`trust_remote_code=True`.",
    False: "The code is that of the package `mamba3_nplr`.",
}
TRUST = ", trust_remote_code=True"


def model_card(run: TrainingRun, summary: dict, name: str, plot: bool = False, carries_code: bool = True) -> str:
    """
    Args:
        name: The folder or repository from which the example loads.
        plot: Whether there is a picture of the results.
        carries_code: Whether the code lies beside the weights; else the example imports the package.
    """
    task, metric, results = run.task, summary["metric"], summary["results"]
    rows = [
        f"| `{split}` | {size:,} | {100 * results[split][metric]:.2f} % | {100 * results[split]['chance']:.2f} % |"
        for split, size in task.test_sizes.items()
    ]
    text = CARD.format(
        model=run.model_name,
        task=run.task_name,
        description=task.description,
        parameters=summary["parameters"],
        updates=summary["updates"],
        batch_size=summary["batch_size"],
        preset=run.preset,
        seed=run.args.seed,
        answer=task.texts.answer,
        size_name=task.size_name.capitalize(),
        rows="\n".join(rows),
        plot=f"\n![{metric.replace('_', ' ')} by size of the test set]({PLOT})\n" if plot else "",
        details=task.texts.details,
        example=example_of(run, name, carries_code),
        example_note=task.example_note,
        code_note=CODE_NOTES[carries_code],
        command=summary["command"],
        versions=", ".join(f"{key} {value}" for key, value in summary["environment"].items() if value),
        citations=bibtex(*MODELS[run.model_name].papers),
        precision="bfloat16" if run.args.bf16 else "float16" if run.args.fp16 else "float32",
    )
    return f"---\n{metadata(run, summary).to_yaml()}\n---\n{text}"


def example_of(run: TrainingRun, name: str, carries_code: bool) -> str:
    example = run.task.example(name, run.config)
    return example if carries_code else f"import mamba3_nplr\n{example.replace(TRUST, '')}"


def with_code(card: str, run: TrainingRun, name: str) -> str:
    """The card of a model without code, once that lies beside it. `name` is where its example loads from."""
    card = card.replace(example_of(run, name, carries_code=False), example_of(run, name, carries_code=True))
    return card.replace(CODE_NOTES[False], CODE_NOTES[True])


def metadata(run: TrainingRun, summary: dict) -> ModelCardData:
    results = [
        EvalResult(
            task_type=run.task.hub.task,
            task_name=run.task.texts.problem,
            dataset_type=run.task_name,
            dataset_name=run.task_name,
            dataset_split=split,
            metric_type=run.task.hub.metric,
            metric_name=summary["metric"].replace("_", " "),
            metric_value=figures[summary["metric"]],
        )
        for split, figures in summary["results"].items()
    ]
    return ModelCardData(
        license="apache-2.0",
        library_name="transformers",
        tags=["state-tracking", "mamba3", "state-space-model", run.task_name, run.config.model_type],
        model_name=f"{run.model_name} on {run.task_name}",
        eval_results=results,
    )
