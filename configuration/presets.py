"""What `train_hf.py` knows by name, as data: the models, and how they are trained."""

from dataclasses import dataclass, field

from .configuration_delta_family import PRESETS as DELTA_FAMILY
from .configuration_ids4 import PRESETS as IDS4


@dataclass(frozen=True)
class ModelPreset:
    """
    Args:
        model_type: Under which the configuration is registered with the Auto classes.
        fields: Fields of that configuration that differ from its defaults.
        training: Fields of TrainingArguments that this model wants otherwise than the training preset.
        paper_task: Settings of some tasks, by their names, that the paper has otherwise for this model.
        papers: Where the model comes from, by the names in `CITATIONS`.
    """

    model_type: str
    fields: dict = field(default_factory=dict)
    papers: tuple[str, ...] = ("mamba3",)
    training: dict = field(default_factory=dict)
    paper_task: dict[str, dict] = field(default_factory=dict)


# Mirrors that neither fade nor grow and are fully on or off, written to only where they reflect; label smoothing keeps
# pulling once the answers are right. Together they hold a state for as long as one likes.
EXACT = {
    "reflection_form": "contractive",
    "gate_form": "exact",
    "injection": "delta",
    "use_rope": False,
    "beta_bias_init": 2.0,
    "label_smoothing": 0.1,
}

DELTA_PAPERS = {
    "deltanet": ("deltanet",),
    "gdn": ("gdn",),
    **dict.fromkeys(("deltaproduct_2", "deltaproduct_4", "gdp_2", "gdp_4"), ("deltaproduct",)),
}

MODELS: dict[str, ModelPreset] = {
    "mamba3": ModelPreset("mamba3_nplr", {"reflection_rank": 0}),
    "mamba3_2": ModelPreset("mamba3_nplr", {"reflection_rank": 0, "num_hidden_layers": 2}),
    "mamba3_4": ModelPreset("mamba3_nplr", {"reflection_rank": 0, "num_hidden_layers": 4}),
    "nplr": ModelPreset("mamba3_nplr"),
    "nplr_norope": ModelPreset("mamba3_nplr", {"use_rope": False}),
    "nplr_exact": ModelPreset("mamba3_nplr", EXACT),
    **{
        name: ModelPreset(config.model_type, fields, DELTA_PAPERS[name])
        for name, (config, fields) in DELTA_FAMILY.items()
    },
    **{
        name: ModelPreset(
            config.model_type,
            fields,
            ("ids4",),
            training={"learning_rate": 1e-4, "lr_scheduler_type": "constant", "weight_decay": 0.01},
            paper_task={"z5": {"total_steps": 60_000}},
        )
        for name, (config, fields) in IDS4.items()
    },
}


@dataclass(frozen=True)
class TrainingPreset:
    """
    Args:
        description: For the help.
        training: Fields of TrainingArguments.
        task: Settings of all tasks.
    """

    description: str
    training: dict
    task: dict = field(default_factory=dict)


# AdamW without decay is Adam. Intervals below 1 are parts of the run.
COMMON = {
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 1.0,
    "logging_steps": 0.01,
    "eval_strategy": "steps",
    "eval_steps": 0.1,
    "per_device_eval_batch_size": 128,
    "save_steps": 0.05,
    "save_total_limit": 2,
    "seed": 0,
    # A loss that is not finite stops the run; hiding it from the log would be of no use.
    "logging_nan_inf_filter": False,
    "remove_unused_columns": False,
    "ddp_find_unused_parameters": False,
}

PRESETS: dict[str, TrainingPreset] = {
    "quick": TrainingPreset(
        "2,000 updates, learning rate 3e-3: a minute or so", COMMON | {"learning_rate": 3e-3}, {"total_steps": 2_000}
    ),
    "paper": TrainingPreset(
        "the paper's number of updates (20,000 or 60,000), learning rate 1e-3", COMMON | {"learning_rate": 1e-3}
    ),
}

# The Auto class whose model learns a task, by what the model reads there.
HEADS = {
    "input_ids": "AutoModelForSequenceClassification",
    "observations": "AutoModelForBehaviorCloning",
}
