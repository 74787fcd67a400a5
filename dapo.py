"""DAPO: group-relative policy optimization, clip-higher, dynamic sampling, token-mean loss.

Paper: DAPO (arXiv 2503.14476), as the baseline that FIPO (arXiv 2603.19835) modifies; FIPO section 2
and appendix B.

Idea. Sample G responses to each prompt and let the verifier say which are right. The advantage of a
response is how much better it did than its siblings, and all of its tokens share it. Prompts whose
responses are all right or all wrong teach nothing; more are sampled in their place. A batch is used
for several optimizer steps, in which the ratio to the policy that sampled it is clipped, further
above 1 than below.

    A_i  = (R_i - mean(R)) / (std(R) + 1e-6)                     over the G responses of a prompt
    r_t  = pi_theta(o_t) / pi_old(o_t)
    L_t  = max(-r_t A, -clip(r_t, 1 - e_low, 1 + e_high) A),     and min(L_t, -c A) where A < 0
    loss = sum_t L_t / (number of tokens in the minibatch)       [FIPO Eq. 8 with f = 1]

Laptop:   python dapo.py
8 GPUs:   torchrun --nproc_per_node 8 dapo.py dapo-7b-math
Compare:  diff dapo.py fipo.py

DEVIATION: the loss has one denominator per minibatch (DAPO's practice), where FIPO Eq. 8 has one per
prompt. test_dapo.py::test_token_mean_over_the_minibatch pins it.
"""

import time
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common import (
    Meter,
    Policy,
    Run,
    Sampling,
    check_args,
    count_bad_steps,
    draw_problems,
    evaluate,
    export,
    gather_groups,
    judge,
    launch,
    load_lm,
    load_problems,
    load_reward,
    load_tokenizer,
    make_accelerator,
    make_batch,
    make_engine,
    make_optimizer,
    microbatches,
    prepare_frozen,
    require,
    reshard,
    resolve_model,
    rollout_metrics,
    scheduled_learning_rate,
    set_learning_rate,
)

# ==================================================================================================
# 3 Args and presets
# ==================================================================================================


@dataclass
class Args:
    # Run
    seed: int = 1
    """Seed of the prompt order and of all sampling."""
    run_name: str | None = None
    """Folder under runs_dir; default <script>-<preset>-seed<seed>, with -2, -3 where it exists."""
    runs_dir: str = "runs"
    """Where run folders go."""
    num_steps: int = 60
    """Rollout batches to train on."""
    eval_every: int = 20
    """Steps between evaluations; also before the first step and after the last."""
    save_every: int = 20
    """Steps between checkpoints; also after the last."""
    keep_last: int = 2
    """Checkpoints to keep."""
    resume: bool = False
    """Continue the newest complete checkpoint of the run with this name."""
    track: str = ""
    """A tracker of Accelerate, e.g. tensorboard or wandb; empty: metrics.jsonl only."""

    # Task
    model: str = "tiny"
    """Policy to start from: a hub id, a local folder, or tiny (the built-in base policy)."""
    dataset: str = "tiny"
    """Training problems: tiny, gsm8k, dapo-math-17k, a hub id, or a jsonl/parquet file."""
    prompt_column: str | None = None
    """Column of the prompt, text or message list; dotted names reach into structs."""
    answer_column: str | None = None
    """Column of the gold answer; dotted names reach into structs."""
    prompt_template: str | None = None
    """Text around plain-text prompts, with {problem} in it; default: what the data set needs."""
    max_prompt_tokens: int = 16
    """Longer prompts are dropped when the data is loaded, with a count."""
    reward: str = "tiny.py:reward"
    """verifier, or path.py:function, called with (prompts, responses, golds) -> floats in [0, 1]."""
    eval_dataset: str = "tiny"
    """Held-out problems, named like dataset."""
    eval_problems: int = 256
    """How many of them, from the start of the set."""
    eval_samples: int = 4
    """Responses per evaluation problem (k of avg@k)."""
    eval_temperature: float = 1.0
    """Sampling temperature of the evaluation; 0 is greedy."""
    eval_top_p: float = 1.0
    """Nucleus sampling of the evaluation."""

    # Rollout
    rollout_engine: str = "auto"
    """hf (transformers), vllm, or auto: vllm where it is installed and a GPU is present."""
    tensor_parallel: int = 1
    """Ranks that share one vLLM engine."""
    engine_memory: float = 4.0
    """vLLM's share of GPU memory (0 to 1); on a CPU, gigabytes of KV cache."""
    max_context: int | None = None
    """Positions of the model, tokens; raises max_position_embeddings. Default: as published."""
    prompts_per_step: int = 32
    """Prompts with mixed outcomes per step (P)."""
    group_size: int = 16
    """Responses per prompt (G)."""
    max_response_tokens: int = 24
    """Longest response, tokens; a longer one is cut and scored as it stands."""
    temperature: float = 1.0
    """Sampling temperature; log-probabilities in training use it too."""
    rollout_is_cap: float = 0.0
    """Truncated importance sampling against the engine/trainer mismatch: the cap of
    pi_old / pi_engine; 0 is off."""

    # Optimization
    learning_rate: float = 1e-4
    """Peak learning rate of AdamW."""
    warmup_steps: int = 5
    """Steps (rollout batches) of linear warm-up."""
    decay_steps: int = 20
    """Last steps over which the learning rate falls to about 0; 0: constant."""
    weight_decay: float = 0.1
    """AdamW weight decay."""
    max_grad_norm: float = 1.0
    """Gradient norm above which gradients are scaled down."""
    minibatch_size: int = 64
    """Responses per optimizer step, over all ranks."""
    num_epochs: int = 1
    """Passes over a rollout batch."""
    tokens_per_microbatch: int = 4096
    """Padded tokens per forward/backward; the gradient does not depend on it."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in CPU memory between uses."""
    max_bad_steps: int = 3
    """Updates in a row with a non-finite gradient (each is skipped) after which the run stops."""

    # Algorithm
    clip_eps_low: float = 0.2
    """The ratio is clipped at 1 - clip_eps_low."""
    clip_eps_high: float = 0.28
    """The ratio is clipped at 1 + clip_eps_high; above clip_eps_low: clip-higher [DAPO §3.1]."""
    dual_clip: float | None = 10.0
    """Bound c on the ratio where the advantage is negative; none: no bound."""
    overlong_buffer: int = 8
    """The last tokens before the limit, over which a penalty grows from 0 [DAPO §3.4]; 0: off."""
    overlong_penalty: float = 1.0
    """Penalty at max_response_tokens."""
    wrong_reward: float = 0.0
    """Reward of a wrong response (RELEASE: -1)."""
    dynamic_sampling: bool = True
    """Drop prompts whose responses are all right or all wrong, and sample more [DAPO §3.2]."""
    gen_prompts: int = 48
    """Prompts per sampling round (RELEASE: 4x prompts_per_step)."""
    max_gen_batches: int = 10
    """Sampling rounds per step at most; then the step trains on what there is."""
    kl_coef: float = 0.0
    """Weight of a k3 KL penalty against the starting policy (beta)."""


# What the paper's 32B and 7B recipes share [FIPO Tables 2 and 3].
PAPER = Args(
    num_steps=500,
    eval_every=10,
    save_every=20,
    dataset="dapo-math-17k",
    max_prompt_tokens=2048,
    reward="verifier",
    eval_dataset="aime24",
    eval_problems=30,
    eval_samples=32,
    eval_top_p=0.7,
    engine_memory=0.5,
    prompts_per_step=512,
    learning_rate=1e-6,
    warmup_steps=10,
    decay_steps=0,
    tokens_per_microbatch=32_768,
    activation_checkpointing=True,
    gen_prompts=2048,
)

PRESETS = {
    "tiny": Args(),
    # GRPO, FIPO's other 7B baseline. The paper gives no values; these are our choice.
    "grpo-7b": replace(
        PAPER,
        model="Qwen/Qwen2.5-Math-7B",
        max_context=32_768,
        max_response_tokens=8192,
        minibatch_size=512,
        clip_eps_high=0.2,
        dual_clip=None,
        overlong_buffer=0,
        overlong_penalty=0.0,
        dynamic_sampling=False,
        gen_prompts=512,
        kl_coef=0.001,
    ),
    # [FIPO Table 3, DAPO column]
    "dapo-7b-math": replace(
        PAPER,
        model="Qwen/Qwen2.5-Math-7B",
        max_context=32_768,
        max_response_tokens=8192,
        overlong_buffer=4096,
        minibatch_size=32 * 16,
    ),
    # [FIPO Table 2, DAPO column]
    "dapo-32b": replace(
        PAPER,
        model="Qwen/Qwen2.5-32B",
        tensor_parallel=4,
        max_response_tokens=20_480,
        overlong_buffer=4096,
        minibatch_size=32 * 16,
        cpu_offload=True,
    ),
}

# ==================================================================================================
# 4 Algorithm
# ==================================================================================================


def shape_rewards(
    correct: Tensor,
    lengths: Tensor,
    max_response_tokens: int,
    overlong_buffer: int,
    overlong_penalty: float,
    wrong_reward: float = 0.0,
) -> Tensor:
    """R_i [B]: 1 where right and wrong_reward where wrong, minus a penalty that grows linearly from 0
    to overlong_penalty over the last overlong_buffer tokens before the limit [DAPO §3.4].

    correct [B] in [0, 1]; lengths [B] in tokens; overlong_buffer 0: no penalty."""
    rewards = wrong_reward + (1 - wrong_reward) * correct
    if overlong_buffer > 0:
        excess = (lengths - (max_response_tokens - overlong_buffer)) / overlong_buffer
        rewards = rewards - overlong_penalty * excess.clamp(0, 1)
    return rewards


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6) over each prompt's G responses [FIPO §2], unbiased std.

    rewards [B], row p*G+g; returns [B, 1], one value for all tokens of a response. Exactly 0 where
    the rewards of a group are equal (rounding would leave noise / 1e-6), and for G = 1."""
    groups = rewards.float().view(-1, group_size)  # [P, G]
    spread = groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)
    std = groups.std(1, keepdim=True, unbiased=group_size > 1)
    advantages = (groups - groups.mean(1, keepdim=True)) / (std + 1e-6)
    return torch.where(spread > 0, advantages, 0.0).view(-1, 1)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    num_tokens: float | Tensor,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate [FIPO Eq. 8 with f = 1]: a sum over these rows' tokens, divided by the
    num_tokens of the whole minibatch, so that micro-batches and ranks add up.

    logprobs, old_logprobs, mask [B, T]; advantages [B, 1] or [B, T]. Returns the loss, which carries
    the gradient, and the sums over tokens of what is logged."""
    mask = mask.bool()
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)  # padding may hold NaN
    log_ratio = log_ratio.clamp(-20, 20)
    ratio = log_ratio.exp()  # [B, T]
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    dual_clipped = torch.zeros_like(mask)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    loss = torch.where(mask, loss, 0.0)
    active = mask & (clipped > unclipped)  # the clip decides, so the token has no gradient
    stats = {
        "policy/loss": loss.sum(),
        "policy/kl": -log_ratio.sum(),  # log pi_old - log pi_theta [FIPO footnote 1]
        "policy/clip_high_frac": (active & (ratio > 1)).sum(),
        "policy/clip_low_frac": (active & (ratio < 1)).sum(),
        "policy/dual_clip_frac": (mask & dual_clipped).sum(),
    }
    return loss.sum() / num_tokens, stats


def k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sum over tokens of the k3 estimate of KL(pi_theta || pi_ref): exp(d) - d - 1, where
    d = log pi_ref - log pi_theta. Never negative; its gradient is there where A = 0, too."""
    difference = torch.where(mask.bool(), ref_logprobs - logprobs, 0.0).clamp(-20, 20)
    return (difference.exp() - difference - 1).sum()


# ==================================================================================================
# 5 Main
# ==================================================================================================


def check(args: Args) -> None:
    """Refuse wrong settings at start; each message names the value, the limit and the way out."""
    check_args(args)
    num_responses = args.prompts_per_step * args.group_size
    require(
        num_responses % args.minibatch_size == 0,
        f"--minibatch-size {args.minibatch_size} does not divide the {num_responses} responses of a "
        f"step (prompts_per_step x group_size); choose a divisor",
    )
    require(
        args.group_size > 1 or not args.dynamic_sampling,
        "--group-size 1 never has mixed outcomes; use 2 or more, or --no-dynamic-sampling",
    )
    require(
        0 <= args.overlong_buffer <= args.max_response_tokens,
        f"--overlong-buffer {args.overlong_buffer} must lie between 0 and --max-response-tokens, "
        f"{args.max_response_tokens}",
    )


def main(args: Args, preset: str) -> None:
    check(args)
    accelerator = make_accelerator(args)
    model = resolve_model(args.model)
    tokenizer = load_tokenizer(model)
    problems = load_problems(args.dataset, "train", args, tokenizer)
    eval_problems = load_problems(args.eval_dataset, "test", args, tokenizer)[: args.eval_problems]
    reward_function = load_reward(args.reward)
    policy = Policy(load_lm(model, args.max_context))
    reference = prepare_frozen(deepcopy(policy), accelerator) if args.kl_coef > 0 else None
    optimizer = make_optimizer(policy, args)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    engine = make_engine(args, model, policy, tokenizer, accelerator)
    run = Run("dapo", preset, args, accelerator)
    state = run.resume(policy, optimizer)  # empty without --resume
    cursor, bad_steps = state.get("cursor", 0), state.get("bad_steps", 0)
    sampling = Sampling(args.max_response_tokens, args.temperature)
    engine.sync_weights(policy)
    if not state:
        run.log(0, evaluate(args, engine, eval_problems, reward_function, tokenizer), [], tokenizer)

    for step in run.steps(state.get("step", 0)):
        meter = Meter()  # sums over this step's updates, reduced over ranks once, below
        set_learning_rate(optimizer, scheduled_learning_rate(step, args))

        # 1 Rollout: sample G responses to each prompt from the current policy, which becomes pi_old
        groups, verdicts, gen_batches = [], [], 0
        while len(groups) < args.prompts_per_step and gen_batches < args.max_gen_batches:
            drawn = draw_problems(problems, cursor, args.gen_prompts, args.seed)
            cursor, gen_batches = cursor + args.gen_prompts, gen_batches + 1
            with run.timer("rollout"):
                sampled = engine.sample(drawn, args.group_size, sampling, args.seed)  # of this rank

            # 2 Reward: judge the responses, then give every group to every rank
            with run.timer("reward"):
                sampled = judge(sampled, reward_function, tokenizer)
            sampled = gather_groups(sampled, engine)  # collective
            verdicts += [c for g in sampled for c in g.correct]
            if args.dynamic_sampling:  # by correctness, not by shaped reward [DAPO §3.2]
                sampled = [g for g in sampled if min(g.correct) < max(g.correct)]
            groups += sampled
        kept_frac = len(groups) * args.group_size / len(verdicts)
        groups = groups[: args.prompts_per_step]  # a surplus would be off-policy by the next step
        engine.sleep()  # vLLM leaves the GPU's memory to the update
        if len(groups) < args.prompts_per_step:
            run.warn(
                f"step {step}: {len(groups)} of {args.prompts_per_step} groups after {gen_batches} "
                f"sampling rounds; {sum(verdicts) / len(verdicts):.0%} of the responses are right"
            )
        if not groups:  # on all ranks alike; nothing to learn from
            run.log(
                step, {"train/skipped_steps": 1, "rollout/gen_batches": gen_batches}, [], tokenizer
            )
            continue

        # 3 Advantage: one number per response, shared by its tokens
        correct = torch.tensor([c for g in groups for c in g.correct])  # [B]
        lengths = torch.tensor([float(len(r.token_ids)) for g in groups for r in g.responses])
        rewards = shape_rewards(
            correct,
            lengths,
            args.max_response_tokens,
            args.overlong_buffer,
            args.overlong_penalty,
            args.wrong_reward,
        )
        all_advantages = group_advantages(rewards, args.group_size)  # [B, 1]
        batch = make_batch(groups, args.minibatch_size, tokenizer.pad_token_id, accelerator)
        advantages = all_advantages[batch.rows].to(accelerator.device)  # [b, 1], rows of this rank
        old_logprobs = torch.zeros_like(batch.rollout_logprobs)  # [b, T] no grad
        with run.timer("old_logprobs"), torch.no_grad():
            # The first minibatch gets pi_old from its own update's forward, where it is pi_theta.
            for minibatch in batch.minibatches[1:]:
                for rows, _ in microbatches(batch, minibatch, args, accelerator):
                    old_logprobs[rows] = policy(*batch.inputs(rows), args.temperature)[0]
        reshard(policy)

        # 4 Update: one optimizer step per minibatch
        update_start = time.perf_counter()
        for update, minibatch in enumerate(batch.minibatches * args.num_epochs):
            num_tokens = accelerator.reduce(batch.mask[minibatch].sum())  # collective, all ranks
            for rows, weight in microbatches(batch, minibatch, args, accelerator):
                mask = batch.mask[rows] * weight  # [b, T], weight 0: a filler, see microbatches
                logprobs, entropy = policy(*batch.inputs(rows), args.temperature)  # [b, T]
                if update == 0:
                    old_logprobs[rows] = logprobs.detach()
                token_advantages = advantages[rows]
                if args.rollout_is_cap > 0:
                    mismatch = (old_logprobs[rows] - batch.rollout_logprobs[rows]).exp()
                    token_advantages = token_advantages * mismatch.clamp(max=args.rollout_is_cap)
                loss, stats = policy_loss(
                    logprobs,
                    old_logprobs[rows],
                    token_advantages,
                    mask,
                    num_tokens,
                    args.clip_eps_low,
                    args.clip_eps_high,
                    args.dual_clip,
                )
                if reference is not None:
                    with torch.no_grad():
                        ref_logprobs = reference(*batch.inputs(rows), args.temperature)[0]
                    stats["policy/ref_kl"] = k3(logprobs, ref_logprobs, mask)
                    loss = loss + args.kl_coef * stats["policy/ref_kl"] / num_tokens
                accelerator.backward(loss * accelerator.num_processes)  # FSDP averages over ranks
                gap = (batch.rollout_logprobs[rows] - old_logprobs[rows]).abs() * mask
                stats |= {"policy/entropy": (entropy * mask).sum()}
                stats |= {
                    "rollout/logprob_gap_mean": gap.sum(),
                    "rollout/logprob_gap_max": gap.max(),
                }
                meter.add(stats, mask.sum())
            grad_norm = accelerator.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            if torch.isfinite(grad_norm):
                optimizer.step()
            bad_steps = count_bad_steps(
                bad_steps, grad_norm, args
            )  # raises after too many in a row
            optimizer.zero_grad()
            meter.add({"optim/grad_norm": grad_norm}, 1)
        run.timings["time/policy_update_s"] += time.perf_counter() - update_start
        with run.timer("sync"):
            engine.sync_weights(policy)

        # 5 Evaluate, log, save
        metrics = meter.reduce(accelerator)  # collective
        metrics |= rollout_metrics(groups)
        metrics |= {
            "reward/mean": float(rewards.mean()),
            "advantage/length_weighted_mean": float(lengths @ all_advantages[:, 0] / lengths.sum()),
            "rollout/gen_batches": gen_batches,
            "rollout/gen_prompts": args.gen_prompts,
            "rollout/groups_kept_frac": kept_frac,
            "train/updates_per_batch": len(batch.minibatches) * args.num_epochs,
            "optim/learning_rate": optimizer.param_groups[0]["lr"],
            "optim/bad_steps": bad_steps,
        }
        if step % args.eval_every == 0 or step == args.num_steps:
            metrics |= evaluate(args, engine, eval_problems, reward_function, tokenizer)
        run.log(step, metrics, groups, tokenizer)
        if step % args.save_every == 0 or step == args.num_steps or run.should_stop():
            run.save(step, policy, optimizer, cursor=cursor, bad_steps=bad_steps)
    export(policy, tokenizer, run.folder / "model", accelerator)
    run.finish()


if __name__ == "__main__":
    launch(main, Args, PRESETS, __doc__)
