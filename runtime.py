"""runtime: the command line, the checks of settings that every RL script shares, and Accelerate.

Scripts import these names from common."""

import contextlib
import dataclasses
import io
import math
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import tyro
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, LoggerType
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy


class UsageError(ValueError):
    """Wrong settings, files or data. Raised at start; `launch` prints it as one line."""


class RunError(RuntimeError):
    """What ends a run that had begun, with the way to go on. `launch` prints it as one line."""


def require(condition: bool, message: str) -> None:
    """Raise UsageError unless condition. The message names the value, the limit and the way out."""
    if not condition:
        raise UsageError(message)


def launch(main: Callable, args_type: type, presets: dict, doc: str) -> None:
    """Run `script.py [preset] [--flag value ...]`: parse, then main(args, preset).

    Wrong use prints one line and exits with code 2, a RunError with code 1; so that it lists what
    exists, unknown flags are looked for before tyro sees them."""
    argv, script = sys.argv[1:], Path(sys.argv[0]).name
    preset = argv.pop(0) if argv and not argv[0].startswith("-") else "tiny"
    try:
        require(preset in presets, f"unknown preset {preset!r}; {script} has: {', '.join(presets)}")
        flags = [f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(args_type)]
        for word in argv:
            flag = word.split("=")[0].replace("_", "-")
            known = flag in flags or flag == "--help" or flag.replace("--no-", "--") in flags
            require(
                known or not flag.startswith("--"),
                f"unknown flag {word!r}; {script} has: {' '.join(flags)}",
            )
        summary = doc.strip().splitlines()[0]
        box = io.StringIO()
        try:
            with contextlib.redirect_stderr(box):
                args = tyro.cli(
                    args_type,
                    default=presets[preset],
                    args=argv,
                    prog=f"{script} {preset}",
                    description=f"{summary}\n\nusage: {script} [preset] [--flag value ...]\n"
                    f"presets: {', '.join(presets)}. The defaults below are those of {preset}.",
                )
        except SystemExit as stop:
            if stop.code in (0, None):  # --help
                raise
            raise UsageError(" ".join(re.sub("[─│╭╮╰╯]", " ", box.getvalue()).split())) from None
        main(args, preset)
    except (UsageError, RunError) as error:
        rank = os.environ.get("RANK", "0")
        where = script if rank == "0" else f"{script} (rank {rank})"
        print(f"{where}: error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def is_sharded() -> bool:
    """Whether FSDP2 shards the models: under torchrun, which sets RANK, with one process, too."""
    return "RANK" in os.environ


def num_processes(args) -> int:
    """Ranks, as torchrun says. A dry run without it is about the README's 8 GPUs, or about one CPU
    process where engine_memory is not a share but gigabytes."""
    assumed = 8 if args.dry_run and args.engine_memory <= 1 else 1
    return int(os.environ.get("WORLD_SIZE", assumed))


# What a setting must be, in all scripts that have it.
LIMITS = {
    "must be at least 1": (
        lambda value: value >= 1,
        "num_steps num_epochs max_rows batch_size prompts_per_step group_size max_prompt_tokens "
        "max_response_tokens minibatch_size gen_prompts max_gen_batches num_bins keep_last "
        "critic_updates_per_batch eval_every save_every max_bad_steps eval_problems eval_samples "
        "eval_max_tokens tensor_parallel",
    ),
    "must not be negative": (
        lambda value: value >= 0,
        "seed warmup_steps decay_steps critic_warmup_steps weight_decay kl_coef clip_eps_high "
        "overlong_penalty rollout_is_cap eval_temperature",
    ),
    "must be above 0": (
        lambda value: value > 0,
        "learning_rate critic_learning_rate temperature max_grad_norm value_clip",
    ),
    "must lie in (0, 1]": (lambda value: 0 < value <= 1, "eval_top_p"),
    "must lie in [0, 1]": (
        lambda value: 0 <= value <= 1,
        "gamma gae_lambda label_fraction clip_eps_low warmup_frac final_frac",
    ),
}


def check_limits(args) -> None:
    """Refuse settings that no script can run with. None stands for a default, and passes."""
    for name, value in vars(args).items():
        finite = not isinstance(value, float) or math.isfinite(value)
        require(finite, f"--{name.replace('_', '-')} {value} is not a finite number")
    for limit, (holds, names) in LIMITS.items():
        for name in names.split():
            value = vars(args).get(name)
            require(value is None or holds(value), f"--{name.replace('_', '-')} {value} {limit}")
    trackers = [tracker.value for tracker in get_available_trackers()]
    known = [kind.value for kind in LoggerType if kind.value != "all"]
    require(
        args.track in ("", *trackers),
        f"--track {args.track!r} is not installed; there is: {', '.join(trackers) or 'none'}, of "
        f"those that can be: {', '.join(known)}",
    )
    require(
        args.dry_run or is_sharded() or not (args.activation_checkpointing or args.cpu_offload),
        "--activation-checkpointing and --cpu-offload need FSDP: start the script with torchrun "
        "--nproc_per_node N, or switch both off",
    )


def check_args(args) -> None:
    """Refuse settings that no RL script can run with."""
    check_limits(args)
    batch = args.prompts_per_step * args.group_size
    require(
        batch % args.minibatch_size == 0,
        f"--minibatch-size {args.minibatch_size} does not divide prompts_per_step x group_size = "
        f"{batch}",
    )
    dual_clip = vars(args).get("dual_clip")  # not every algorithm has one
    require(dual_clip is None or dual_clip > 1, f"--dual-clip {dual_clip} must be above 1, or None")
    longest = args.max_prompt_tokens + args.max_response_tokens
    require(
        args.tokens_per_microbatch >= longest,
        f"--tokens-per-microbatch {args.tokens_per_microbatch} is below the longest sequence, "
        f"max_prompt_tokens + max_response_tokens = {longest}; raise it",
    )
    kinds, world = ("auto", "hf", "vllm"), num_processes(args)
    require(
        args.rollout_engine in kinds,
        f"--rollout-engine {args.rollout_engine!r}; use one of {', '.join(kinds)}",
    )
    require(
        world % args.tensor_parallel == 0,
        f"--tensor-parallel {args.tensor_parallel} does not divide the {world} processes",
    )


def eval_settings(args) -> str:
    """What a number of the evaluation depends on, beside the model and the problems."""
    budget = args.eval_max_tokens or args.max_response_tokens
    samples = f"{args.eval_samples} samples a problem, at most {budget} tokens each"
    where = f"temperature {args.eval_temperature:g}, top-p {args.eval_top_p:g}, seed {args.seed}"
    return f"{samples}, {where}"


def make_accelerator(args) -> Accelerator:
    """FSDP2 under torchrun (fp32 master weights, bf16 compute on a GPU, fp32 reduction); plain in
    one process. On a CPU Accelerate drops the FSDP plugin silently; the assignments at the end
    make it take the same path as on GPUs."""
    cuda, sharded = torch.cuda.is_available(), is_sharded()
    if cuda and args.cpu_offload:
        os.environ["FSDP_OFFLOAD_PARAMS"] = "true"  # Accelerate then sets up gloo beside nccl
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        mixed_precision_policy=bf16 if cuda else MixedPrecisionPolicy(),
        activation_checkpointing=args.activation_checkpointing,
        cpu_offload=CPUOffloadPolicy(pin_memory=cuda) if args.cpu_offload else False,
        cpu_ram_efficient_loading=False,  # switched on below
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(
        cpu=not cuda,
        fsdp_plugin=plugin if sharded else None,
        mixed_precision="bf16" if cuda else "no",
        log_with=args.track or None,
        project_dir=args.runs_dir,
    )
    # Rank 0 sends all others their shards, see common.load_weights. Said to the constructor, it
    # would make transformers fill the models of other ranks with zeros, the engines' too.
    plugin.cpu_ram_efficient_loading = True
    if sharded and not cuda:
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    return accelerator
