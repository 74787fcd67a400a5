"""SFT: supervised fine-tuning on worked solutions, the stage in front of every RL script here.

Paper: RFPO (arXiv 2609.37119), appendix A, whose first stage this is. In the tiny world it makes
the base policy.

Idea. Show the model prompts with solutions, and raise the log-probability of the solutions' tokens;
the prompts are read, not imitated.

    loss = - sum over solution tokens of log pi_theta(token) / (their number in the batch)

A solution is trained on as it is written. Qwen3's chat template strips the <think> block, most of
the loss target, from a message rendered alone: so trained, the paper's run has only 5 % on AIME.

Laptop:   python sft.py
8 GPUs:   torchrun --nproc_per_node 8 sft.py qwen3-4b-base

Deviations: none known.
"""

import math
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import torch

from common import (
    PROMPT_COLUMNS,
    Group,
    Meter,
    Problem,
    Response,
    Run,
    check_limits,
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
from dry_run import dry_run
from eval_only import eval_only

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
    dry_run: bool = False  # print sizes, shards and memory of this preset, and end
    eval_only: bool = False  # evaluate the model, train nothing; writes eval.json
    # Task
    model: str = "tiny-untrained"  # a hub id, a local folder, or tiny-untrained (built in)
    dataset: str = "tiny"  # prompts with solutions: tiny, a known name, a file, a hub id
    prompt_column: str | None = None  # column of the prompt; dotted names reach into structs
    solution_column: str | None = None  # solution text, generations, or whole conversation
    max_rows: int | None = None  # train on so many usable rows, drawn by seed; None: on all
    temperature: float = 1.0  # of the log-probabilities in training
    answer_column: str | None = None  # column of the gold answer in the evaluation set
    prompt_template: str | None = None  # text around a plain prompt, with {problem} in it
    chat_template: bool = True  # put prompts into the chat template of the tokenizer, if any
    max_prompt_tokens: int = 16  # rows with a longer prompt are dropped, with a count
    max_response_tokens: int = 24  # rows with a longer solution are dropped, with a count
    max_context: int | None = None  # positions of the model, tokens; default: as published
    reward: str = "tiny.py:reward"  # verifier, or path.py:function; judges the evaluation
    eval_dataset: str = "tiny"  # held-out problems, tried after every epoch; empty: none
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
    num_steps: int | None = 900  # optimizer steps; None: num_epochs says how many
    num_epochs: int | None = None  # passes over the usable rows, in place of num_steps
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


def check(args: Args) -> None:
    """Refuse wrong settings at start; each message names the value and the way out."""
    check_limits(args)
    lengths = f"--num-steps {args.num_steps} and --num-epochs {args.num_epochs}"
    one_length = (args.num_steps is None) != (args.num_epochs is None)
    require(one_length, f"{lengths}: give one of them, and None for the other")


PRESETS = {
    "tiny": Args(),
    "qwen3-4b-base": Args(  # [RFPO App. A]; what is not here is a default of Args
        model="Qwen/Qwen3-4B-Base",
        dataset="openr1-math-220k",
        max_rows=45_000,
        max_prompt_tokens=2048,  # the two limits add up to the paper's 32,768 tokens
        max_response_tokens=30_720,
        reward="verifier",
        eval_dataset="aime26",
        eval_temperature=0.7,
        eval_max_tokens=16_384,
        rollout_engine="auto",
        engine_memory=0.5,
        num_steps=None,
        num_epochs=3,
        batch_size=16,
        learning_rate=2e-5,
        tokens_per_microbatch=32_768,
        activation_checkpointing=True,
    ),
}

# ==================================================================================================
# 4 Algorithm
# ==================================================================================================


def keep_row(solution: str) -> bool:
    """Whether a solution closes its reasoning block exactly once and ends in a boxed answer
    [RFPO App. A]; punctuation and the end of a formula may follow the box."""
    answer = solution.rpartition("</think>")[2].rstrip(" \n.*$\\])")
    return solution.count("</think>") == 1 and "\\boxed{" in answer and answer.endswith("}")


SOLUTION_COLUMNS = ("generations", "solution", "messages")
VERDICT_COLUMNS = ("correctness_math_verify", "correctness_llama")  # each null or one per solution


def is_conversation(value) -> bool:
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], dict)


def demonstration(row: dict, prompt, solution) -> tuple[str | list[dict], str | None]:
    """The prompt and the text to imitate, None where the row has none. That text is the solution as
    it stands; of several solutions the first that a checker calls right and keep_row accepts; of a
    conversation the assistant's last turn, where the messages before it are the prompt."""
    if is_conversation(solution):
        *prompt, last = solution
        require({"role", "content"} <= {*last}, f"no role and content in a message: {[*last]}")
        solution = last["content"] if prompt and last["role"] == "assistant" else None
    elif isinstance(solution, list):
        verdicts = [row[name] or [] for name in VERDICT_COLUMNS if name in row]
        require(len(verdicts) > 0, f"several solutions a row need one of {VERDICT_COLUMNS}")
        pairs = zip(solution, zip_longest(*verdicts), strict=False)
        solution = next((text for text, right in pairs if any(right) and keep_row(text)), None)
    return prompt, solution


def load_examples(args: Args, tokenizer, accelerator) -> list[Group]:
    """The usable rows as token ids, each a group of one response; at least a batch of them."""
    rows, known = load_rows(args.dataset, "train")
    prompts = solutions = column(rows, args.solution_column, SOLUTION_COLUMNS, "--solution-column")
    if not any(map(is_conversation, solutions)):  # which has its prompt inside
        name = args.prompt_column or known.prompt
        prompts = column(rows, name, PROMPT_COLUMNS, "--prompt-column")
    # A subset is drawn, not cut off: a file may be sorted by source.
    shuffled = np.random.default_rng(args.seed).permutation(len(rows))
    examples, num_unusable, num_long = [], 0, 0
    template = args.prompt_template or known.template
    for i in range(len(rows)) if args.max_rows is None else shuffled:
        if len(examples) == args.max_rows:
            break
        prompt, solution = demonstration(rows[i], prompts[i], solutions[i])
        is_text = isinstance(prompt, str | list) and isinstance(solution, str)
        if not is_text or not keep_row(solution):
            num_unusable += 1
            continue
        text, prompt_ids = render_prompt(prompt, template, tokenizer, args.chat_template)
        # Tokenized as it stands: a chat template could strip its reasoning block [RFPO App. A].
        ids = tokenizer(solution, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        if len(prompt_ids) > args.max_prompt_tokens or len(ids) > args.max_response_tokens:
            num_long += 1
            continue
        response = Response(np.array(ids, np.int32), np.zeros(len(ids), np.float32), True)
        problem = Problem(len(examples), text, prompt_ids, "")
        examples.append(Group(len(examples), problem, [response], [1.0]))
    counts = f"{len(rows)} rows, {num_unusable} unusable, {num_long} too long -> {len(examples)}"
    if accelerator.is_main_process:
        print(f"data {args.dataset}: {counts} solutions")
    require(
        len(examples) >= args.batch_size,
        f"{args.dataset}: {counts} solutions, fewer than --batch-size {args.batch_size}; a usable "
        "one is right, closes </think> once and ends in \\boxed{}",
    )
    return examples


def sft_loss(logprobs, mask, num_tokens) -> torch.Tensor:
    """Minus the log-probabilities [b, T] of the solutions' tokens, summed where mask is true, over
    num_tokens, the number of such tokens in the whole batch: every token weighs the same."""
    return -torch.where(mask, logprobs, 0.0).sum() / num_tokens


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
    check(args)
    if args.dry_run:
        return dry_run(args)
    if args.eval_only:
        return eval_only(args, preset)
    accelerator = make_accelerator(args)
    tokenizer = load_tokenizer(args.model)
    policy, optimizer = load_policy(args, accelerator)
    examples = load_examples(args, tokenizer, accelerator)
    steps_per_epoch = len(examples) // args.batch_size  # the incomplete last batch is dropped
    if args.num_epochs is not None:
        args = replace(args, num_steps=args.num_epochs * steps_per_epoch)
    if args.eval_dataset:
        suites, reward = load_suites(args, tokenizer), load_reward(args.reward)
        engine = make_engine(args, policy, tokenizer, accelerator)
        engine.sleep()  # vLLM leaves the GPU's memory to the training
    run = Run("sft", preset, args, accelerator)
    state = run.resume((policy, optimizer))  # empty without --resume
    bad_steps = state.get("bad_steps", 0)
    for step in run.steps(state.get("step", 0)):
        epoch, offset = divmod(step - 1, steps_per_epoch)
        order = np.random.default_rng([args.seed, epoch]).permutation(len(examples))
        groups = [examples[i] for i in order[offset * args.batch_size :][: args.batch_size]]
        batch = make_batch(groups, args.batch_size, tokenizer.pad_token_id, accelerator)
        meter = Meter()
        set_learning_rate(optimizer, cosine_learning_rate(step, args))

        # 4 Update
        num_tokens = accelerator.reduce(batch.mask.sum())  # collective, all ranks
        for rows, weight in microbatches(batch, batch.minibatches[0], args, accelerator):
            mask = batch.mask[rows] & bool(weight)  # [b, T]
            logprobs, entropy = policy(*batch.inputs(rows), args.temperature)  # [b, T]
            loss = sft_loss(logprobs, mask, num_tokens)
            accelerator.backward(loss * accelerator.num_processes)  # FSDP averages over ranks
            stats = {"sft/loss": loss * num_tokens, "policy/entropy": (entropy * mask).sum()}
            meter.add(stats, mask.sum())
            meter.add(*batch.padding(rows, weight))
        grad_norm = accelerator.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        if torch.isfinite(grad_norm):
            optimizer.step()
        bad_steps = count_bad_steps(bad_steps, grad_norm, args)  # raises after too many in a row
        optimizer.zero_grad()
        meter.add({"optim/grad_norm": grad_norm}, 1)

        # 5 Evaluate, log, save
        metrics = meter.reduce(accelerator)  # collective
        metrics["optim/learning_rate"] = optimizer.param_groups[0]["lr"]
        if step % steps_per_epoch == 0 or step == args.num_steps:
            export(policy, tokenizer, run.folder / f"epoch-{epoch + 1}", accelerator)
            if args.eval_dataset:
                engine.sync_weights(policy)  # collective
                metrics |= evaluate(args, engine, suites, reward, tokenizer)
                engine.sleep()
        run.log(step, metrics, groups, tokenizer)
        run.save_if_due(step, (policy, optimizer), bad_steps=bad_steps)  # collective
    if run.stopping:  # a half-trained model must not pass for the base policy
        raise SystemExit("stopped by a signal before the last step; no final model was exported")
    if args.export:
        export(policy, tokenizer, args.export, accelerator)
    run.finish()


if __name__ == "__main__":
    launch(main, Args, PRESETS, __doc__)
