"""FIPO: DAPO with Future-KL influence weights, credit for single tokens without a critic.

Paper: FIPO, Future-KL Influenced Policy Optimization (arXiv 2603.19835).

Idea. In DAPO all tokens of a response share one advantage. FIPO asks of each token: have the
updates on this batch made the rest of the response, as it was sampled, more likely or less? The sum
of the log-ratios from the token onward, discounted with a half-life of 32 tokens, is its Future-KL.
The advantage is multiplied by the exponential of that, clipped to a narrow interval: tokens that
began a future which the updates reinforce count more, tokens that began a suppressed one less.

    d_t   = log pi_theta(o_t) - log pi_old(o_t)                                  [FIPO Eq. 3]
    M_t   = 1 where exp(d_t) <= c (dual_clip), else 0                            [FIPO Eq. 5]
    FKL_t = sum over k >= t of M_k gamma^(k-t) d_k,  gamma = 2^(-1/half_life)    [FIPO Eq. 4, Eq. 6]
    f_t   = clip(exp(FKL_t), low, high), no gradient                             [FIPO Eq. 7]
    f_t   = 1 where A < 0 and exp(d_t) > safety_threshold                        [FIPO §3.2]
    loss  = DAPO's clipped loss, with f_t A in place of the response's A         [FIPO Eq. 8]
    A     = (reward - mean) / (std + 1e-6) over the responses to a prompt, as in DAPO

Differs from dapo.py in the weight f, its flags (some of them ablations) and its metrics. On the
first update of a batch d = 0 and f = 1: FIPO is DAPO unless a batch serves more than one update.
f has no gradient: it says how much a token counts, and must not be raised for its own sake.

Laptop:   python fipo.py
8 GPUs:   torchrun --nproc_per_node 8 fipo.py qwen2.5-7b-math
Compare:  diff dapo.py fipo.py

DEVIATION: the loss has one denominator per minibatch (DAPO's practice), where FIPO Eq. 8 has one
per prompt. test_dapo.py::test_token_mean_over_the_minibatch pins it.
DEVIATION: M_t filters tokens of any advantage, as the authors' code does, where FIPO Eq. 5 filters
at A < 0 only. test_fipo.py::test_eq5_filter_whatever_the_sign_of_the_advantage pins it.
"""

from dataclasses import dataclass, replace
from inspect import signature

import torch

from common import (
    Meter,
    Run,
    Sampling,
    check_args,
    count_bad_steps,
    draw_problems,
    evaluate,
    export,
    gather_groups,
    judge,
    k3,
    launch,
    load_policy,
    load_problems,
    load_reference,
    load_reward,
    load_tokenizer,
    logprob_gap,
    make_accelerator,
    make_batch,
    make_engine,
    microbatches,
    require,
    reshard,
    rollout_metrics,
    sample,
    scheduled_learning_rate,
    set_learning_rate,
    truncated_importance,
)
from dry_run import dry_run
from eval_only import eval_only

# ==================================================================================================
# 3 Args and presets
# ==================================================================================================


@dataclass
class Args:
    # Run
    seed: int = 1  # of the prompt order and of all sampling
    run_name: str | None = None  # folder under runs_dir; default <script>-<preset>-seed<seed>
    runs_dir: str = "runs"  # where run folders go
    num_steps: int = 60  # rollout batches to train on
    eval_every: int = 20  # steps between evaluations; also before the first step and after the last
    save_every: int = 20  # steps between checkpoints; also after the last step
    keep_last: int = 2  # checkpoints to keep
    resume: bool = False  # continue the newest complete checkpoint of the run with this name
    track: str = ""  # a tracker of Accelerate (tensorboard, wandb, ...) beside metrics.jsonl
    dry_run: bool = False  # print sizes, shards and memory of this preset, and end
    eval_only: bool = False  # evaluate the model, train nothing; writes eval.json
    # Task
    model: str = "tiny"  # policy to start from: a hub id, a local folder, or tiny (built in)
    dataset: str = "tiny"  # training problems: tiny, a known name, a jsonl/parquet file, a hub id
    prompt_column: str | None = None  # column of the prompt; dotted names reach into structs
    answer_column: str | None = None  # column of the gold answer; dotted names reach into structs
    prompt_template: str | None = None  # text around a plain prompt, with {problem} in it
    chat_template: bool = True  # put prompts into the chat template of the tokenizer, if any
    max_prompt_tokens: int = 16  # longer prompts are dropped when the data is loaded, with a count
    reward: str = "tiny.py:reward"  # verifier, or path.py:function(prompts, responses, golds)
    eval_dataset: str = "tiny"  # held-out problems, named like dataset; several: with commas
    eval_problems: int = 256  # how many of each set, from its start
    eval_samples: int = 4  # responses per evaluation problem: k of avg@k, maj@k and pass@k
    eval_temperature: float = 1.0  # sampling temperature of the evaluation; 0 is greedy
    eval_top_p: float = 1.0  # nucleus sampling of the evaluation
    eval_max_tokens: int | None = None  # limit of an evaluation response; default: as in training
    # Rollout
    rollout_engine: str = "auto"  # hf, vllm, or auto: vllm where it is installed and a GPU is there
    tensor_parallel: int = 1  # ranks that share one vLLM engine
    engine_memory: float = 4.0  # vLLM's share of GPU memory (0 to 1); on a CPU, GB of KV cache
    max_context: int | None = None  # positions of the model, tokens; default: as published
    prompts_per_step: int = 32  # prompts with mixed outcomes per step (P)
    group_size: int = 16  # responses per prompt (G)
    max_response_tokens: int = 24  # longer responses are cut, and scored as they stand
    temperature: float = 1.0  # of sampling, and of the log-probabilities in training
    rollout_is_cap: float = 0.0  # truncated importance sampling: cap of pi_old / pi_engine; 0: off
    # Optimization
    learning_rate: float = 1e-4  # peak learning rate of AdamW
    warmup_steps: int = 5  # rollout batches of linear warm-up
    decay_steps: int = 20  # last rollout batches, over which it falls to about 0; 0: constant
    weight_decay: float = 0.1  # of AdamW
    max_grad_norm: float = 1.0  # gradient norm above which gradients are scaled down
    minibatch_size: int = 64  # responses per optimizer step, over all ranks
    num_epochs: int = 1  # passes over a rollout batch
    tokens_per_microbatch: int = 4096  # padded tokens per forward; changes no gradient
    activation_checkpointing: bool = False  # recompute activations in the backward pass
    cpu_offload: bool = False  # keep parameters and optimizer state in CPU memory between uses
    max_bad_steps: int = 3  # non-finite updates in a row, each skipped, that end the run
    # Algorithm
    clip_eps_low: float = 0.2  # the ratio is clipped at 1 - this
    clip_eps_high: float = 0.28  # the ratio is clipped at 1 + this: clip-higher [DAPO §3.1]
    dual_clip: float | None = 10.0  # bound c on the ratio where A < 0; None: no bound
    overlong_buffer: int = 8  # last tokens before the limit, where a penalty grows [DAPO §3.4]
    overlong_penalty: float = 1.0  # the penalty at the limit
    wrong_reward: float = 0.0  # reward of a wrong response (RELEASE: -1)
    dynamic_sampling: bool = True  # drop prompts all right or all wrong, sample more [DAPO §3.2]
    gen_prompts: int = 48  # prompts per sampling round (RELEASE: 4x prompts_per_step)
    max_gen_batches: int = 10  # sampling rounds per step at most (RELEASE: 10)
    kl_coef: float = 0.0  # weight of a k3 KL penalty against the starting policy (beta)
    future_kl_half_life: float | None = 32.0  # tau, tokens [FIPO Eq. 6]; None: no decay [Eq. 4]
    influence_low: float = 0.8  # lower end of f, 1 - eps_f_low [FIPO Eq. 7]
    influence_high: float | None = 1.2  # 1 + eps_f_high; None: min(exp(FKL), 10) (RELEASE)
    safety_threshold: float | None = None  # ratio above which f = 1 at A < 0; None: dual_clip
    filter_extremes: bool = True  # keep ratios above dual_clip out of Future-KL [FIPO Eq. 5]
    drop_dual_clipped_responses: bool = False  # drop those with more than one such token (RELEASE)
    length_heuristic: float | None = None  # control: f = 1 + this * length / limit where A > 0


def check(args: Args) -> None:
    """Refuse wrong settings at start; each message names the value, the limit and the way out."""
    check_args(args)
    batch, minibatch = args.prompts_per_step * args.group_size, args.minibatch_size
    require(
        args.group_size > 1 or not args.dynamic_sampling,
        "--group-size 1 never has mixed outcomes; use 2 or more, or --no-dynamic-sampling",
    )
    require(
        0 <= args.overlong_buffer <= args.max_response_tokens,
        f"--overlong-buffer {args.overlong_buffer} must lie between 0 and --max-response-tokens, "
        f"{args.max_response_tokens}",
    )
    require(
        batch * args.num_epochs > minibatch,
        f"--minibatch-size {minibatch} makes one update per batch, where f = 1 and FIPO is DAPO; "
        "use a smaller divisor",
    )
    require(
        args.future_kl_half_life is None or args.future_kl_half_life > 0,
        f"--future-kl-half-life {args.future_kl_half_life} must be above 0, or None",
    )
    require(
        args.influence_high is None or 0 < args.influence_low <= args.influence_high,
        f"--influence-low {args.influence_low} must lie between 0 and --influence-high, "
        f"{args.influence_high}",
    )


# What the 7B and 32B recipes share [FIPO Tables 2 and 3]; what the tables leave open is our choice.
PAPER = Args(
    num_steps=500,
    eval_every=10,
    dataset="dapo-math-17k",
    max_prompt_tokens=2048,
    reward="verifier",
    eval_dataset="aime24",
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
PAPER_7B = replace(PAPER, model="Qwen/Qwen2.5-Math-7B", max_context=32_768)
PAPER_32B = replace(PAPER, model="Qwen/Qwen2.5-32B", tensor_parallel=4, cpu_offload=True)
PRESETS = {
    "tiny": Args(),
    "qwen2.5-7b-math": replace(  # [FIPO Table 3]; what is not here is a default of Args
        PAPER_7B,
        group_size=32,
        max_response_tokens=10_240,
        overlong_buffer=2048,
        minibatch_size=64 * 32,
        safety_threshold=3.0,
    ),
    "qwen2.5-32b": replace(  # [FIPO Table 2]; likewise
        PAPER_32B,
        max_response_tokens=20_480,
        overlong_buffer=4096,
        minibatch_size=64 * 16,
        influence_low=1.0,
        safety_threshold=10.0,
    ),
}

# ==================================================================================================
# 4 Algorithm
# ==================================================================================================


def shape_rewards(
    correct, lengths, max_response_tokens, overlong_buffer, overlong_penalty, wrong_reward=0.0
):
    """R_i: 1 where right, wrong_reward where wrong, minus a penalty that grows linearly from 0 to
    overlong_penalty over the last overlong_buffer tokens before the limit [DAPO §3.4].

    correct [B] in [0, 1], lengths [B] in tokens; returns [B]. overlong_buffer 0: no penalty."""
    rewards = wrong_reward + (1 - wrong_reward) * correct
    if overlong_buffer > 0:
        excess = (lengths - (max_response_tokens - overlong_buffer)) / overlong_buffer
        rewards = rewards - overlong_penalty * excess.clamp(0, 1)
    return rewards


def group_advantages(rewards, group_size):
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6) over a prompt's G responses [FIPO §2], unbiased std.

    rewards [B], row p*G+g; returns [B, 1], one value for all tokens of a response. Exactly 0 where
    the rewards of a group are equal (rounding would leave noise / 1e-6), and for G = 1."""
    groups = rewards.float().view(-1, group_size)  # [P, G]
    std = groups.std(1, keepdim=True, unbiased=group_size > 1)
    advantages = (groups - groups.mean(1, keepdim=True)) / (std + 1e-6)
    mixed = groups.amax(1, keepdim=True) > groups.amin(1, keepdim=True)
    return torch.where(mixed, advantages, 0.0).view(-1, 1)


def future_kl(log_ratio, mask, half_life, dual_clip):
    """FKL_t = sum over k >= t of M_k gamma^(k-t) d_k with gamma = 2^(-1/half_life) [FIPO Eq. 6].

    log_ratio d, mask [B, T]; half_life None: gamma = 1 [FIPO Eq. 4]; dual_clip None: M = 1. Returns
    fp32 [B, T]. FKL_t = M_t d_t + gamma FKL_t+1 is a first-order recurrence: from right to left in
    blocks of 128 tokens it needs only a carry, so time and memory grow with T, not with T^2."""
    # M [FIPO Eq. 5]; a NaN stays, and is seen
    kept = mask.bool() & ~(log_ratio.exp() > (torch.inf if dual_clip is None else dual_clip))
    filtered = torch.where(kept, log_ratio.double(), 0.0)  # M d; fp64, for long sums cancel
    gamma = 1.0 if half_life is None else 2 ** (-1 / half_life)
    index = torch.arange(128, device=filtered.device, dtype=filtered.dtype)
    decay = (gamma ** (index[:, None] - index).clamp(min=0)).tril()  # [k, t] gamma^(k-t), k >= t
    blocks, carry = [], 0.0
    for block in reversed(filtered.split(128, dim=1)):
        width = block.shape[1]
        beyond = carry * gamma ** (width - index[:width])  # of the blocks to the right
        blocks.append(block @ decay[:width, :width] + beyond)  # [B, width]
        carry = blocks[-1][:, :1]
    return torch.cat(blocks[::-1], dim=1).float()


def influence_weights(
    future_kl, ratio, advantages, influence_low, influence_high, safety_threshold
):
    """f_t = clip(exp(FKL_t), low, high) [FIPO Eq. 7], and 1 where A < 0 and the ratio exceeds
    safety_threshold [FIPO §3.2]. All tensors broadcast to [B, T]."""
    low, high = (influence_low, influence_high) if influence_high else (0.0, 10.0)
    weights = future_kl.exp().clamp(low, high)  # RELEASE: no lower bound where it is None
    # RELEASE: clamp(f, 0.8, 1.0) there; the two agree on the interval [1.0, 1.2].
    return torch.where((advantages < 0) & (ratio > safety_threshold), 1.0, weights)


def policy_loss(
    logprobs, old_logprobs, advantages, mask, num_tokens, clip_eps_low, clip_eps_high, dual_clip,
    future_kl_half_life, influence_low, influence_high, safety_threshold, filter_extremes=True,
    drop_dual_clipped_responses=False, length_heuristic=None, max_response_tokens=None, with_f=False
):  # fmt: skip
    """The clipped surrogate [FIPO Eq. 8]: a sum over these rows' tokens, divided by the
    num_tokens of the whole minibatch, so that micro-batches and ranks add up.

    logprobs, old_logprobs, mask [B, T]; advantages [B, 1] or [B, T]; dual_clip None: no bound.
    Returns the loss, which carries the gradient, and sums of what is logged; with_f adds f."""
    mask = mask.bool()
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)  # padding may hold NaN
    # Not clamp, which gives a NaN the gradient 0: its step would be taken instead of skipped.
    log_ratio = log_ratio.minimum(torch.tensor(20.0)).maximum(torch.tensor(-20.0))
    ratio = log_ratio.exp()  # [B, T]
    with torch.no_grad():  # f is a weight: no gradient flows through it
        bounds = influence_low, influence_high, safety_threshold or dual_clip or torch.inf
        filtered_above = dual_clip if filter_extremes else None
        fkl = future_kl(log_ratio, mask, future_kl_half_life, filtered_above)
        influence = influence_weights(fkl, ratio, advantages, *bounds)  # f [B, T]
        if length_heuristic is not None:
            by_length = 1 + length_heuristic * mask.sum(1, keepdim=True) / max_response_tokens
            influence = torch.where(advantages > 0, by_length, 1.0).expand_as(ratio)
    advantages = influence * advantages  # [B, T]
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    bound = -(dual_clip or torch.inf) * advantages
    dual_clipped = mask & (advantages < 0) & (loss > bound)
    loss = torch.where(mask, torch.where(dual_clipped, bound, loss), 0.0)
    if drop_dual_clipped_responses:  # RELEASE: more than one such token; here num_tokens stays
        loss = torch.where(dual_clipped.sum(1, keepdim=True) > 1, 0.0, loss)
    active = mask & (clipped > unclipped)  # the clip decides, so the token has no gradient
    stats = {
        "policy/loss": loss.sum(),
        "policy/kl": -log_ratio.sum(),  # log pi_old - log pi_theta [FIPO footnote 1]
        "policy/clip_high_frac": (active & (ratio > 1)).sum(),
        "policy/clip_low_frac": (active & (ratio < 1)).sum(),
        "policy/dual_clip_frac": dual_clipped.sum(),
        "fipo/influence_mean": (influence * mask).sum(),
        "fipo/influence_min": torch.where(mask, influence, torch.inf).min(),
        "fipo/influence_max": torch.where(mask, influence, 0.0).max(),
        "fipo/unclipped_mean": torch.where(mask, fkl.clamp(max=20).exp(), 0.0).sum(),
        "fipo/unclipped_min": torch.where(mask, fkl, torch.inf).clamp(max=20).exp().min(),
        "fipo/unclipped_max": torch.where(mask, fkl, -torch.inf).clamp(max=20).exp().max(),
        "fipo/clip_low_frac": (mask & (fkl.exp() < (influence_low if influence_high else 0))).sum(),
        "fipo/clip_high_frac": (mask & (fkl.exp() > (influence_high or 10.0))).sum(),
        "fipo/filtered_frac": filter_extremes * (mask & (ratio > (dual_clip or torch.inf))).sum(),
    }
    stats |= {"influence": influence} if with_f else {}
    return loss.sum() / max(num_tokens, 1), stats


# ==================================================================================================
# 5 Main
# ==================================================================================================


def main(args: Args, preset: str) -> None:
    check(args)
    if args.dry_run:
        return dry_run(args, reference=args.kl_coef > 0)
    if args.eval_only:
        return eval_only(args, preset)
    accelerator = make_accelerator(args)
    tokenizer = load_tokenizer(args.model)
    problems, suites = load_problems(args, tokenizer)
    reward_function = load_reward(args.reward)
    policy, optimizer = load_policy(args, accelerator)
    reference = load_reference(args, accelerator) if args.kl_coef > 0 else None
    engine = make_engine(args, policy, tokenizer, accelerator)
    sampling = Sampling(args.max_response_tokens, args.temperature)
    shaping = args.max_response_tokens, args.overlong_buffer, args.overlong_penalty
    # Each parameter of policy_loss after num_tokens has the name of its flag.
    settings = {k: v for k, v in vars(args).items() if k in signature(policy_loss).parameters}
    settings["with_f"] = True  # tokens.html shows it
    trained = policy, optimizer  # what a checkpoint holds
    run = Run("fipo", preset, args, accelerator)
    state = run.resume(trained)  # empty without --resume
    cursor, bad_steps = state.get("cursor", 0), state.get("bad_steps", 0)
    engine.sync_weights(policy)
    if not state:
        run.log(0, evaluate(args, engine, suites, reward_function, tokenizer), [], tokenizer)

    for step in run.steps(state.get("step", 0)):
        meter = Meter()  # sums over this step's updates, reduced over ranks once, below
        set_learning_rate(optimizer, scheduled_learning_rate(step, args))

        # 1 Rollout: sample G responses to each prompt from the current policy, which becomes pi_old
        groups, verdicts, gen_batches = [], [], 0
        while len(groups) < args.prompts_per_step and gen_batches < args.max_gen_batches:
            drawn = draw_problems(problems, cursor, args.gen_prompts, args.seed)
            cursor, gen_batches = cursor + args.gen_prompts, gen_batches + 1
            with run.timer("rollout"):
                sampled = sample(engine, drawn, args.group_size, sampling, args.seed)  # my share

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
        run.warn_if_short(step, len(groups), gen_batches, verdicts)
        if not groups:  # on all ranks alike: nothing to learn from
            run.log(step, {"train/skipped_steps": 1}, [], tokenizer)
            run.save_if_due(step, trained, cursor=cursor, bad_steps=bad_steps)
            continue
        engine.sleep()  # vLLM leaves the GPU's memory to the update

        # 3 Advantage: one number per response, shared by its tokens
        correct = torch.tensor([c for g in groups for c in g.correct])  # [B]
        lengths = torch.tensor([float(len(r.token_ids)) for g in groups for r in g.responses])
        rewards = shape_rewards(correct, lengths, *shaping, args.wrong_reward)  # [B]
        all_advantages = group_advantages(rewards, args.group_size)  # [B, 1]
        batch = make_batch(groups, args.minibatch_size, tokenizer.pad_token_id, accelerator)
        advantages = all_advantages[batch.rows].to(accelerator.device)  # [b, 1], this rank's rows
        # pi_old by the trainer's forward, not by the engine's numbers; no grad.
        old_logprobs = torch.zeros_like(batch.rollout_logprobs)  # [b, T]
        with run.timer("old_logprobs"), torch.no_grad():
            # The first minibatch gets them from its update's own forward, where pi_theta is pi_old.
            for minibatch in batch.minibatches[1:]:
                for rows, _ in microbatches(batch, minibatch, args, accelerator):  # collective
                    old_logprobs[rows] = policy(*batch.inputs(rows), args.temperature)[0]
        reshard(policy)  # of FSDP: lets go of the embedding and head that no_grad left gathered

        # 4 Update: one optimizer step per minibatch
        minibatches = batch.minibatches * args.num_epochs  # the list, num_epochs times
        for update, minibatch in enumerate(run.timed("policy_update", minibatches)):
            num_tokens = accelerator.reduce(batch.mask[minibatch].sum()).clamp(min=1)  # collective
            for rows, weight in microbatches(batch, minibatch, args, accelerator):  # collective
                mask = batch.mask[rows] & (weight > 0)  # [b, T]; 0: a filler, see microbatches
                logprobs, entropy = policy(*batch.inputs(rows), args.temperature)  # [b, T]
                if update == 0:
                    old_logprobs[rows] = logprobs.detach()
                old, sampler = old_logprobs[rows], batch.rollout_logprobs[rows]
                corrected = advantages[rows] * truncated_importance(old, sampler, args)
                loss, stats = policy_loss(logprobs, old, corrected, mask, num_tokens, **settings)
                f = stats.pop("influence")  # [b, T]
                if reference is not None:
                    with torch.no_grad():
                        ref_logprobs = reference(*batch.inputs(rows), args.temperature)[0]
                    stats["policy/ref_kl"] = k3(logprobs, ref_logprobs, mask)
                    loss = loss + args.kl_coef * stats["policy/ref_kl"] / num_tokens
                accelerator.backward(loss * accelerator.num_processes)  # FSDP averages over ranks
                stats["policy/entropy"] = (entropy * mask).sum()
                meter.add(stats | logprob_gap(old, sampler, mask), mask.sum())
                meter.add(*batch.padding(rows, weight))
                batch.record(rows, weight, log_ratio=logprobs - old, entropy=entropy)
                batch.record(rows, weight, influence=f, weighted_advantage=f * corrected)
            grad_norm = accelerator.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            if torch.isfinite(grad_norm):
                optimizer.step()
            bad_steps = count_bad_steps(bad_steps, grad_norm, args)  # raises if many in a row
            optimizer.zero_grad()
            meter.add({"optim/grad_norm": grad_norm}, 1)
        with run.timer("sync"):
            engine.sync_weights(policy)  # collective

        # 5 Evaluate, log, save
        metrics = meter.reduce(accelerator) | rollout_metrics(groups)  # collective
        metrics |= {
            "reward/mean": float(rewards.mean()),
            "advantage/length_weighted_mean": float(lengths @ all_advantages / lengths.sum()),
            "rollout/gen_batches": gen_batches,
            "rollout/gen_prompts": args.gen_prompts,
            "rollout/groups_kept_frac": kept_frac,
            "train/updates_per_batch": len(minibatches),
            "optim/learning_rate": optimizer.param_groups[0]["lr"],
            "optim/bad_steps": bad_steps,
        }
        metrics["train/collapse_signals"] = run.collapse_signals(metrics)
        if step % args.eval_every == 0 or step == args.num_steps:
            metrics |= evaluate(args, engine, suites, reward_function, tokenizer)
        run.log(step, metrics, groups, tokenizer)
        run.log_tokens(step, groups, batch, tokenizer, advantages)
        run.save_if_due(step, trained, cursor=cursor, bad_steps=bad_steps)  # collective
    export(policy, tokenizer, run.folder / "model", accelerator)
    run.finish()


if __name__ == "__main__":
    launch(main, Args, PRESETS, __doc__)
