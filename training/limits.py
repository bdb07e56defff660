"""What the numbers of a run's command line may be, so that a wrong one ends it before its start and by its name."""

import math
from collections.abc import Callable

Limit = tuple[str, Callable[[float], bool]]  # in words, and whether a number keeps to it

FROM_0: Limit = ("a finite number of at least 0", lambda x: 0 <= x < math.inf)
ABOVE_0: Limit = ("a finite number above 0", lambda x: 0 < x < math.inf)
BELOW_1: Limit = ("at least 0 and below 1", lambda x: 0 <= x < 1)
WHOLE_FROM_0: Limit = ("a whole number of at least 0", lambda x: x >= 0)
WHOLE_FROM_1: Limit = ("a whole number of at least 1", lambda x: x >= 1)
SEED: Limit = ("a whole number from 0 to 2**32 - 1", lambda x: 0 <= x < 2**32)

# Fields of a run. The parser has made whole numbers of those that must be.
LIMITS: dict[str, Limit] = {
    "consistency": ("0, or a finite number of at least 1", lambda x: x == 0 or 1 <= x < math.inf),
    "consistency_start": BELOW_1,
    "consistency_full": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "consistency_limit": FROM_0,
    "consistency_noise": FROM_0,
    "per_device_train_batch_size": WHOLE_FROM_1,
    "max_steps": ("a whole number from 1 to 2**31 - 1", lambda x: 1 <= x < 2**31),
    "learning_rate": FROM_0,
    "warmup_steps": FROM_0,
    "weight_decay": FROM_0,
    "adam_beta1": BELOW_1,
    "adam_beta2": BELOW_1,
    "adam_epsilon": FROM_0,
    "gradient_accumulation_steps": WHOLE_FROM_1,
    "max_grad_norm": ("a number of at least 0", lambda x: x >= 0),  # infinite: measured, and not clipped
    "neftune_noise_alpha": FROM_0,
    "torch_empty_cache_steps": WHOLE_FROM_1,
    "logging_steps": ABOVE_0,
    "eval_steps": ABOVE_0,
    "eval_delay": FROM_0,
    "per_device_eval_batch_size": WHOLE_FROM_1,
    "eval_accumulation_steps": WHOLE_FROM_1,
    "save_steps": ABOVE_0,
    "save_total_limit": WHOLE_FROM_0,  # 0: all
    "seed": SEED,
    "data_seed": SEED,
    "dataloader_num_workers": WHOLE_FROM_0,
    "dataloader_prefetch_factor": WHOLE_FROM_1,
    "ddp_bucket_cap_mb": WHOLE_FROM_1,
    "ddp_timeout": WHOLE_FROM_1,
}


def check_numbers(values: dict) -> None:
    """Those that are None are not given."""
    for name, (allowed, keeps) in LIMITS.items():
        if values[name] is not None and not keeps(values[name]):
            raise ValueError(f"{name}={values[name]} is not allowed: it must be {allowed}.")
