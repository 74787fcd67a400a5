"""SFT: supervised fine-tuning on worked solutions, the stage in front of every RL script here.

Paper: RFPO (arXiv 2609.37119), appendix A, whose first stage this is. In the tiny world it makes
the base policy.

Idea. Show the model prompts with solutions, and raise the log-probability of the solutions' tokens;
the prompts are read, not imitated.

    loss = - sum over solution tokens of log pi_theta(token) / (their number in the batch)

Laptop:   python sft.py
8 GPUs:   torchrun --nproc_per_node 8 sft.py --model PATH --dataset PATH/solutions.jsonl

Deviations: none known. A preset with the paper's values is still to come.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from common import (
    PROMPT_COLUMNS,
    Group,
    Meter,
    Problem,
    Response,
    Run,
    column,
    count_bad_steps,
    evaluate,
    export,
    launch,
    load_policy,
    load_reward,
    load_rows,
    load_suites,
    load_tokenizer,
    make_accelerator,
    make_batch,
    make_engine,
    microbatches,
    render_prompt,
    require,
    set_learning_rate,
)

# ==================================================================================================
# 3 Args and presets
# ==================================================================================================


@dataclass
class Args:
    # Run
    seed: int = 1  # of the data order
    run_name: str | None = None  # folder under runs_dir; default sft-<preset>-seed<seed>
    runs_dir: str = "runs"  # where run folders go
    export: str | None = None  # a second folder for the final model, beside <run>/epoch-<n>
    save_every: int = 500  # optimizer steps between checkpoints; also after the last
    keep_last: int = 1  # checkpoints to keep; the model of every epoch stays anyway
    resume: bool = False  # continue the newest complete checkpoint of the run with this name
    track: str = ""  # a tracker of Accelerate (tensorboard, wandb, ...) beside metrics.jsonl
    # Task
    model: str = "tiny-untrained"  # a hub id, a local folder, or tiny-untrained (built in)
    dataset: str = "tiny"  # prompts with solutions: tiny, a jsonl/parquet file, a hub id
    prompt_column: str | None = None  # column of the prompt; dotted names reach into structs
    solution_column: str = "solution"  # column of the solution text
    temperature: float = 1.0  # of the log-probabilities in training
    answer_column: str | None = None  # column of the gold answer in the evaluation set
    prompt_template: str | None = None  # text around a plain prompt, with {problem} in it
    max_prompt_tokens: int = 16  # rows with a longer prompt are dropped, with a count
    max_response_tokens: int = 24  # rows with a longer solution are dropped, with a count
    max_context: int | None = None  # positions of the model, tokens; default: as published
    reward: str = "tiny.py:reward"  # verifier, or path.py:function; judges the evaluation
    eval_dataset: str = "tiny"  # held-out problems of the closing evaluation; empty: none
    eval_problems: int = 256  # how many of them, from the start of the set
    eval_samples: int = 4  # responses per evaluation problem
    eval_temperature: float = 1.0  # sampling temperature of the evaluation; 0 is greedy
    eval_top_p: float = 1.0  # nucleus sampling of the evaluation
    eval_max_tokens: int | None = None  # limit of an evaluation response; default: as in training
    # Rollout
    rollout_engine: str = "hf"  # engine of the evaluation: hf, vllm or auto
    tensor_parallel: int = 1  # ranks that share one vLLM engine
    engine_memory: float = 4.0  # vLLM's share of GPU memory (0 to 1); on a CPU, GB of KV cache
    # Optimization
    num_steps: int = 900  # optimizer steps; an epoch is (usable rows / batch_size) of them
    batch_size: int = 64  # sequences per step, over all ranks (RFPO App. A: 16)
    learning_rate: float = 3e-3  # peak of the cosine (RFPO App. A: 2e-5)
    warmup_frac: float = 0.01  # share of the steps with linear warm-up [RFPO App. A]
    final_frac: float = 0.1  # the cosine ends at this share of the peak [RFPO App. A]
    weight_decay: float = 0.1  # of AdamW [RFPO App. A]
    max_grad_norm: float = 1.0  # gradient norm above which gradients are scaled down
    tokens_per_microbatch: int = 4096  # padded tokens per forward; changes no gradient
    activation_checkpointing: bool = False  # recompute activations in the backward pass
    cpu_offload: bool = False  # keep parameters and optimizer state in CPU memory between uses
    max_bad_steps: int = 3  # non-finite updates in a row, each skipped, that end the run


PRESETS = {"tiny": Args()}

# ==================================================================================================
# 4 Algorithm
# ==================================================================================================


def keep_row(solution: str) -> bool:
    """Whether a solution closes its reasoning block exactly once and ends in a boxed answer
    [RFPO App. A]."""
    answer = solution.rpartition("</think>")[2]
    return (
        solution.count("</think>") == 1
        and "\\boxed{" in answer
        and answer.rstrip(" \n$.").endswith("}")
    )


def cosine_learning_rate(step: int, args: Args) -> float:
    """Learning rate of step 1, 2, ...: linear warm-up, then a cosine down to final_frac of the peak
    [RFPO App. A]."""
    warmup_steps = args.warmup_frac * args.num_steps
    if step <= warmup_steps:
        return args.learning_rate * step / warmup_steps
    progress = (step - warmup_steps) / (args.num_steps - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return args.learning_rate * (args.final_frac + (1 - args.final_frac) * cosine)


# ==================================================================================================
# 5 Main
# ==================================================================================================


def main(args: Args, preset: str) -> None:
    accelerator = make_accelerator(args)
    tokenizer = load_tokenizer(args.model)
    policy, optimizer = load_policy(args, accelerator)
    rows, known = load_rows(args.dataset, "train")
    prompts = column(rows, args.prompt_column, PROMPT_COLUMNS, "--prompt-column")
    solutions = column(rows, args.solution_column, (), "--solution-column")
    examples = []
    for prompt, solution in zip(prompts, solutions, strict=True):
        text, prompt_ids = render_prompt(prompt, args.prompt_template or known.template, tokenizer)
        # Tokenized as it stands: a chat template would strip the reasoning block of the solution.
        ids = tokenizer(solution, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        fits = len(prompt_ids) <= args.max_prompt_tokens and len(ids) <= args.max_response_tokens
        if fits and keep_row(solution):
            demonstration = Response(np.array(ids, np.int32), np.zeros(len(ids), np.float32), True)
            problem = Problem(len(examples), text, prompt_ids, "")
            examples.append(Group(len(examples), problem, [demonstration], [1.0]))
    if accelerator.is_main_process:
        print(f"data {args.dataset}: {len(rows)} rows -> {len(examples)} usable solutions")
    require(
        len(examples) >= args.batch_size,
        f"{len(examples)} usable solutions are fewer than --batch-size {args.batch_size}",
    )
    # The incomplete last batch of an epoch is dropped.
    steps_per_epoch = len(examples) // args.batch_size
    run = Run("sft", preset, args, accelerator)
    start = run.resume((policy, optimizer)).get("step", 0)

    bad_steps = 0
    for step in run.steps(start):
        epoch, offset = divmod(step - 1, steps_per_epoch)
        order = np.random.default_rng([args.seed, epoch]).permutation(len(examples))
        first = offset * args.batch_size
        groups = [examples[i] for i in order[first : first + args.batch_size]]
        batch = make_batch(groups, args.batch_size, tokenizer.pad_token_id, accelerator)
        meter = Meter()
        set_learning_rate(optimizer, cosine_learning_rate(step, args))

        # 4 Update
        num_tokens = accelerator.reduce(batch.mask.sum())  # collective, all ranks
        for rows, weight in microbatches(batch, batch.minibatches[0], args, accelerator):
            mask = batch.mask[rows] & bool(weight)  # [b, T]
            logprobs, entropy = policy(*batch.inputs(rows), args.temperature)  # [b, T]
            loss = -torch.where(mask, logprobs, 0.0).sum() / num_tokens
            accelerator.backward(loss * accelerator.num_processes)  # FSDP averages over ranks
            stats = {"sft/loss": loss * num_tokens, "policy/entropy": (entropy * mask).sum()}
            meter.add(stats, mask.sum())
        grad_norm = accelerator.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        if torch.isfinite(grad_norm):
            optimizer.step()
        bad_steps = count_bad_steps(bad_steps, grad_norm, args)  # raises after too many in a row
        optimizer.zero_grad()
        meter.add({"optim/grad_norm": grad_norm}, 1)

        # 5 Evaluate, log, save
        metrics = meter.reduce(accelerator)  # collective
        metrics["optim/learning_rate"] = optimizer.param_groups[0]["lr"]
        if step == args.num_steps and args.eval_dataset:
            engine = make_engine(args, policy, tokenizer, accelerator)
            engine.sync_weights(policy)
            suites, reward = load_suites(args, tokenizer), load_reward(args.reward)
            metrics |= evaluate(args, engine, suites, reward, tokenizer)
        run.log(step, metrics, groups, tokenizer)
        if step % steps_per_epoch == 0 or step == args.num_steps:
            export(policy, tokenizer, run.folder / f"epoch-{epoch + 1}", accelerator)
        run.save_if_due(step, (policy, optimizer))  # collective
    if run.stopping:  # a half-trained model must not pass for the base policy
        raise SystemExit("stopped by a signal before the last step; no final model was exported")
    if args.export:
        export(policy, tokenizer, args.export, accelerator)
    run.finish()


if __name__ == "__main__":
    launch(main, Args, PRESETS, __doc__)
