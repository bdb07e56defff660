"""All that `train_hf.py` knows by name, as data: the models, and how they are trained."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelPreset:
    """
    Args:
        title: What a reader calls the model.
        model_type: Under which the configuration is registered with the Auto classes.
        fields: Fields of that configuration that differ from its defaults.
        papers: Where the model comes from, by the names in `CITATIONS`.
        training: Fields of TrainingArguments that this model wants otherwise than the training preset.
        paper_task: Settings of some tasks, by their names, that the paper has otherwise for this model.
        of_episodes: Fields that a model of episodes has otherwise than one of words.
    """

    title: str
    model_type: str
    fields: dict = field(default_factory=dict)
    papers: tuple[str, ...] = ("mamba3",)
    training: dict = field(default_factory=dict)
    paper_task: dict[str, dict] = field(default_factory=dict)
    of_episodes: dict = field(default_factory=dict)

    def fields_of(self, auto_class: str) -> dict:
        """The fields of a model with this Auto class."""
        return self.fields | (self.of_episodes if auto_class == "AutoModelForBehaviorCloning" else {})


# Mirrors that neither fade nor grow and are fully on or off; label smoothing keeps pulling once the answers are right.
LASTING = {"reflection_form": "contractive", "gate_form": "exact", "label_smoothing": 0.1}
# With turns beside the mirrors, of a first state that no full mirror writes to. Step sizes above 1 let one token turn a
# plane by any angle, half a turn among them, where its gradient does not fade. Of many letters each has a direction of
# its own, so that what is learned of one does not disturb the others.
EXACT = LASTING | {
    "injection": "overwrite",
    "initial_state": "learned",
    "rope_per_head": True,
    "embedding_init": "orthogonal",
    "dt_min": 1.2,
    "dt_max": 3,
    "beta_bias_init": 2.5,
}
# Most frames of an episode change nothing: a model that starts with steps and mirrors as small as these need not learn
# to be still first.
EXACT_OF_EPISODES = {"dt_min": 0.001, "dt_max": 0.1, "beta_bias_init": -2.0}
# Mirrors alone, written to where they reflect.
EXACT_NOROPE = LASTING | {"injection": "delta", "use_rope": False, "beta_bias_init": 2.0}
# The delta family has Gated DeltaNet as its default; the others of the paper go without its convolution and gate.
BARE_DELTA = {"head_value_dim": 32, "conv_size": 0, "use_output_gate": False}
UNGATED_DELTA = BARE_DELTA | {"use_decay": False}
PRODUCT = ("deltaproduct",)

MODELS: dict[str, ModelPreset] = {
    "mamba3": ModelPreset("Mamba-3", "mamba3_nplr", {"reflection_rank": 0}),
    "mamba3_2": ModelPreset("Mamba-3, 2 blocks", "mamba3_nplr", {"reflection_rank": 0, "num_hidden_layers": 2}),
    "mamba3_4": ModelPreset("Mamba-3, 4 blocks", "mamba3_nplr", {"reflection_rank": 0, "num_hidden_layers": 4}),
    "nplr": ModelPreset("Mamba-3 + NPLR", "mamba3_nplr"),
    "nplr_norope": ModelPreset("Mamba-3 + NPLR, no rotation", "mamba3_nplr", {"use_rope": False}),
    "nplr_exact": ModelPreset("Mamba-3 + NPLR, exact options", "mamba3_nplr", EXACT, of_episodes=EXACT_OF_EPISODES),
    "nplr_exact_norope": ModelPreset("Mamba-3 + NPLR, exact options, no rotation", "mamba3_nplr", EXACT_NOROPE),
    "deltanet": ModelPreset("DeltaNet", "delta_family", UNGATED_DELTA, ("deltanet",)),
    "deltaproduct_2": ModelPreset(
        "DeltaProduct, 2 steps", "delta_family", UNGATED_DELTA | {"num_householder": 2}, PRODUCT
    ),
    "deltaproduct_4": ModelPreset(
        "DeltaProduct, 4 steps", "delta_family", UNGATED_DELTA | {"num_householder": 4}, PRODUCT
    ),
    "gdn": ModelPreset("Gated DeltaNet", "delta_family", papers=("gdn",)),
    "gdp_2": ModelPreset("Gated DeltaProduct, 2 steps", "delta_family", BARE_DELTA | {"num_householder": 2}, PRODUCT),
    "gdp_4": ModelPreset("Gated DeltaProduct, 4 steps", "delta_family", BARE_DELTA | {"num_householder": 4}, PRODUCT),
    "ids4": ModelPreset(
        "IDS4",
        "input_dependent_s4",
        papers=("ids4",),
        training={"learning_rate": 1e-4, "lr_scheduler_type": "constant", "weight_decay": 0.01},
        paper_task={"z5": {"total_steps": 60_000}},
    ),
}


@dataclass(frozen=True)
class TrainingPreset:
    """
    Args:
        description: For the help.
        training: Fields of the training.
        task: Settings of all its tasks.
        auto_class: Name of the Auto class of the models whose tasks it is for; None for all.
    """

    description: str
    training: dict
    task: dict = field(default_factory=dict)
    auto_class: str | None = None


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
    # Short words first, and many: in them a model finds the group, which takes long where there are sixty letters. What
    # is left of a rate that falls as far as this brings mirrors and turns to where they belong, to the last digits.
    "exact": TrainingPreset(
        "words: 4,000 updates from 1e-2, with a term by which a state lasts",
        COMMON
        | {
            "learning_rate": 1e-2,
            "lr_scheduler_type": "polynomial",
            "lr_scheduler_kwargs": {"power": 3.0},
            "adam_beta2": 0.95,
            "consistency": 1e5,
            "consistency_start": 0.22,
            "consistency_full": 0.5,
            "consistency_limit": 0.1,
            "consistency_noise": 1e4,
        },
        {
            "total_steps": 4_000,
            "start_length": 4,
            "growth": "geometric",
            "curriculum_start": 0.22,
            "curriculum_part": 0.36,
        },
        auto_class="AutoModelForSequenceClassification",
    ),
    # The term from nearly the start: by it a model learns to be still before it is shown many swaps. The loss of
    # actions has no floor, so a term that weighed more would be all there is: heads then tell fewer slots apart.
    "exact_episodes": TrainingPreset(
        "shell game: 6,000 from 3e-3, with it",
        COMMON
        | {
            "learning_rate": 3e-3,
            "lr_scheduler_type": "polynomial",
            "lr_scheduler_kwargs": {"power": 2.0},
            "adam_beta2": 0.95,
            "consistency": 100.0,
            "consistency_start": 0.04,
            "consistency_full": 0.3,
        },
        {"total_steps": 6_000, "start_swaps": 1, "curriculum_part": 0.6},
        auto_class="AutoModelForBehaviorCloning",
    ),
}
