"""PPO with a critic: supervised training, and the factory of the critic that RFPO freezes.

Paper: RFPO (arXiv 2609.37119), sections 3.1 and 4, appendices A and B.

Idea. A value network learns to predict, from every prefix of a response, whether it will turn out
right. The advantage of a token is what the outcome adds to the value of the state in which it was
chosen. Critics have a name for making long-chain RL unstable; the paper's finding is that the
update does: one optimizer step on each whole batch, and the instability recedes.

    V_t   ~ Pr(success | prompt, y_<t)                                           [RFPO Eq. 1]
    A_t   = sum over k >= t of (gamma lambda)^(k-t) (r_k + gamma V_{k+1} - V_k), V = 0 at the end
          = r - V_t where gamma = lambda = 1 and r comes at the end              [RFPO Algorithm 1]
    L_t   = max(-ratio_t A_t, -clip(ratio_t, 1 - e, 1 + e) A_t)                  A_t whitened
    L_V   = 0.5 max((V_t - R_t)^2, (clip(V_t, old_t - c, old_t + c) - R_t)^2)

V has T + 1 states: the last, after the final token, is what RFPO takes as its reward, so the value
loss covers it too. With one update per batch pi_old is pi_theta: the ratio is exactly 1, nothing is
clipped, and no separate forward for old log-probabilities is needed.

Laptop:   python ppo_critic.py
8 GPUs:   torchrun --nproc_per_node 8 ppo_critic.py qwen3-4b-phase1
Compare:  diff ppo_critic.py rfpo.py

DEVIATION: the baseline of token t is the value of the state before it, where RFPO Eq. 1 and
Algorithm 1 write V(x, y_<=t): one that has seen the action it judges is biased.
test_ppo_critic.py::test_the_baseline_has_not_seen_the_token_it_judges pins it.
DEVIATION: the tiny preset updates the critic eight times per batch, where RFPO updates it once.
test_ppo_critic.py::test_presets_follow_table_6 pins it.
"""

import math
from dataclasses import dataclass, replace
from inspect import signature

import torch
import torch.nn.functional as F

from common import (
    Meter,
    Run,
    Sampling,
    auc,
    check_args,
    count_bad_steps,
    discounted_suffix_sum,
    draw_problems,
    evaluate,
    export,
    gather_groups,
    gather_rows,
    judge,
    launch,
    load_critic,
    load_policy,
    load_problems,
    load_reward,
    load_tokenizer,
    logprob_gap,
    make_accelerator,
    make_batch,
    make_engine,
    make_optimizer,
    mean_and_variance,
    microbatches,
    problem_ids_of,
    read_values,
    require,
    reshard,
    rollout_metrics,
    sample,
    set_learning_rate,
    truncated_importance,
    warmup,
    within_problem_auc,
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
    critic: str | None = None  # folder of a critic; default: the policy's weights and a new head
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
    learning_rate: float = 2e-4  # of the policy's AdamW (TINY; RFPO Table 6: 1e-6)
    critic_learning_rate: float = 1e-3  # of the critic's AdamW (TINY; RFPO Table 6: 1e-5)
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
    value_clip: float = 0.5  # values are clipped this far around those at the rollout
    critic_updates_per_batch: int = 8  # equal parts of a batch, one critic update each (RFPO: 1)
    critic_warmup_steps: int = 8  # first steps, which train the critic alone (RFPO phase 1: 30)
    old_logprobs_pass: bool = False  # a forward of its own for old log-probs, as the paper runs it
    save_actor_at_step: int | None = 30  # keep the policy of this step as <run>/pi_0
    save_critic_at_step: int | None = 50  # keep the critic of this step as <run>/critic


def check(args: Args) -> None:
    """Refuse wrong settings at start; each message names the value, the limit and the way out."""
    check_args(args)
    batch = args.prompts_per_step * args.group_size
    pieces = args.critic_updates_per_batch
    require(
        batch % pieces == 0,
        f"--critic-updates-per-batch {pieces} does not divide prompts_per_step x group_size "
        f"= {batch}",
    )
    require(
        args.critic_warmup_steps < args.num_steps,
        f"--critic-warmup-steps {args.critic_warmup_steps} leaves none of --num-steps "
        f"{args.num_steps} to the policy",
    )


# [RFPO Table 6]; what it leaves open is our choice. Every stage takes folders of the one before.
PHASE1 = Args(
    num_steps=500,
    eval_every=10,
    save_every=50,
    model="runs/sft-qwen3-4b-base-seed1/epoch-2",
    dataset="dapo-math-17k",
    max_prompt_tokens=2048,
    reward="verifier",
    eval_dataset="aime26,amc23",
    eval_samples=8,
    eval_temperature=0.7,
    eval_max_tokens=8192,
    tensor_parallel=2,
    engine_memory=0.5,
    max_response_tokens=8192,
    learning_rate=1e-6,
    critic_learning_rate=1e-5,
    tokens_per_microbatch=32_768,
    activation_checkpointing=True,
    critic_updates_per_batch=1,
    critic_warmup_steps=30,
    save_actor_at_step=None,
    save_critic_at_step=500,
)
PHASE2 = replace(
    PHASE1,
    num_steps=300,
    model="runs/ppo_critic-qwen3-4b-phase1-seed1/model",
    critic="runs/ppo_critic-qwen3-4b-phase1-seed1/critic",
    eval_max_tokens=12_288,
    prompts_per_step=128,
    minibatch_size=1024,
    max_response_tokens=5120,
    critic_warmup_steps=0,
    save_actor_at_step=200,
    save_critic_at_step=300,
)
RL_STAGE = replace(
    PHASE2,
    model="runs/ppo_critic-qwen3-4b-phase2-seed1/pi_0",
    critic="runs/ppo_critic-qwen3-4b-phase2-seed1/critic",
    save_actor_at_step=None,
    save_critic_at_step=None,
)
PRESETS = {
    "tiny": Args(),
    "qwen3-4b-phase1": PHASE1,
    "qwen3-4b-phase2": PHASE2,
    "qwen3-4b": RL_STAGE,
    "qwen3-4b-cap4096": replace(RL_STAGE, num_steps=310, max_response_tokens=4096),
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


def value_loss(values, old_values, returns, mask, num_states, value_clip):
    """L_V: half the squared error, or that of the value clipped around its old one if it is larger
    [RFPO Table 6]; a sum over these states, divided by the num_states of the whole minibatch.

    All of one shape, [B, T + 1] in the loop. Returns the loss and sums of what is logged."""
    mask = mask.bool()
    error, clipped_error = torch.where(
        mask,
        torch.stack([values, values.clamp(old_values - value_clip, old_values + value_clip)])
        - returns,
        0.0,
    )  # padding may hold NaN
    loss = 0.5 * torch.maximum(error**2, clipped_error**2)
    stats = {"value/loss": loss.sum(), "value/clip_frac": (clipped_error**2 > error**2).sum()}
    return loss.sum() / max(num_states, 1), stats


# ==================================================================================================
# 5 Main
# ==================================================================================================


def main(args: Args, preset: str) -> None:
    check(args)
    if args.dry_run:
        return dry_run(args, trained_critic=args.critic or args.model)
    if args.eval_only:
        return eval_only(args, preset)
    accelerator = make_accelerator(args)
    tokenizer = load_tokenizer(args.model)
    problems, suites = load_problems(args, tokenizer)
    reward_function = load_reward(args.reward)
    policy, optimizer = load_policy(args, accelerator)
    critic = load_critic(args, tokenizer)
    critic, critic_optimizer = accelerator.prepare(critic, make_optimizer(critic, args))
    engine = make_engine(args, policy, tokenizer, accelerator)
    sampling = Sampling(args.max_response_tokens, args.temperature)
    # Each parameter of policy_loss after num_tokens has the name of its flag.
    settings = {k: v for k, v in vars(args).items() if k in signature(policy_loss).parameters}
    trained = (policy, optimizer), (critic, critic_optimizer)  # what a checkpoint holds
    run = Run("ppo_critic", preset, args, accelerator)
    kept_at = max(args.save_actor_at_step or 0, args.save_critic_at_step or 0)
    if kept_at > args.num_steps:
        run.warn(f"--num-steps {args.num_steps} ends before step {kept_at}: no whole pair for rfpo")
    state = run.resume(*trained)  # empty without --resume
    cursor, bad_steps = state.get("cursor", 0), state.get("bad_steps", 0)
    bad_critic_steps = state.get("bad_critic_steps", 0)
    engine.sync_weights(policy)
    if not state:
        run.log(0, evaluate(args, engine, suites, reward_function, tokenizer), [], tokenizer)
    # A batch is cut into the largest pieces of which policy and critic minibatches are made.
    critic_minibatch_size = args.prompts_per_step * args.group_size // args.critic_updates_per_batch
    piece_size = math.gcd(args.minibatch_size, critic_minibatch_size)

    for step in run.steps(state.get("step", 0)):
        meter = Meter()  # sums over this step's updates, reduced over ranks once, below
        policy_step = step - args.critic_warmup_steps  # below 1: the critic alone is trained
        share, critic_share = (warmup(s, args.warmup_steps) for s in (policy_step, step))
        set_learning_rate(optimizer, args.learning_rate * share)
        set_learning_rate(critic_optimizer, args.critic_learning_rate * critic_share)

        # 1 Rollout: sample G responses to each prompt from the current policy, which becomes pi_old
        drawn = draw_problems(problems, cursor, args.prompts_per_step, args.seed)
        cursor += args.prompts_per_step
        with run.timer("rollout"):
            groups = sample(engine, drawn, args.group_size, sampling, args.seed)  # my share

        # 2 Reward: judge the responses, give every group to every rank, read the values
        with run.timer("reward"):
            groups = judge(groups, reward_function, tokenizer)
        groups = gather_groups(groups, engine)  # collective
        engine.sleep()  # vLLM leaves the GPU's memory to the update
        correct = torch.tensor([c for g in groups for c in g.correct])  # [B]
        batch = make_batch(groups, piece_size, tokenizer.pad_token_id, accelerator)
        with run.timer("values"):
            # No grad, collective: values of my rows [b, T + 1], and the terminal ones [b]
            values, scores = read_values(critic, batch, args, accelerator)
        scores = gather_rows(scores, batch, accelerator)  # collective; [B]
        all_rewards = correct
        outcome = all_rewards[batch.rows].to(accelerator.device)[:, None]  # [b, 1], my rows

        # 3 Advantage: GAE on those values, whitened over the batch
        mask = batch.mask  # [b, T], of tokens
        states = torch.cat([mask[:, :1], mask], 1)  # [b, T + 1], of the states around them
        terminal = states & ~F.pad(mask, (0, 1))  # [b, T + 1], the state after the last token
        rewards = outcome * terminal[:, 1:]  # [b, T], at the last token t, for state t + 1 is that
        advantages, returns = gae(rewards, values[:, :-1], mask, args.gamma, args.gae_lambda)
        targets = torch.where(terminal, outcome, F.pad(returns, (0, 1)))  # [b, T + 1]
        _, variance = mean_and_variance(returns, mask, accelerator)  # collective
        # Collective; an advantage is what the value left unexplained of the return.
        mean, unexplained = mean_and_variance(advantages, mask, accelerator)
        advantages = whiten(advantages, mask, mean, unexplained)
        # pi_old by the trainer's forward, not by the engine's numbers; no grad.
        minibatches = batch.merged(args.minibatch_size // piece_size) if policy_step > 0 else []
        old_logprobs = torch.zeros_like(batch.rollout_logprobs)  # [b, T]
        with run.timer("old_logprobs"), torch.no_grad():
            # The first minibatch gets them from its update's own forward, where pi_theta is pi_old.
            for minibatch in minibatches[0 if args.old_logprobs_pass else 1 :]:
                for rows, _ in microbatches(batch, minibatch, args, accelerator):  # collective
                    old_logprobs[rows] = policy(*batch.inputs(rows), args.temperature)[0]
        reshard(policy)  # of FSDP: lets go of the embedding and head that no_grad left gathered

        # 4 Update: the critic, then one optimizer step of the policy per minibatch
        critic_minibatches = batch.merged(critic_minibatch_size // piece_size) * args.num_epochs
        for minibatch in run.timed("critic_update", critic_minibatches):
            num_states = accelerator.reduce(states[minibatch].sum()).clamp(min=1)  # collective
            for rows, weight in microbatches(batch, minibatch, args, accelerator):  # collective
                keep = states[rows] & (weight > 0)  # [b, T + 1]
                loss, stats = value_loss(
                    critic(*batch.inputs(rows)),
                    values[rows],
                    targets[rows],
                    keep,
                    num_states,
                    args.value_clip,
                )
                accelerator.backward(loss * accelerator.num_processes)  # FSDP averages over ranks
                meter.add(stats, keep.sum())
            grad_norm = accelerator.clip_grad_norm_(critic.parameters(), args.max_grad_norm)
            if torch.isfinite(grad_norm):
                critic_optimizer.step()
            bad_critic_steps = count_bad_steps(bad_critic_steps, grad_norm, args)
            critic_optimizer.zero_grad()
            meter.add({"optim/critic_grad_norm": grad_norm}, 1)
        minibatches = minibatches * args.num_epochs  # the list, num_epochs times
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
        metrics |= {
            "reward/mean": float(all_rewards.mean()),
            "value/explained_variance": float(1 - unexplained / variance) if variance > 0 else 0.0,
            "value/auc": auc(scores, correct),
            "value/within_auc": within_problem_auc(scores, correct, problem_ids_of(groups)),
            "train/updates_per_batch": len(minibatches),
            "optim/learning_rate": optimizer.param_groups[0]["lr"],
            "optim/critic_learning_rate": critic_optimizer.param_groups[0]["lr"],
            "optim/bad_steps": bad_steps + bad_critic_steps,
        }
        if step % args.eval_every == 0 or step == args.num_steps:
            metrics |= evaluate(args, engine, suites, reward_function, tokenizer)
        run.log(step, metrics, groups, tokenizer)
        run.log_tokens(step, groups, batch, tokenizer, advantages, values)
        if step == args.save_actor_at_step:
            export(policy, tokenizer, run.folder / "pi_0", accelerator)
        if step == args.save_critic_at_step:
            export(critic, tokenizer, run.folder / "critic", accelerator)
        counters = {"bad_steps": bad_steps, "bad_critic_steps": bad_critic_steps}
        run.save_if_due(step, *trained, cursor=cursor, **counters)  # collective
    export(policy, tokenizer, run.folder / "model", accelerator)
    run.finish()


if __name__ == "__main__":
    launch(main, Args, PRESETS, __doc__)
