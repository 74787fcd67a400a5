"""tokens.jsonl and tokens.html: the numbers are the loop's, and a real browser shows them."""

import html
import json
import math
import re
import shutil
import subprocess
import sys
from functools import wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT

import common
import fipo
import ppo_critic
import token_page
from engines import Response

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
NAN, INF = math.nan, math.inf


def line(tokens, numbers, step=1, correct=1.0, **changes):
    """A line of tokens.jsonl."""
    return {
        "step": step,
        "group": 0,
        "prompt": "1 + 1?",
        "gold": "2",
        "correct": correct,
        "length": len(tokens),
        "tokens": tokens,
        "numbers": numbers,
    } | changes


def draw(folder, *lines):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokens.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return token_page.token_page(folder)


def browse(page, where="", script="null", flags=()):
    """Open the page in Chromium at #where; returns its text, what the console said, and the value
    of the JavaScript expression `script`."""
    copy = page.with_name("opened.html")
    asked = f"""<script>document.body.append(Object.assign(document.createElement("pre"),
        {{ id: "result", textContent: JSON.stringify({script}) }}))</script></body>"""
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", asked), encoding="utf-8")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", *flags]
    command += ["--enable-logging=stderr", f"--user-data-dir={page.parent / 'chromium'}"]
    command += ["--dump-dom", f"file://{copy}#{where}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = [x for x in done.stderr.splitlines() if "CONSOLE" in x]
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    return done.stdout, said, found and json.loads(html.unescape(found[1]))


TOP = """[...at("top").querySelectorAll("tbody tr")].map(row =>
    [...row.cells].slice(1).map(cell => cell.textContent))"""


# --------------------------------------------------------------------------------------------------
# The page
# --------------------------------------------------------------------------------------------------

HOSTILE = ["</script><script>document.title = 'owned'</script>", "<think>", "<b>x</b>", "&amp;"]
UNSEEN = ["\n", " ", " \t", "", "\u200b", "\u2028", "\x07", " é", "日本"]
SIGNS = ["↵\n", "␣", "␣⇥", "∅", "\\u{200b}", "\\u{2028}", "\\u{7}", " é", "日本"]


@pytest.fixture(scope="module")
def long_page(tmp_path_factory):
    """A page with a response of 10,000 tokens, and its line of tokens.jsonl."""
    generator = np.random.default_rng(0)
    tokens = [*HOSTILE, *UNSEEN]
    tokens += [f" w{i}" for i in range(token_page.MAX_TOKENS - len(tokens))]
    entropy = [token_page.digits(x) for x in generator.exponential(size=len(tokens))]
    entropy[2:5] = [NAN, INF, -INF]
    weights = [token_page.digits(x) for x in np.exp(generator.normal(0, 0.05, len(tokens)))]
    numbers = {"entropy": entropy, "influence": weights, "advantage": [0.5] * len(tokens)}
    shown = line(tokens, numbers, step=20, length=12_345)
    folder = tmp_path_factory.mktemp("long") / "a<img src=x>"
    return draw(folder, line(["a"], {"entropy": [1.0]}), shown), shown


@in_a_browser
def test_ten_thousand_tokens_are_drawn_escaped_and_ranked(long_page):
    page, shown = long_page
    script = f"""(() => {{ const start = performance.now(); draw(); return {{
        ms: performance.now() - start, title: document.title, top: {TOP},
        texts: [...at("tokens").children].map(span => span.textContent),
        bad: [...document.querySelectorAll(".bad")].map(span => [...box.children].indexOf(span)),
        notes: at("top").textContent, outcome: at("outcome").textContent }} }})()"""
    _, said, got = browse(page, "step=20&quantity=entropy", script)
    assert said == []
    assert got["texts"][: len(HOSTILE) + len(UNSEEN)] == [*HOSTILE, *SIGNS]
    assert got["texts"][-1] == shown["tokens"][-1] and len(got["texts"]) == 10_000
    assert got["title"] == "Tokens of a<img src=x>"
    assert got["bad"] == [2, 3, 4] and "3 tokens without a finite number" in got["notes"]
    assert "12,345 tokens, of which the first 10,000 are shown" in got["outcome"]
    numbers = shown["numbers"]["entropy"]
    order = sorted(
        (i for i, x in enumerate(numbers) if math.isfinite(x)), key=lambda i: -numbers[i]
    )
    want = [[shown["tokens"][i].replace(" ", "␣"), str(i + 1)] for i in order[:5]]
    assert [row[:2] for row in got["top"]] == want
    assert [float(row[2]) for row in got["top"]] == pytest.approx(
        [numbers[i] for i in order[:5]], rel=1e-4
    )
    assert got["ms"] < 5000  # 300 to 800 ms, layout included, while other work runs


@in_a_browser
def test_the_check_of_the_console_can_fail(tmp_path):
    page = draw(tmp_path, line(["a"], {"entropy": [1.0]}))
    page.write_text(page.read_text().replace("settle();\n  draw();", "no_such_function();"))
    assert any("no_such_function" in x for x in browse(page)[1])


@in_a_browser
def test_colours_diverge_around_the_neutral_value(tmp_path):
    """The weights 0.8, 1, 1.1: the far end is 0.2 from 1, so 1.1 has half its strength."""
    page = draw(tmp_path, line(["a", "b", "c"], {"influence": [0.8, 1.0, 1.1]}))
    script = """[[...box.children].map(span => span.style.background),
        [...at("ticks").children].map(span => span.textContent)]"""
    _, said, (colours, ticks) = browse(page, "quantity=influence", script)
    assert said == [] and ticks == ["0.8", "1", "1.2"]
    assert colours == [
        "rgb(var(--low) / 0.850)",
        "rgb(var(--high) / 0.000)",
        "rgb(var(--high) / 0.425)",
    ]


@in_a_browser
def test_a_response_of_equal_numbers_has_no_highest(tmp_path):
    page = draw(tmp_path, line(["a", "b"], {"advantage": [-0.5, -0.5]}))
    script = """[at("top").textContent, document.querySelectorAll("[data-rank]").length,
        [...at("ticks").children].map(span => span.textContent)]"""
    _, said, got = browse(page, "", script)
    assert said == [] and got == ["-0.5 at every token: nothing to rank.", 0, ["-0.5", "0", "0.5"]]


@in_a_browser
def test_ties_go_to_the_earlier_token_and_are_counted(tmp_path):
    page = draw(tmp_path, line([*"abcdefg"], {"influence": [1.2, 0.9, *[1.2] * 5]}))
    _, said, got = browse(page, "", f'[{TOP}, at("top").querySelector("p").textContent]')
    assert said == [] and [row[1] for row in got[0]] == ["1", "3", "4", "5", "6"]
    assert got[1] == "1 more token at the fifth number."


@in_a_browser
def test_hover_tap_and_keys_show_all_numbers_of_a_token(tmp_path):
    numbers = {"value": [0.5, NAN, 0.75], "value_change": [0.1, -INF, 0.25]}
    page = draw(tmp_path, line(["a", "\n", "c"], numbers))
    script = """(() => {
        const seen = [], note = () => seen.push(at("tip").hidden ? "" : at("tip").textContent);
        const on = (i, type, more = {}) => box.children[i].dispatchEvent(
            new (more.key ? KeyboardEvent : PointerEvent)(type, { bubbles: true, ...more }));
        on(1, "pointerover"); note();
        box.dispatchEvent(new PointerEvent("pointerleave")); note();
        on(0, "click"); note();
        on(0, "keydown", { key: "End" }); note();
        on(2, "keydown", { key: "Escape" }); note();
        at("top").querySelector("button").click(); note();
        return seen; })()"""
    _, said, seen = browse(page, "", script)
    first, second = "token 1avalue0.5value change0.1", "token 2↵valueNaNvalue change-∞"
    third = "token 3cvalue0.75value change0.25"
    assert said == [] and seen == [second, "", first, third, "", third]


@in_a_browser
def test_the_address_and_the_switches_choose_what_is_shown(tmp_path):
    lines = [
        line([f"s{step}r{i}"], {"advantage": [0.5 + i], "entropy": [step]}, step, float(i))
        for step in (1, 20)
        for i in (0, 1)
    ]
    script = """(() => {
        const seen = [], note = () => seen.push([box.textContent, at("title").textContent]);
        const press = (id, value) => document.querySelector(`#${id} [value="${value}"]`).click();
        note(); press("step", 20); note(); press("response", 1); note();
        press("quantity", "entropy"); note(); press("scale", "run");
        seen.push([...at("ticks").children].map(span => span.textContent), location.hash);
        return seen; })()"""
    _, said, seen = browse(draw(tmp_path, *lines), "step=1&response=2", script)
    assert said == [] and seen == [
        ["s1r1", "advantage"],
        ["s20r1", "advantage"],
        ["s20r0", "advantage"],
        ["s20r0", "entropy"],
        ["1", "10.5", "20"],
        "#step=20&response=1&quantity=entropy&scale=run",
    ]


@in_a_browser
@pytest.mark.parametrize("theme", [0, 1])  # of Blink: dark, light
def test_light_and_dark_and_no_wider_than_the_window(long_page, theme):
    script = """[getComputedStyle(document.body).backgroundColor, innerWidth,
        document.documentElement.scrollWidth]"""
    flags = (f"--blink-settings=preferredColorScheme={theme}", "--window-size=360,800")
    _, said, (colour, width, needed) = browse(long_page[0], "step=20", script, flags)
    assert said == [] and needed <= width <= 500
    assert colour == ("rgb(22, 22, 22)" if theme == 0 else "rgb(255, 255, 255)")


def test_the_page_asks_for_nothing_and_no_token_ends_its_script(long_page):
    text = long_page[0].read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)\s*=", (ROOT / "token_page.html").read_text(encoding="utf-8"))
    assert text.count("</script>") == 2 and "<img" not in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_the_command_draws_again_and_names_a_folder_without_tokens(tmp_path):
    page = draw(tmp_path / "run", line(["a"], {"entropy": [1.0]}))
    before = page.read_text()
    page.unlink()
    command = [sys.executable, str(ROOT / "token_page.py"), str(tmp_path / "run")]
    subprocess.run(command, check=True, capture_output=True)
    assert page.read_text() == before
    command[-1] = str(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "has no tokens.jsonl" in done.stderr


# --------------------------------------------------------------------------------------------------
# The numbers
# --------------------------------------------------------------------------------------------------


def group(number, *verdicts, length=3):
    problem = SimpleNamespace(prompt=f"p{number}", prompt_ids=[1], gold="g")
    responses = [
        Response(np.full(length, 10 * number + i), np.zeros(length, np.float32), True)
        for i in range(len(verdicts))
    ]
    return common.Group(number, problem, responses, list(verdicts))


def batch_of(rows, length):
    return SimpleNamespace(rows=torch.tensor(rows), mask=torch.ones(len(rows), length))


TOKENIZER = SimpleNamespace(batch_decode=lambda ids: [f"t{i}" for (i,) in ids])


def test_both_outcomes_of_the_last_mixed_groups_are_kept():
    groups = [group(4, 0.0, 1.0), group(6, 1.0, 0.0), group(7, 1.0, 1.0), group(8, 0.0, 1.0)]
    rows = [7, 6, 1, 5, 4, 3, 2]  # a rank's share, in any order; row 0 is another rank's
    per_row = torch.tensor([[10.0 * row] for row in rows])
    lines = token_page.token_lines(5, groups, batch_of(rows, 3), TOKENIZER, {"advantage": per_row})
    assert [(x["group"], x["correct"], x["numbers"]["advantage"]) for x in lines] == [
        (6, 0.0, [30.0] * 3),
        (6, 1.0, [20.0] * 3),
        (8, 0.0, [60.0] * 3),
        (8, 1.0, [70.0] * 3),
    ]
    assert [x["tokens"][0] for x in lines] == ["t61", "t60", "t80", "t81"]


def test_groups_of_one_and_long_responses():
    length = token_page.MAX_TOKENS + 7
    groups = [group(0, 1.0, length=length), group(1, 0.0, length=length)]
    numbers = torch.arange(2.0 * length).view(2, length) + 0.1234567
    lines = token_page.token_lines(5, groups, batch_of([0, 1], length), TOKENIZER, {"x": numbers})
    assert [(x["group"], x["length"]) for x in lines] == [(1, length), (0, length)]
    for x in lines:
        assert len(x["tokens"]) == len(x["numbers"]["x"]) == token_page.MAX_TOKENS
    assert lines[1]["numbers"]["x"][:2] == [0.123457, 1.12346]


def test_a_batch_keeps_the_last_real_numbers_of_a_row():
    batch = common.Batch(*[torch.zeros(3, 2)] * 6, minibatches=[])
    row = torch.tensor([1])
    batch.record(row, 1, entropy=torch.full((1, 2), 5.0))
    batch.record(row, 1, entropy=torch.full((1, 2), 6.0, requires_grad=True))
    batch.record(row, 0, entropy=torch.full((1, 2), 7.0))  # a piece that only keeps ranks in step
    kept = batch.per_token["entropy"]
    assert kept[1].tolist() == [6.0, 6.0] and kept[[0, 2]].isnan().all()
    assert not kept.requires_grad


def test_resume_drops_the_tokens_of_later_steps(tmp_path):
    (tmp_path / "tokens.jsonl").write_text('{"step": 1}\n{"step": 4}\n{"st')
    common.Run._keep_logs_up_to(SimpleNamespace(folder=tmp_path, is_main=True), 2)
    assert (tmp_path / "tokens.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(
    ("num_steps", "eval_every", "wanted"),
    [(6, 4, [1, 4, 6]), (3, 20, [1, 3]), (500, 10, [1, *range(50, 501, 50)])],
)
def test_tokens_are_logged_at_few_steps(tmp_path, monkeypatch, num_steps, eval_every, wanted):
    monkeypatch.setattr(common, "token_lines", lambda step, *rest: [{"step": step}])
    run = object.__new__(common.Run)
    run.args = SimpleNamespace(num_steps=num_steps, eval_every=eval_every)
    run.folder, run.is_main = tmp_path, True
    for step in range(1, num_steps + 1):
        run.log_tokens(step, [], SimpleNamespace(per_token={}), None, {})
    lines = (tmp_path / "tokens.jsonl").read_text().splitlines()
    assert [json.loads(x)["step"] for x in lines] == wanted


def watch(patch, script):
    """Note the numbers of each row of the last batch where the loop of a script computes them."""
    seen = SimpleNamespace(rows={}, pieces=[])

    def after(name, note):
        function = getattr(script, name)

        @wraps(function)  # keeps the signature, which main reads
        def noting(*args, **kwargs):
            result = function(*args, **kwargs)
            note(result, *args)
            return result

        patch(script, name, noting)

    def batch(result, *_):
        seen.batch, seen.rows = result, {}

    def losses(result, logprobs, old_logprobs, advantages, mask, *_):
        for i, row in enumerate(seen.pieces.pop(0).tolist()):
            numbers = {"log_ratio": logprobs[i] - old_logprobs[i], "advantage": advantages[i]}
            seen.rows[row] = {k: x.detach().expand(mask.shape[1]) for k, x in numbers.items()}

    after("make_batch", batch)
    after("microbatches", lambda result, *_: setattr(seen, "pieces", [rows for rows, _ in result]))
    after("policy_loss", losses)
    return seen


SETTINGS = {
    "num_steps": 2,
    "eval_every": 2,
    "eval_problems": 4,
    "prompts_per_step": 4,
    "group_size": 4,
    "rollout_engine": "hf",
}


def lines_of_the_last_batch(seen, folder):
    """(line, row) of every line of tokens.jsonl that the last batch wrote."""
    (file,) = folder.glob("*/tokens.jsonl")
    lines = [json.loads(x) for x in file.read_text().splitlines()]
    assert {x["step"] for x in lines} == {1, 2} and (file.parent / "tokens.html").exists()
    tokenizer = common.load_tokenizer("tiny")
    found, batch = [], seen.batch
    for x in [x for x in lines if x["step"] == 2]:
        for row, ids in enumerate(batch.ids):
            start, length = batch.prompt_lengths[row], batch.response_lengths[row]
            texts = tokenizer.batch_decode([[i] for i in ids[start : start + length].tolist()])
            if (tokenizer.decode(ids[:start]), texts) == (x["prompt"], x["tokens"]):
                found.append((x, row))
                break
        else:
            raise AssertionError(f"no row of the batch is {x['tokens']}")
    assert 2 <= len(found) <= 4
    return found


def same(shown, computed):
    assert shown == pytest.approx(computed[: len(shown)].tolist(), rel=1e-5, abs=1e-9)


def test_tokens_of_fipo_are_what_its_loss_used(tmp_path, monkeypatch, base_policy):
    seen = watch(monkeypatch.setattr, fipo)
    changes = {"gen_prompts": 16, "minibatch_size": 8, "num_epochs": 2, "learning_rate": 1e-3}
    args = fipo.Args(**SETTINGS, **changes, runs_dir=str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(ROOT / "fipo.py")])
    fipo.main(args, "tiny")
    for x, row in lines_of_the_last_batch(seen, tmp_path):
        numbers, want = x["numbers"], seen.rows[row]
        same(numbers["log_ratio"], want["log_ratio"])
        same(numbers["advantage"], want["advantage"])
        d = torch.tensor([numbers["log_ratio"]])
        advantage = torch.tensor([numbers["advantage"]])
        fkl = fipo.future_kl(d, torch.ones_like(d), args.future_kl_half_life, args.dual_clip)
        f = fipo.influence_weights(fkl, d.exp(), advantage, 0.8, 1.2, args.dual_clip)[0]  # Eq. 7
        assert f.max() > 1.001 or f.min() < 0.999  # the second epoch: pi_theta has moved
        assert numbers["influence"] == pytest.approx(f.tolist(), rel=1e-4)
        assert numbers["weighted_advantage"] == pytest.approx((f * advantage)[0].tolist(), rel=1e-4)
        assert all(0 <= e <= 5 for e in numbers["entropy"])  # nats, of about 150 tokens


def test_tokens_of_ppo_have_the_values_around_each_token(tmp_path, monkeypatch, base_policy):
    values = []
    real = ppo_critic.read_values
    monkeypatch.setattr(
        ppo_critic, "read_values", lambda *args: values.append(real(*args)) or values[-1]
    )
    seen = watch(monkeypatch.setattr, ppo_critic)
    args = ppo_critic.Args(
        **SETTINGS, minibatch_size=16, critic_warmup_steps=0, runs_dir=str(tmp_path)
    )
    monkeypatch.setattr(sys, "argv", [str(ROOT / "ppo_critic.py")])
    ppo_critic.main(args, "tiny")
    for x, row in lines_of_the_last_batch(seen, tmp_path):
        numbers, want, length = x["numbers"], seen.rows[row], len(x["tokens"])
        states = values[-1][0][row, : length + 1]
        same(numbers["value"], states[1:])
        assert numbers["value_change"] == pytest.approx(states.diff().tolist(), rel=1e-4, abs=1e-6)
        same(numbers["advantage"], want["advantage"])
        assert numbers["log_ratio"] == [0.0] * length  # one update per batch
