"""RFPO: policy optimization with a frozen, calibrated critic as the only reward.

Paper: RFPO, Reward-Free Policy Optimization (arXiv 2609.37119).

Idea. A critic that was fitted to outcomes estimates how likely a response is to be right, and can
stand in for the verifier. Its score also falls with length where the outcome is the same, a bias
that the policy would exploit; so the score is debiased by length and cut to 0 or 1. One forward of
the frozen critic gives reward and baseline; a response that was cut off is scored as it stands.

    v     = V(prompt, y)              value of the state after the last token, cut off or not
    b(l)  = mean of v at length l minus mean of v, within the right and within the wrong, averaged
    tau   = quantile of v - s b at 1 - (share of right ones);  b and tau of 512 rollouts of pi_0
    r     = 1 where v - s b(l) > tau, else 0                                     [RFPO Eq. 2]
    r     = the verifier's verdict instead, with probability p                   [RFPO Algorithm 1]
    A_t   = r - V_t, whitened, V_t of the state before token t; PPO's loss       [RFPO Algorithm 1]

Differs from ppo_critic.py in the reward, and in that the critic is never trained. At p = 0 no label
enters training after the calibration (calibration.py fits it).

Laptop:   python ppo_critic.py && python rfpo.py
8 GPUs:   torchrun --nproc_per_node 8 rfpo.py qwen3-4b
Compare:  diff ppo_critic.py rfpo.py

DEVIATION: the baseline of token t is the value of the state before it, where RFPO Eq. 1 and
Algorithm 1 write V(x, y_<=t): one that has seen the action it judges is biased.
test_ppo_critic.py::test_the_baseline_has_not_seen_the_token_it_judges pins it.
DEVIATION: p = 1 keeps the critic frozen, where the paper's p = 1 is ppo_critic.py.
test_rfpo.py::test_with_all_labels_the_reward_is_the_verdict pins it.
"""

from dataclasses import dataclass, replace
from inspect import signature
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from calibration import Calibration, assess, fit_calibration, load_calibration
from common import (
    Meter,
    Run,
    Sampling,
    auc,
    best_cut,
    check_args,
    count_bad_steps,
    discounted_suffix_sum,
    draw_problems,
    evaluate,
    export,
    final_box,
    fingerprint,
    freeze,
    gather_groups,
    gather_rows,
    judge,
    launch,
    left_band,
    load_critic,
    load_policy,
    load_problems,
    load_reward,
    load_tokenizer,
    logprob_gap,
    make_accelerator,
    make_batch,
    make_engine,
    mean_and_variance,
    microbatches,
    problem_ids_of,
    read_values,
    rebounded,
    require,
    reshard,
    resolve_model,
    response_texts,
    rollout_metrics,
    row_seed,
    sample,
    set_learning_rate,
    statement_stats,
    truncated_importance,
    warmup,
    within_problem_auc,
)
from dry_run import dry_run
from eval_only import eval_only
from metrics import restatements as restatements
from verifier import grade

# ==================================================================================================
# 3 Args and presets
# ==================================================================================================


@dataclass
class Args:
    # Run
    seed: int = 1  # of the prompt order and of all sampling
    run_name: str | None = None  # folder under runs_dir; default <script>-<preset>-seed<seed>
    runs_dir: str = "runs"  # where run folders go
    num_steps: int = 40  # rollout batches to train on
    eval_every: int = 20  # steps between evaluations; also before the first step and after the last
    save_every: int = 20  # steps between checkpoints; also after the last step
    keep_last: int = 2  # checkpoints to keep
    resume: bool = False  # continue the newest complete checkpoint of the run with this name
    track: str = ""  # a tracker of Accelerate (tensorboard, wandb, ...) beside metrics.jsonl
    dry_run: bool = False  # print sizes, shards and memory of this preset, and end
    eval_only: bool = False  # evaluate the model, train nothing; writes eval.json
    # Task
    policy: str = "tiny-pi_0"  # pi_0: a hub id, a folder, or the one that ppo_critic.py left
    critic: str = "tiny-critic"  # the critic to freeze: a folder, or as policy
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
    prompts_per_step: int = 64  # prompts per step (P)
    group_size: int = 8  # responses per prompt (G)
    max_response_tokens: int = 24  # longer responses are cut, and scored as they stand
    temperature: float = 1.0  # of sampling, and of the log-probabilities in training
    rollout_is_cap: float = 0.0  # truncated importance sampling: cap of pi_old / pi_engine; 0: off
    # Optimization
    learning_rate: float = 1e-4  # of the policy's AdamW (TINY; RFPO Table 6: 1e-6)
    warmup_steps: int = 10  # steps of linear warm-up; constant after them
    weight_decay: float = 0.1  # of AdamW
    max_grad_norm: float = 1.0  # gradient norm above which gradients are scaled down
    minibatch_size: int = 512  # responses per policy update; the whole batch: one update
    num_epochs: int = 1  # passes over a rollout batch
    tokens_per_microbatch: int = 4096  # padded tokens per forward; changes no gradient
    activation_checkpointing: bool = False  # recompute activations in the backward pass
    cpu_offload: bool = False  # keep parameters and optimizer state in CPU memory between uses
    max_bad_steps: int = 3  # non-finite updates in a row, each skipped, that end the run
    # Algorithm
    clip_eps_low: float = 0.2  # the ratio is clipped at 1 - this
    clip_eps_high: float = 0.2  # the ratio is clipped at 1 + this
    dual_clip: float | None = None  # bound c on the ratio where A < 0; None: no bound
    gamma: float = 1.0  # discount of GAE
    gae_lambda: float = 1.0  # GAE's mix of bootstrapped (0) and sampled (1) returns
    old_logprobs_pass: bool = False  # a forward of its own for old log-probs, as the paper runs it
    label_fraction: float = 0.0  # share p of responses whose reward is the verifier's verdict
    reward_mode: Literal["binary", "continuous", "threshold", "raw"] = "binary"  # critic_rewards
    fixed_threshold: float = 0.6  # cut of the raw score in mode threshold
    debias_until: int | None = None  # mode continuous: b stays constant beyond this length, tokens
    advantage: Literal["gae", "group"] = "gae"  # group: within a prompt's responses [RFPO App. F.2]
    calibration: str | None = None  # calibration.json of an earlier run; default: calibrate now
    calibration_rollouts: int = 512  # responses of pi_0 that are judged once, before training
    calibrate_on: Literal["all", "finished"] = "all"  # or only responses that were not cut off
    num_bins: int = 10  # length bins of the offsets b
    scale: float | Literal["auto"] = 1.0  # factor s on b; auto: no length trend in either class
    allow_weak_critic: bool = False  # train on a critic that fails the checks of the calibration
    stop_on_restatement: bool = False  # end the run when answers begin to be restated
    stop_on_entropy_rise: bool = False  # end it when the entropy stands 10 % above its lowest

    @property
    def model(self) -> str:
        return resolve_model(self.policy, "--policy")  # by the name of the other scripts


def check(args: Args) -> None:
    """Refuse wrong settings at start; each message names the value, the limit and the way out."""
    check_args(args)
    rollouts, bins, size = args.calibration_rollouts, args.num_bins, args.group_size
    named = f"--calibration-rollouts {rollouts}"
    require(rollouts >= bins, f"{named} must be at least --num-bins {bins}")
    require(rollouts % size == 0, f"{named} is no multiple of --group-size {size}")
    require(size > 1 or args.advantage == "gae", f"--group-size {size} leaves no --advantage group")
    require(
        args.save_every <= 20 or not (args.stop_on_restatement or args.stop_on_entropy_rise),
        f"--stop-on-restatement, --stop-on-entropy-rise need --save-every {args.save_every} <= 20",
    )


# [RFPO Table 6], the RL stage; what it leaves open is our choice.
PAPER = Args(
    num_steps=300,
    eval_every=10,
    save_every=50,
    policy="runs/ppo_critic-qwen3-4b-phase2-seed1/pi_0",
    critic="runs/ppo_critic-qwen3-4b-phase2-seed1/critic",
    dataset="dapo-math-17k",
    max_prompt_tokens=2048,
    reward="verifier",
    eval_dataset="aime26,amc23",
    eval_samples=8,
    eval_temperature=0.7,
    eval_max_tokens=12_288,
    tensor_parallel=2,
    engine_memory=0.5,
    prompts_per_step=128,
    minibatch_size=1024,
    max_response_tokens=5120,
    learning_rate=1e-6,
    tokens_per_microbatch=32_768,
    activation_checkpointing=True,
)
PRESETS = {
    "tiny": Args(),
    "qwen3-4b": PAPER,
    "qwen3-4b-cap4096": replace(  # a fitted scale; the paper found 1.7 by hand [RFPO App. E.5]
        PAPER, num_steps=310, max_response_tokens=4096, num_bins=6, scale="auto"
    ),
}

# ==================================================================================================
# 4 Algorithm
# ==================================================================================================


def gae(rewards, values, mask, gamma, gae_lambda):
    """Generalized advantage estimation, and the returns A + V that the values are fitted to.

    rewards, values, mask [B, T], where values[:, t] is that of the state in which token t is
    chosen; two [B, T], 0 beyond a response. A response that was cut off has ended too: nothing is
    bootstrapped behind its last token. ValueError where a mask has a hole."""
    mask = mask.bool()
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("gae needs masks that are contiguous from the left; one has a hole")
    values = torch.where(mask, values, 0.0)  # padding may hold anything
    next_values = F.pad(values[:, 1:], (0, 1))
    errors = torch.where(mask, rewards + gamma * next_values - values, 0.0)  # TD errors, [B, T]
    advantages = torch.where(mask, discounted_suffix_sum(errors, gamma * gae_lambda), 0.0)
    return advantages, advantages + values


def whiten(x, mask, mean, var):
    """(x - mean) / sqrt(var + 1e-8) where mask is nonzero, else 0 [RFPO Table 6].

    x, mask [B, T]; mean and population variance are those of the whole batch, over all ranks."""
    return torch.where(mask.bool(), (x - mean) / torch.sqrt(var + 1e-8), 0.0).to(x.dtype)


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    num_tokens,
    clip_eps_low,
    clip_eps_high,
    dual_clip=None,
):
    """The clipped surrogate [RFPO Table 6]: a sum over these rows' tokens, divided by the
    num_tokens of the whole minibatch, so that micro-batches and ranks add up.

    logprobs, old_logprobs, advantages, mask [B, T]; dual_clip None: no bound. Returns the loss,
    which carries the gradient, and sums over tokens of what is logged."""
    mask = mask.bool()
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)  # padding may hold NaN
    # Not clamp, which gives a NaN the gradient 0: its step would be taken instead of skipped.
    log_ratio = log_ratio.minimum(torch.tensor(20.0)).maximum(torch.tensor(-20.0))
    ratio = log_ratio.exp()  # [B, T]
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    bound = -(dual_clip or torch.inf) * advantages
    dual_clipped = mask & (advantages < 0) & (loss > bound)
    loss = torch.where(mask, torch.where(dual_clipped, bound, loss), 0.0)
    active = mask & (clipped > unclipped)  # the clip decides, so the token has no gradient
    stats = {
        "policy/loss": loss.sum(),
        "policy/kl": -log_ratio.sum(),  # log pi_old - log pi_theta
        "policy/clip_high_frac": (active & (ratio > 1)).sum(),
        "policy/clip_low_frac": (active & (ratio < 1)).sum(),
        "policy/dual_clip_frac": dual_clipped.sum(),
    }
    return loss.sum() / max(num_tokens, 1), stats


def critic_rewards(
    scores, lengths, calibration, reward_mode="binary", fixed_threshold=0.6, debias_until=None
):
    """r [B] of terminal scores v [B] and lengths [B] in tokens.

    binary      1 where v - s b > tau, strictly, else 0; what the paper deploys [RFPO Eq. 2]
    continuous  v - s b, where b is constant beyond debias_until tokens [RFPO App. F.2]
    threshold   1 where v > fixed_threshold, else 0                     [RFPO App. F.1]
    raw         v                                                       [RFPO App. F.1]"""
    scores = torch.as_tensor(scores)
    if reward_mode == "raw":
        return scores
    if reward_mode == "threshold":
        return (scores > fixed_threshold).float()
    if reward_mode == "continuous" and debias_until is not None:
        lengths = torch.as_tensor(lengths).clamp(max=debias_until)
    debiased = scores.double() - calibration.scale * calibration.offset(lengths)
    if reward_mode == "continuous":
        return debiased.float()
    return (debiased > calibration.threshold).float()


# ==================================================================================================
# 5 Main
# ==================================================================================================


def calibrate(args, critic, engine, problems, reward_function, tokenizer, accelerator):
    """Sample the calibration rollouts, judge, score, fit; refuse a weak critic. A collective."""
    drawn = draw_problems(problems, 0, args.calibration_rollouts // args.group_size, args.seed)
    sampling = Sampling(args.max_response_tokens, args.temperature)
    groups = sample(engine, drawn, args.group_size, sampling, args.seed, 2)
    groups = gather_groups(judge(groups, reward_function, tokenizer), engine)  # collective
    batch = make_batch(groups, args.calibration_rollouts, tokenizer.pad_token_id, accelerator)
    scores = gather_rows(read_values(critic, batch, args, accelerator)[1], batch, accelerator)
    responses = [r for g in groups for r in g.responses]
    lengths = torch.tensor([len(r.token_ids) for r in responses])
    correct = torch.tensor([c for g in groups for c in g.correct])
    kept = torch.tensor([r.finished or args.calibrate_on == "all" for r in responses])
    fitted = fit_calibration(scores[kept], lengths[kept], correct[kept], args.num_bins, args.scale)
    rewarded = critic_rewards(scores, lengths, fitted) > 0.5  # [N], by Eq. 2 in every mode
    outcome = correct, problem_ids_of(groups), [r.finished for r in responses]
    faults, summary = assess(scores, rewarded, *outcome)
    if accelerator.is_main_process:
        print(f"calibration: {summary}; threshold {fitted.threshold:.4f}, scale {fitted.scale:.3g}")
        print("".join(f"warning: {fault}\n" for fault in faults), end="")
    require(
        not faults or args.allow_weak_critic,
        f"this critic is no reward: {'; '.join(faults)} ({summary}); train it longer, or "
        "--allow-weak-critic",
    )
    return replace(fitted, cap=args.max_response_tokens, critic=fingerprint(args.critic))


def main(args: Args, preset: str) -> None:
    check(args)
    if args.dry_run:
        return dry_run(args, frozen_critic=args.critic)
    if args.eval_only:
        return eval_only(args, preset)
    accelerator = make_accelerator(args)
    tokenizer = load_tokenizer(args.model)
    problems, suites = load_problems(args, tokenizer)
    reward_function = load_reward(args.reward)
    policy, optimizer = load_policy(args, accelerator)
    critic = freeze(load_critic(args, tokenizer), accelerator)
    engine = make_engine(args, policy, tokenizer, accelerator)
    sampling = Sampling(args.max_response_tokens, args.temperature)
    # Each parameter of policy_loss after num_tokens has the name of its flag.
    settings = {k: v for k, v in vars(args).items() if k in signature(policy_loss).parameters}
    trained = policy, optimizer  # what a checkpoint holds
    judging = reward_function, tokenizer, accelerator
    engine.sync_weights(policy)
    calibration: Calibration | None = load_calibration(args) if args.calibration else None
    if not calibration and not args.resume:  # before the run has a folder: a refusal leaves none
        calibration = calibrate(args, critic, engine, problems, *judging)
    run = Run("rfpo", preset, args, accelerator)
    state = run.resume(trained)  # empty without --resume
    cursor, bad_steps = state.get("cursor", 0), state.get("bad_steps", 0)
    past = state.get("past", [])  # mean length, restatements and entropy of each step
    if state:
        engine.sync_weights(policy)
        calibration = load_calibration(args, state["calibration"])
    elif not calibration:  # --resume of a run that has no checkpoint yet
        calibration = calibrate(args, critic, engine, problems, *judging)
    if accelerator.is_main_process:
        (run.folder / "calibration.json").write_text(calibration.to_json())
    if not state:
        run.log(0, evaluate(args, engine, suites, reward_function, tokenizer), [], tokenizer)

    for step in run.steps(state.get("step", 0)):
        meter = Meter()  # sums over this step's updates, reduced over ranks once, below
        set_learning_rate(optimizer, args.learning_rate * warmup(step, args.warmup_steps))

        # 1 Rollout: sample G responses to each prompt from the current policy, which becomes pi_old
        drawn = draw_problems(problems, cursor, args.prompts_per_step, args.seed)
        cursor += args.prompts_per_step
        with run.timer("rollout"):
            groups = sample(engine, drawn, args.group_size, sampling, args.seed)  # my share

        # 2 Reward: the critic's; verdicts are for the log, and for a share of label_fraction
        with run.timer("reward"):
            groups = judge(groups, reward_function, tokenizer)
            texts = response_texts(groups, tokenizer)  # what announces the decline of Table 14
            golds = [g.problem.gold for g in groups for _ in g.responses]
            boxed_right = grade([final_box(text) for text in texts], golds)
            meter.add(statement_stats(texts) | {"text/box_accuracy": sum(boxed_right)}, len(texts))
        groups = gather_groups(groups, engine)  # collective
        engine.sleep()  # vLLM leaves the GPU's memory to the update
        correct = torch.tensor([c for g in groups for c in g.correct])  # [B]
        lengths = torch.tensor([float(len(r.token_ids)) for g in groups for r in g.responses])
        batch = make_batch(groups, args.minibatch_size, tokenizer.pad_token_id, accelerator)
        with run.timer("values"):
            # No grad, collective: values of my rows [b, T + 1], and the terminal ones [b]
            values, scores = read_values(critic, batch, args, accelerator)
        scores = gather_rows(scores, batch, accelerator)  # collective; [B]
        all_rewards = critic_rewards(
            scores, lengths, calibration, args.reward_mode, args.fixed_threshold, args.debias_until
        )  # [B]
        labelled = np.random.default_rng(row_seed(args.seed, 3, step, 0)).random(len(correct))
        labelled = torch.from_numpy(labelled < args.label_fraction)
        all_rewards = torch.where(labelled, correct, all_rewards)  # [RFPO Algorithm 1]
        outcome = all_rewards[batch.rows].to(accelerator.device)[:, None]  # [b, 1], my rows

        # 3 Advantage: reward minus the frozen critic's values, whitened over the batch
        mask = batch.mask  # [b, T], of tokens
        states = torch.cat([mask[:, :1], mask], 1)  # [b, T + 1], of the states around them
        terminal = states & ~F.pad(mask, (0, 1))  # [b, T + 1], the state after the last token
        rewards = outcome * terminal[:, 1:]  # [b, T], at the last token t, for state t + 1 is that
        advantages, returns = gae(rewards, values[:, :-1], mask, args.gamma, args.gae_lambda)
        _, variance = mean_and_variance(returns, mask, accelerator)  # collective
        # Collective; an advantage is what the value left unexplained of the return.
        mean, unexplained = mean_and_variance(advantages, mask, accelerator)
        if args.advantage == "group":
            grouped = all_rewards.view(-1, args.group_size)  # [P, G]
            grouped = (grouped - grouped.mean(1, True)) / (grouped.std(1, keepdim=True) + 1e-6)
            advantages = grouped.view(-1)[batch.rows].to(values)[:, None].expand(mask.shape)
        else:
            advantages = whiten(advantages, mask, mean, unexplained)
        # pi_old by the trainer's forward, not by the engine's numbers; no grad.
        old_logprobs = torch.zeros_like(batch.rollout_logprobs)  # [b, T]
        with run.timer("old_logprobs"), torch.no_grad():
            # The first minibatch gets them from its update's own forward, where pi_theta is pi_old.
            for minibatch in batch.minibatches[0 if args.old_logprobs_pass else 1 :]:
                for rows, _ in microbatches(batch, minibatch, args, accelerator):  # collective
                    old_logprobs[rows] = policy(*batch.inputs(rows), args.temperature)[0]
        reshard(policy)  # of FSDP: lets go of the embedding and head that no_grad left gathered

        # 4 Update: one optimizer step of the policy per minibatch
        minibatches = batch.minibatches * args.num_epochs  # the list, num_epochs times
        for update, minibatch in enumerate(run.timed("policy_update", minibatches)):
            num_tokens = accelerator.reduce(mask[minibatch].sum()).clamp(min=1)  # collective
            for rows, weight in microbatches(batch, minibatch, args, accelerator):  # collective
                keep = mask[rows] & (weight > 0)  # [b, T]; 0: a filler, see microbatches
                logprobs, entropy = policy(*batch.inputs(rows), args.temperature)  # [b, T]
                if update == 0 and not args.old_logprobs_pass:
                    old_logprobs[rows] = logprobs.detach()
                old, sampler = old_logprobs[rows], batch.rollout_logprobs[rows]
                corrected = advantages[rows] * truncated_importance(old, sampler, args)
                loss, stats = policy_loss(logprobs, old, corrected, keep, num_tokens, **settings)
                accelerator.backward(loss * accelerator.num_processes)  # FSDP averages over ranks
                stats["policy/entropy"] = (entropy * keep).sum()
                meter.add(stats | logprob_gap(old, sampler, keep), keep.sum())
                meter.add(*batch.padding(rows, weight))
                batch.record(rows, weight, log_ratio=logprobs - old, entropy=entropy)
            grad_norm = accelerator.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            if torch.isfinite(grad_norm):
                optimizer.step()
            bad_steps = count_bad_steps(bad_steps, grad_norm, args)  # raises if many in a row
            optimizer.zero_grad()
            meter.add({"optim/grad_norm": grad_norm}, 1)
        with run.timer("sync"):
            engine.sync_weights(policy)  # collective

        # 5 Evaluate, log, save
        meter.add({"value/mean": torch.where(states, values, 0.0).sum()}, states.sum())
        meter.add({"value/min": torch.where(states, values, torch.inf).min()}, 1)
        meter.add({"value/max": torch.where(states, values, -torch.inf).max()}, 1)
        metrics = meter.reduce(accelerator) | rollout_metrics(groups)  # collective
        past += [[float(lengths.mean()), metrics["text/restatements"], metrics["policy/entropy"]]]
        tokens, stated, entropies = zip(*past, strict=True)
        metrics |= {
            "reward/mean": float(all_rewards.mean()),
            "rfpo/reward_gap": float(all_rewards.mean() - correct.mean()),
            "rfpo/score_gap": float(scores.mean() - correct.mean()),
            "rfpo/agreement": float(((all_rewards > 0.5) == (correct > 0.5)).double().mean()),
            "rfpo/best_cut": best_cut(scores, correct),
            "rfpo/length_drift": tokens[-1] / tokens[0] - 1,
            "value/explained_variance": float(1 - unexplained / variance) if variance > 0 else 0.0,
            "value/auc": auc(scores, correct),
            "value/within_auc": within_problem_auc(scores, correct, problem_ids_of(groups)),
            "train/updates_per_batch": len(minibatches),
            "optim/learning_rate": optimizer.param_groups[0]["lr"],
            "optim/bad_steps": bad_steps,
        }
        if step % args.eval_every == 0 or step == args.num_steps:
            metrics |= evaluate(args, engine, suites, reward_function, tokenizer)
        run.log(step, metrics, groups, tokenizer)
        run.log_tokens(step, groups, batch, tokenizer, advantages, values)
        restated = args.stop_on_restatement and left_band(stated)
        if restated or (args.stop_on_entropy_rise and rebounded(entropies)):
            alarm = "answers are restated" if restated else "the entropy rises"
            run.warn(f"step {step}: {alarm}; going back to the last checkpoint")
            run.load_newest(trained)
            break
        kept = {"past": past, "calibration": calibration.to_json()}
        run.save_if_due(step, trained, cursor=cursor, bad_steps=bad_steps, **kept)  # collective
    export(policy, tokenizer, run.folder / "model", accelerator)
    run.finish()


if __name__ == "__main__":
    launch(main, Args, PRESETS, __doc__)
