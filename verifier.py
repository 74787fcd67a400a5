# ruff: noqa: RUF001, RUF003  (dashes, colons and signs that only look like ASCII are the subject)
r"""Judge whether a response gives the right answer: the reward of every script.

    >>> verify(r"so $x = \boxed{\frac{1}{2}}$.", "0.5")
    True
    >>> grade([r"\boxed{7}", "Answer: 8", "no marker"], ["7", 7, "7"])
    [1.0, 0.0, 0.0]

1 Extract: the last `\boxed{...}` or `Answer:` line. 2 Clean: one notation, text to text. 3 Read:
text to a small tree; costly input is refused. 4 Compare: exact fractions, then floats at a few
points, which settle nearly every "no"; only what still looks equal needs sympy. 5 Judge a row.
6 Sympy, in worker processes that are killed at their time limit. 7 Public functions.

Sections 1 to 5 run in the calling process, in bounded time and without signals, so they work in any
thread. No text reaches eval, exec, sympify or parse_expr. docs/verifier.md lists every policy
choice with its test.
"""

import atexit
import cmath
import contextlib
import itertools
import json
import math
import os
import random
import re
import selectors
import subprocess
import sys
import threading
import time
import unicodedata
import warnings
from fractions import Fraction
from functools import lru_cache

MAX_ANSWER = 1000  # characters; a longer answer is right only when it is the gold, letter by letter
MAX_DEPTH = 40  # nested brackets and commands
MAX_BITS = 50_000  # of an exact power: 2^{1000} passes, 7^{7^7} does not
MAX_FACTORIAL = 1000  # n of n! and of binomials
MAX_MEMBERS = 64  # of a list, set or matrix
WORKER_MEMORY = 2**30  # bytes of address space (RLIMIT_AS)
NUM_WORKERS = max(2, min(8, os.cpu_count() or 2))
START_S = 30.0  # allowance for a worker process to import sympy on a busy machine


class _Unreadable(Exception):
    """No mathematics we know, or too costly: it can only equal the gold as text."""


class _NeedsSympy(Exception):
    """Floats found no difference, and only sympy may say yes."""


# ------------------------------------------------------------------------------------------------
# 1 Extract

_MARKER = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])|(?<![A-Za-z])(?i:answer)[ \t*_}]{0,8}[:：]")
_TOO_DEEP = re.compile(rf"(?:\\(?:boxed|fbox)\s*\{{\s*){{{MAX_DEPTH}}}$")
_BLANK_LINE = re.compile(r"[\s*_$}]*(?:\\[\[(][\s$]*)?")  # nothing but delimiters
_OUTER = (("**", "**"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def extract_answer(text):
    r"""The answer a response commits to, as it wrote it, or None.

    The last marker after the last `</think>` wins: `\boxed{...}` (`\fbox{...}`, `\boxed 7`), or
    `Answer:` with the rest of its line, or with the next line that is not empty. An unclosed or
    empty marker gives None, even after a good one. Outer spaces, `$`, `**` and a full stop fall.
    """
    if not isinstance(text, str):
        return None
    text = text.rpartition("</think>")[2]
    marker = max(_MARKER.finditer(text), key=re.Match.start, default=None)
    if marker is None or _TOO_DEEP.search(text[max(0, marker.start() - 600) : marker.start()]):
        return None
    find_value = _box_value if marker.group()[0] == "\\" else _line_value
    return _trim(find_value(text, marker.end())) or None


def _box_value(text, start):
    """What a box holds whose command ends at `start`; '' when it never closes."""
    while text[start : start + 1].isspace():
        start += 1
    if text[start : start + 1] == "{":
        end = _closing_brace(text, start)
        return text[start + 1 : end] if end else ""
    depth, end = 0, start  # \boxed 7: up to a space, a dollar or a bracket that opened outside
    while end < len(text):
        char = text[end]
        if depth == 0 and (char in " \t\n$)]}" or text[end : end + 2] in ("\\)", "\\]")):
            break
        depth += (char in "([{") - (char in ")]}")
        end += 2 if char == "\\" else 1
    return text[start:end].rstrip(",;")


def _line_value(text, start):
    """The first line with more than delimiters, up to a brace that opened before it."""
    for line in text[start:].split("\n", 40)[:40]:
        if not _BLANK_LINE.fullmatch(line):
            line = line.lstrip(" \t*_}")
            return line[: _closing_brace("{" + line, 0, len(line) + 1) - 1]
    return ""


def _closing_brace(text, start, default=0):
    depth, position = 0, start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return position
        position += 1
    return default


def _trim(value):
    """Cut outer spaces, `$`, `**` and one full stop (but not an ellipsis)."""
    previous = None
    while value != previous:
        previous = value = value.strip()
        for opening, closing in _OUTER:
            if value.startswith(opening):
                value = value[len(opening) :]
            if value.endswith(closing) and not value.endswith("\\" + closing):
                value = value[: -len(closing)]
        if value.endswith(".") and not value.endswith(".."):
            value = value[:-1]
    return value


# ------------------------------------------------------------------------------------------------
# 2 Clean

_SIGNS = {
    **dict.fromkeys("−–—‐‑‒―﹣－⁻", "-"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    **dict.fromkeys("·⋅∙", "\\cdot "),
    **dict.fromkeys("′’", "'"),
    "×": "\\times ", "÷": "\\div ", "±": "\\pm ", "∓": "\\mp ", "√": "\\sqrt ", "∞": "\\infty ",
    "π": "\\pi ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ",
    "λ": "\\lambda ", "μ": "\\mu ", "φ": "\\phi ", "ω": "\\omega ", "≤": "\\le ", "≥": "\\ge ",
    "≠": "\\ne ", "∪": "\\cup ", "∈": "\\in ", "∅": "\\emptyset ", "°": "\\degree ",
}  # fmt: skip
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_SAME_COMMAND = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge", "neq": "ne", "lt": "lt",
    "varnothing": "emptyset", "lvert": "vert", "rvert": "vert", "mid": "vert", "ast": "times",
    "degrees": "degree", "bar": "overline",
}  # fmt: skip
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|emph|[mh]box|math(?:rm|bf|it|sf|tt|normal)|operatorname|"
    r"boldsymbol|bm|rm|bf|boxed|fbox)\*?\s*(?=\{)"
)
_NUMBER_UNIT = re.compile(r"([0-9])\s+([A-Za-z]{1,2})\s*$")
_WORDS = re.compile(r"[A-Za-z\s.'/-]*[A-Za-z][A-Za-z\s.'/-]*")
_BOLD = re.compile(r"(?<![\w)}\]*])\*\*([^*]{1,200})\*\*(?![\w({\[\\*])")
_SIZE = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*(?:\.(?![0-9]))?")
_SPACE = re.compile(
    r"(?:(?<!\\)\\[,;:> ]|\\(?:quad|qquad|displaystyle|limits|hfill)(?![A-Za-z])|~|\s)+"
)
_THOUSANDS = r"(?<![0-9.,_])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])"
_TEX_THOUSANDS = re.compile(
    r"(?<![0-9._])(?<!(?<!\\),)[0-9]{1,3}(?:(?:,|\{,\}|\\,)[0-9]{3})+(?![0-9]|,[0-9])"
)
_PERCENT = re.compile(r"\\%|(?<=[0-9}\s])\s*(?:\\text\{\s*percent\s*\}|percent(?![A-Za-z]))")
_REPEATING = re.compile(r"([0-9]{0,50})\.([0-9]{0,50})\\overline\s*\{([0-9]{1,50})\}")


@lru_cache(maxsize=4096)
def _clean(text):
    r"""`text` in one notation; \text{} remains only around plain words, which may be a unit."""
    if not text.isascii():
        text = "".join(map(_ascii_sign, _SUPERSCRIPT.sub(_power, text)))
    text = _BOLD.sub(r"\1", text)
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)  # math delimiters, like the dollar
    text = text.replace("\\$", " ").replace("$", " ")
    text = re.sub(r",\s*\\!\s*|\\!\s*,", "{,}", text).replace("\\!", "")
    text = _TEX_THOUSANDS.sub(_join_thousands, text).replace("{,}", ",")
    text = _SPACE.sub(" ", _SIZE.sub("", text))
    text = re.sub(r"\\([A-Za-z]+)", lambda m: "\\" + _SAME_COMMAND.get(m[1], m[1]), text)
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}").replace("**", "^")
    text = _PERCENT.sub("%", _unwrap(text))
    text = re.sub(r"\^\s*(\{)?\s*\\(?:circ|degree)(?![A-Za-z])\s*(?(1)\})", r"\\degree ", text)
    return _trim(_SPACE.sub(" ", _REPEATING.sub(_repeating, text)))


def _power(match):
    """A superscript is a power, not a digit."""
    return "^{" + unicodedata.normalize("NFKC", match.group()) + "}"


def _ascii_sign(char):
    if char in _SIGNS or char.isascii():
        return _SIGNS.get(char, char)
    folded = unicodedata.normalize("NFKC", char)
    if unicodedata.category(char) == "Nd" and folded.isascii():
        return folded
    if "⁄" in folded:  # NFKC of ½ is 1⁄2
        return "\\frac{{{}}}{{{}}}".format(*folded.split("⁄"))
    return char


def _join_thousands(match):
    # A plain comma may also part a list, (100,200): only _read can tell.
    number = match.group()
    return number if re.fullmatch(r"[0-9,]+", number) else re.sub(r"[^0-9]", "", number)


def _repeating(match):
    whole, once, again = match.groups()
    shift = 10 ** len(once)
    value = Fraction(int(again), shift * (10 ** len(again) - 1)) + Fraction(
        int(whole + once or 0), shift
    )
    return f"{{\\frac{{{value.numerator}}}{{{value.denominator}}}}}"


def _unwrap(text, depth=0):
    r"""\text{...} and its like fall, except around plain words."""
    if depth > MAX_DEPTH:
        raise _Unreadable("too deep")
    out, position = [], 0
    for match in _WRAPPER.finditer(text):
        if match.start() < position:
            continue  # inside one already done
        end = _closing_brace(text, match.end())
        if not end:
            break
        content = _unwrap(text[match.end() + 1 : end], depth + 1)
        content = _NUMBER_UNIT.sub(r"\1 \\text{\2}", content)  # \text{12 cm}
        if _WORDS.fullmatch(content) and not re.search(r"\b(?:or|and)\b", content.lower()):
            content = f"\\text{{{content}}}"
        out += [text[position : match.start()], f" {content} "]
        position = end + 1
    return "".join(out) + text[position:]


def _strip_text(cleaned):
    return re.sub(r"\\text\{([^{}]*)\}", r" \1 ", cleaned)


def _as_text(cleaned):
    """For comparison as text: no wrappers, no spaces, no case but that of a single letter."""
    text = re.sub(r"(?<=[0-9])\s+(?=[0-9])", "_", _strip_text(cleaned))  # "1 2" is not "12"
    if re.search(r"(?<![\\A-Za-z])[A-Za-z]{3,}", text):  # words: even a letter among them has none
        letters = r"\\[A-Za-z]+|[^\W\d_]+"
    else:  # 4 PM is 4 pm, but A, 2AB and A/B are mathematics
        mathematics = re.search(r"[\\^_+*/=]|^[0-9.]+[A-Za-z]", text)
        letters = r"$^" if mathematics else r"[^\W\d_]{2,}"
    text = re.sub(letters, lambda m: m[0] if m[0][0] == "\\" else m[0].lower(), text)
    return re.sub(r"\s+", "", text)


# ------------------------------------------------------------------------------------------------
# 3 Read. A value is one of
#     ("expr", tree, is_percent)   ("text", str)   ("base", digits, base)   ("matrix", rows)
#     ("list", values) unordered   ("tuple", opening, closing, values)      ("union", values)
#     ("relation", op, left, right) between trees        ("chain", values) for the sides of 2+3=5
#     ("named", name, value, relation or None)           for x=5, f(x)=2x, x \in S, 0<x<1
# and a tree is ("num", Fraction), ("sym", name), ("const", name) or (operation, *trees) with the
# operations of _FLOAT_OPERATIONS.

_ITEM = re.compile(
    _THOUSANDS + r"|\\(?:begin|end)\s*\{[a-z*]+\}|\\[A-Za-z]+|\\.|[A-Za-z]+|[<>]=|.", re.DOTALL
)
_RELATIONS = {
    "=": "=", "<": "<", ">": ">", "\\lt": "<", "\\gt": ">", "\\le": "<=", "\\ge": ">=", "<=": "<=",
    ">=": ">=", "\\ne": "!=", "\\in": "in",
}  # fmt: skip
_MIRROR = {"=": "=", "!=": "!=", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
_FUNCTIONS = (
    "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc",
    "ln", "log", "exp",
)  # fmt: skip
_RUN = re.compile(rf"({'|'.join(_FUNCTIONS)}|sqrt|pi|infinity|infty|inf)([A-Za-z]?)")
_GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "lambda",
    "mu", "nu", "xi", "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega", "Gamma",
    "Delta", "Theta", "Lambda", "Sigma", "Phi", "Psi", "Omega", "ell",
}  # fmt: skip
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\s*\{([pb]?matrix|smallmatrix|array)\}(?:\s*\{[clr| ]*\})?"
    r"(.*)\\end\s*\{\1\}\s*[)\]]?",
    re.DOTALL,
)
_TEXT_UNIT = r"\\text\{[^{}]*\}\s*(?:\^\s*\{?\s*-?[0-9]\s*\}?)?\s*"
_UNIT = re.compile(
    rf"(?:{_TEXT_UNIT}(?:(?:/|\\cdot)\s*{_TEXT_UNIT})*|\\degree\s*(?:[CF]|\\text\{{\s*[CF]\s*\}})?"
    r"|(?:(?<=\s)(?<!\\)[A-Za-z]{3,}|(?<![A-Za-z\\])[A-Za-z]{4,}))$"
)
_NO_UNIT = {"or", "and", "was", "is", "are", "were", "not", "no", "but", "if"}
_NAME = r"[A-Za-z](?:_\{?[A-Za-z0-9]+\}?)?'?"
_ARGUMENT = rf"(?:{_NAME}|-?[0-9]+)"
_FUNCTION_OF = re.compile(rf"({_NAME})\s*\(\s*{_ARGUMENT}(?:\s*,\s*{_ARGUMENT})*\s*\)")
_BASE = re.compile(
    r"\(?(?=[A-Fa-f]*[0-9])([0-9A-Fa-f]+)\)?\s*_\s*(?:([0-9])|\{\s*\(?\s*([0-9]+)\s*\)?\s*\})"
)
MINUS_ONE = ("num", Fraction(-1))


@lru_cache(maxsize=4096)
def _read(cleaned):
    """The value that `cleaned` denotes; raises _Unreadable."""
    if len(cleaned) > MAX_ANSWER:
        raise _Unreadable("too long")
    return _read_list(cleaned, 0)


def _split(text, separators):
    """Cut `text` at the separators outside all brackets: the parts, and what stood between."""
    parts, found, depth, start = [], [], 0, 0
    for match in _ITEM.finditer(text):
        token = match.group()
        if token in ("(", "[", "{", "\\{") or token.startswith("\\begin"):
            depth += 1
        elif token in (")", "]", "}", "\\}") or token.startswith("\\end"):
            depth -= 1
        elif depth == 0 and token in separators:
            parts.append(text[start : match.start()].strip())
            found.append(token)
            start = match.end()
        if not 0 <= depth <= MAX_DEPTH:
            raise _Unreadable("brackets")
    if depth:
        raise _Unreadable("brackets")
    return [*parts, text[start:].strip()], found


def _read_list(text, depth):
    """One value, or several between commas, semicolons, "or", "and"."""
    if depth > MAX_DEPTH:
        raise _Unreadable("too deep")
    parts, found = _split(text, {",", ";", "or", "and"})
    # ", and" leaves an empty part between its two separators
    parts = [p for p, s in zip(parts, [*found, ""], strict=True) if p or s not in ("and", "or")]
    if len(parts) > MAX_MEMBERS or not all(parts):
        raise _Unreadable("list")
    values = [_read_relation(variant, depth) for p in parts for variant in _signs(p)]
    if len(values) == 1:
        return values[0]
    names = {value[1] for value in values if value[0] == "named"}
    if len(names) != 1 or values[0][0] != "named":
        return ("list", values)
    # n=1,2 and x=1, x=2 give one unknown; x<1 or x>2 is a union of intervals
    bare = [value[2] if value[0] == "named" else value for value in values]
    kind = "union" if all(v[0] == "named" and v[2][0] == "tuple" for v in values) else "list"
    return ("named", names.pop(), (kind, bare), None)


def _signs(text):
    r"""The readings of \pm: both signs of each; with \mp, upper signs go together."""
    if "\\mp" in text:
        return [re.sub(r"\\pm", u, re.sub(r"\\mp", d, text)) for u, d in ("+-", "-+")]
    pieces = re.split(r"\\pm(?![A-Za-z])", text)
    if "\\{" in text:  # in a set the signs make more members, not more sets
        return [text]
    if len(pieces) > 5:
        raise _Unreadable("signs")
    choices = itertools.product("+-", repeat=len(pieces) - 1)
    return ["".join(itertools.chain(*zip(pieces, [*c, ""], strict=True))) for c in choices]


def _read_relation(text, depth):
    sides, found = _split(text, _RELATIONS)
    ops = [_RELATIONS[token] for token in found]
    if not ops:
        return _read_item(text, depth)
    if not all(sides):
        raise _Unreadable("relation")
    if ops == ["in"]:
        return ("named", _lone_name(sides[0]), _read_list(sides[1], depth + 1), None)
    if set(ops) == {"="}:
        return _read_equation(sides, depth)
    if ops[0] in (">", ">="):
        sides, ops = sides[::-1], [_MIRROR.get(op) for op in ops[::-1]]
    if len(ops) > 2 or (len(ops) == 2 and not set(ops) <= {"<", "<="}) or "in" in ops:
        raise _Unreadable("relation")
    trees = [_expression(side) for side in sides]
    infinity = ("const", "oo")
    relation = ("relation", ops[0], *trees) if len(ops) == 1 else None
    if len(ops) == 1 and ops[0] != "!=":  # x<5 is -oo<x<5
        if trees[0][0] == "sym":
            trees, ops = [("*", MINUS_ONE, infinity), *trees], ["<", *ops]
        else:
            trees, ops = [*trees, infinity], [*ops, "<"]
    if len(trees) == 3 and trees[1][0] == "sym":
        opening, closing = "[" if ops[0] == "<=" else "(", "]" if ops[1] == "<=" else ")"
        ends = [("expr", trees[0], False), ("expr", trees[2], False)]
        return ("named", trees[1][1], ("tuple", opening, closing, ends), relation)
    if relation is None:
        raise _Unreadable("relation")
    return relation


def _read_equation(sides, depth):
    """x=5, 5=x, f(x)=2x, and chains such as x=2+3=5, all of whose sides must be right."""
    for end, rest in ((0, sides[1:]), (-1, sides[:-1])):
        try:
            name = _lone_name(sides[end])
        except _Unreadable:
            continue
        values = [_read_item(side, depth) for side in rest]
        if len(values) > 1:
            return ("named", name, ("chain", values), None)
        relation = None
        if values[0][0] == "expr" and not values[0][2]:
            relation = ("relation", "=", ("sym", name), values[0][1])
            if name in _names(values[0][1]):  # x = 2x + 1 gives no value for x
                return relation
        return ("named", name, values[0], relation)
    if len(sides) == 2:
        trees = [_expression(side) for side in sides]
        if _names(trees[0]) or _names(trees[1]):
            return ("relation", "=", *trees)
    return ("chain", [_read_item(side, depth) for side in sides])


def _lone_name(text):
    match = _FUNCTION_OF.fullmatch(text)
    tree = _expression(match[1] if match else text)
    if tree[0] != "sym":
        raise _Unreadable("no name")
    return tree[1]


def _read_item(text, depth):
    """One value without a relation around it."""
    if depth > MAX_DEPTH:
        raise _Unreadable("too deep")
    parts, _ = _split(text, {"\\cup"})
    if len(parts) > 1:
        return ("union", [_read_item(part, depth + 1) for part in parts])
    match = _MATRIX.fullmatch(text)
    if match:
        rows = [r.split("&") for r in re.split(r"\\\\(?:\[[^\]]*\])?", match[2]) if r.strip()]
        if sum(map(len, rows)) > MAX_MEMBERS or "\\begin" in match[2]:
            raise _Unreadable("matrix")
        return ("matrix", [[_read_item(c.strip(), depth + 1) for c in row] for row in rows])
    if text == "\\emptyset":
        return ("list", [])
    inside = _inside(text)
    if inside:
        return _read_brackets(*inside, depth + 1)
    match = _BASE.fullmatch(text)
    if match:
        return ("base", match[1].lstrip("0").lower() or "0", (match[2] or match[3]).lstrip("0"))
    if _is_prose(text):
        return ("text", _as_text(text))
    percent = text.endswith("%")
    return ("expr", _expression(text[:-1] if percent else _drop_unit(text)), percent)


def _inside(text):
    """(opening, closing, content) when one pair of brackets holds all of `text`."""
    pairs = (("\\{", "\\}"), ("{", "}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"))
    for opening, closing in pairs:
        if text.startswith(opening) and text.endswith(closing):
            content = text[len(opening) : -len(closing)].strip()
            with contextlib.suppress(_Unreadable):
                if not content.endswith("\\"):
                    _split(content, ())  # balanced by itself, so the outer two belong together
                    return opening, closing, content
    return None


def _read_brackets(opening, closing, content, depth):
    if opening != "{" and re.fullmatch(
        _THOUSANDS, content
    ):  # (100,200) is a pair, 100,200 alone a number
        content = content.replace(",", ", ")
    if opening == "\\{" and not content:
        return ("list", [])
    parts, _ = _split(content, {",", ";"})
    if opening in "([" and len(parts) > 1:
        return ("tuple", opening, closing, [_read_list(part, depth) for part in parts])
    if opening + closing in ("(]", "[)"):
        raise _Unreadable("interval")
    value = _read_list(content, depth)
    return ("list", [value]) if opening == "\\{" and value[0] != "list" else value


def _is_prose(text):
    r"""Words, not a product of letters: \text{no}, no, Tuesday."""
    words = _strip_text(text)
    if not re.fullmatch(r"[A-Za-z\s.'-]+", words):
        return False
    if re.fullmatch(r"\s*no\s*", words.lower()) or re.search(r"\\text\{\s*[A-Za-z]{2}", text):
        return True
    return any(not _RUN.fullmatch(run) for run in re.findall(r"[A-Za-z]{3,}", words))


def _drop_unit(text):
    """One trailing unit falls from something that holds a number."""
    match = _UNIT.search(text)
    if not match:
        return text
    rest, words = text[: match.start()].rstrip(), re.findall("[a-z]+", match.group().lower())
    if set(words) & _NO_UNIT or len(words) > 8 or _RUN.fullmatch(match.group()):
        return text
    if match.group().startswith("\\degree") and re.search("sin|cos|tan|cot|sec|csc", rest):
        return text  # \sin 30^\circ: the degree is part of the argument
    holds_number = re.search(r"[0-9]|\\(?!text)[a-z]", rest)
    return rest if holds_number and rest[-1] not in "-+*/^_=(" else text


def _expression(text):
    parser = _Parser(text)
    tree = parser.sum(0)
    if parser.peek():
        raise _Unreadable("left over")
    _exact(tree)  # refuses constants that cost too much
    _refuse_towers(tree)
    return tree


def _refuse_towers(tree, height=0):
    height += tree[0] == "^" and tree[2][0] != "num"
    if height > 3:
        raise _Unreadable("tower of powers")
    for part in tree[1:]:
        if isinstance(part, tuple):
            _refuse_towers(part, height)


_TOKEN = re.compile(
    _THOUSANDS + r"(?:\.[0-9]+)?|(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4}(?![0-9.]))?"
    r"|\\[A-Za-z]+|\\.|[A-Za-z]+|\s+|."
)
_FACTORS = {"*": 1, "\\cdot": 1, "\\times": 1, "/": -1, "\\div": -1}


class _Parser:
    """Recursive descent over LaTeX and plain expressions. It builds a tree and computes nothing."""

    def __init__(self, text):
        if not text.isascii():  # what _clean left is no mathematics we know
            raise _Unreadable("unknown sign")
        self.tokens = []  # a stack, next token last
        for token in _TOKEN.findall(_strip_text(text)):
            if token.isalpha():
                match = _RUN.fullmatch(token)
                self.tokens += ["\\" + match[1], *match[2]] if match else token
            elif not token.isspace() or (self.tokens and self.tokens[-1].isdigit()):
                self.tokens.append(token)
        self.tokens = [
            t for t, after in itertools.pairwise([*self.tokens, ""])
            if not t.isspace() or after.isdigit()
        ][::-1]  # the only space that matters is the one in 2 1/4  # fmt: skip
        self.degree = re.search("sin|cos|tan|cot|sec|csc", text)
        self.bars = 0

    def peek(self):
        return self.tokens[-1] if self.tokens else ""

    def next(self):
        return self.tokens.pop() if self.tokens else ""

    def accept(self, *tokens):
        return self.next() if self.peek() in tokens else ""

    def expect(self, token):
        if self.next() != token:
            raise _Unreadable(f"no {token}")

    def sign(self):
        sign = 1
        while self.peek() in ("+", "-"):
            sign = -sign if self.next() == "-" else sign
        return sign

    def sum(self, depth):
        if depth > MAX_DEPTH:
            raise _Unreadable("too deep")
        terms = [_signed(self.sign(), self.product(depth))]
        while self.peek() in ("+", "-"):
            terms.append(_signed(self.sign(), self.product(depth)))
        return terms[0] if len(terms) == 1 else ("+", *terms)

    def product(self, depth):
        factors = [self.power(depth)]
        while True:
            if self.peek() in _FACTORS:
                exponent = _FACTORS[self.next()]
                factor = _signed(self.sign(), self.power(depth))  # 3 \cdot -2
                factors.append(factor if exponent > 0 else _inverse(factor))
            elif self.starts_atom():
                if self.peek()[0] in "0123456789. ":
                    raise _Unreadable("two numbers side by side")
                factors.append(self.power(depth))
            else:
                return factors[0] if len(factors) == 1 else ("*", *factors)

    def starts_atom(self):
        token = self.peek()
        if token in ("|", "\\vert"):
            return not self.bars
        return token not in _FACTORS and re.match(r"[A-Za-z0-9.(\[{ ]|\\[A-Za-z]", token)

    def power(self, depth):
        tree = self.atom(depth)
        if self.accept("!"):
            tree = ("!", tree)
        if self.accept("\\degree") and self.degree:
            tree = ("*", tree, ("const", "pi"), ("num", Fraction(1, 180)))
        return ("^", tree, self.exponent(depth + 1)) if self.accept("^") else tree

    def exponent(self, depth):
        sign = self.sign()
        if self.peek().isdigit():  # never mixed: x^2\frac14
            return _signed(sign, ("num", _number(self.next())))
        return _signed(sign, self.power(depth))

    def argument(self, depth):
        r"""Of a command: {...}, or one digit (\frac12), or one atom."""
        if self.peek().isdigit():
            first, *rest = self.next()
            self.tokens += ["".join(rest)] if rest else []
            self.accept(" ")
            return ("num", Fraction(first))
        return self.atom(depth)

    def atom(self, depth):
        if depth > MAX_DEPTH:
            raise _Unreadable("too deep")
        token = self.next()
        if token[:1].isdigit() or re.match(r"\.[0-9]", token):
            return self.number(token, depth)
        if token in ("(", "[", "{"):
            bars, self.bars = self.bars, 0
            tree = self.sum(depth + 1)
            self.expect({"(": ")", "[": "]", "{": "}"}[token])
            self.bars = bars
            return tree
        if token in ("|", "\\vert"):
            self.bars += 1
            tree = self.sum(depth + 1)
            self.expect(token)
            self.bars -= 1
            return ("abs", tree)
        if token.isalpha() and token.isascii():
            return ("const", token) if token in "ei" else ("sym", token + self.suffix())
        return self.command(token[1:] if token[:1] == "\\" else "", depth + 1)

    def number(self, token, depth):
        value = ("num", _number(token))
        if not token.isdigit():
            return value
        before = list(self.tokens)
        if self.accept("\\frac"):  # 2\frac14 is mixed when 1/4 is a proper fraction
            with contextlib.suppress(_Unreadable):
                top, bottom = self.argument(depth + 1), self.argument(depth + 1)
                if top[0] == bottom[0] == "num" and _is_proper(top[1], bottom[1]):
                    return ("num", value[1] + top[1] / bottom[1])
        elif self.accept(" "):  # 2 1/4
            top, slash, bottom = self.next(), self.next(), self.next()
            if slash == "/" and bottom.isdigit() and _is_proper(_number(top), _number(bottom)):
                return ("num", value[1] + _number(top) / _number(bottom))
        self.tokens = before
        return value

    def command(self, name, depth):
        if name in ("pi", "infty", "infinity", "inf"):
            return ("const", "pi" if name == "pi" else "oo")
        if name in _GREEK:
            return ("sym", "\\" + name + self.suffix())
        if name == "frac":
            top = self.argument(depth)
            return ("*", top, _inverse(self.argument(depth)))
        if name == "binom":
            top = self.argument(depth)
            return ("binom", top, self.argument(depth))
        if name == "sqrt":
            degree = ("num", Fraction(2))
            if self.accept("["):
                degree = self.sum(depth)
                self.expect("]")
            return ("root", self.atom(depth), degree)
        if name in ("sum", "prod"):
            return self.series("+" if name == "sum" else "*", depth)
        if name in _FUNCTIONS:
            return self.function(name, depth)
        raise _Unreadable(name)

    def series(self, operation, depth):
        r"""\sum_{k=1}^{10} of the product that follows, written out."""
        self.expect("_")
        self.expect("{")
        index = self.atom(depth)
        self.expect("=")
        first = _exact(self.sum(depth))
        self.expect("}")
        self.expect("^")
        last = _exact(self.argument(depth))
        if index[0] != "sym" or first is None or last is None or last - first >= MAX_MEMBERS:
            raise _Unreadable("bounds")
        term, numbers = self.product(depth), range(int(first), int(last) + 1)
        if not numbers or first.denominator != 1:
            raise _Unreadable("bounds")
        return (operation, *(_substitute(term, {index[1]: Fraction(n)}) for n in numbers))

    def function(self, name, depth):
        base, power = ("const", "e"), None
        if name == "log" and self.accept("_"):
            base = self.argument(depth)
        if self.accept("^"):
            power = self.exponent(depth)
            if power == MINUS_ONE:  # \sin^{-1} is the inverse function
                name, power = "arc" + name, None
        if self.peek() in ("(", "{", "["):
            argument = self.power(depth)
        else:  # \sin 2x y takes the product up to the next function or operator
            factors = [self.power(depth)]
            while self.starts_atom() and self.peek()[1:] not in _FUNCTIONS:
                factors.append(self.power(depth))
            argument = ("*", *factors) if len(factors) > 1 else factors[0]
        if name == "exp":
            tree = ("^", base, argument)
        elif name in ("log", "ln"):
            tree = ("log", argument, base)
        elif name in _FLOAT_OPERATIONS:
            tree = (name, argument)
        else:
            raise _Unreadable(name)
        return ("^", tree, power) if power else tree

    def suffix(self):
        """A subscript and primes belong to the name."""
        name = ""
        if self.accept("_"):
            name = "_" + self.next()
            if name == "_{":
                name = "_"
                while self.peek() not in ("}", ""):
                    name += self.next()
                self.expect("}")
        while self.peek() == "'":
            name += self.next()
        return name


def _number(token):
    if not re.match(r"\.?[0-9]", token):
        raise _Unreadable("no number")
    return Fraction(token.replace(",", ""))


def _is_proper(top, bottom):
    return top.denominator == bottom.denominator == 1 and 0 < top < bottom


def _signed(sign, tree):
    if sign > 0:
        return tree
    return ("num", -tree[1]) if tree[0] == "num" else ("*", MINUS_ONE, tree)


def _inverse(tree):
    return ("^", tree, MINUS_ONE)


def _names(tree):
    if tree[0] == "sym":
        return {tree[1]}
    return set().union(*(_names(part) for part in tree[1:] if isinstance(part, tuple)))


# ------------------------------------------------------------------------------------------------
# 4 Compare


def _exact(tree):
    """The rational number a tree denotes, or None; raises _Unreadable when it costs too much."""
    operation, *parts = tree
    if operation == "num":
        return parts[0]
    if operation in ("sym", "const"):
        return None
    values = [_exact(part) for part in parts]
    if operation == "^":
        return _exact_power(*values)
    if None in values:
        return None
    if operation in ("+", "*"):
        total = values[0]
        for value in values[1:]:
            total = total + value if operation == "+" else total * value
            if total.numerator.bit_length() + total.denominator.bit_length() > MAX_BITS:
                raise _Unreadable("digits")
        return total
    if operation == "abs":
        return abs(values[0])
    if operation == "root" and values[1] == 2 and values[0] >= 0:
        numerator, denominator = values[0].numerator, values[0].denominator
        root = Fraction(math.isqrt(numerator), math.isqrt(denominator))
        return root if root * root == values[0] else None
    if operation in ("!", "binom"):
        if any(v.denominator != 1 or not 0 <= v <= MAX_FACTORIAL for v in values):
            raise _Unreadable(operation)
        whole = map(int, values)
        return Fraction(math.factorial(*whole) if operation == "!" else math.comb(*whole))
    return None


def _exact_power(base, exponent):
    if exponent is not None and abs(exponent) > MAX_BITS:
        raise _Unreadable("exponent")
    if base is None or exponent is None or exponent.denominator != 1:
        return None
    if (base.numerator.bit_length() + base.denominator.bit_length()) * abs(exponent) > MAX_BITS:
        raise _Unreadable("power")
    if base == 0 and exponent <= 0:
        raise _Unreadable("no number")
    return base ** int(exponent)


def _float_root(value, degree):
    real = value.imag == 0 and degree.imag == 0
    if real and value.real < 0 and degree.real % 2 == 1:
        return -((-value) ** (1 / degree))  # the real root, as in school
    return value ** (1 / degree)


def _gamma(value):
    return math.gamma(value.real + 1) if value.imag == 0 else math.nan


_FLOAT_OPERATIONS = {
    "+": lambda *z: sum(z), "*": lambda *z: math.prod(z), "^": pow, "root": _float_root,
    "log": lambda z, base: cmath.log(z) / cmath.log(base), "abs": abs, "!": _gamma,
    "binom": lambda n, k: _gamma(n) / _gamma(k) / _gamma(n - k),
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "sinh": cmath.sinh, "cosh": cmath.cosh,
    "tanh": cmath.tanh, "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan,
    "cot": lambda z: 1 / cmath.tan(z), "sec": lambda z: 1 / cmath.cos(z),
    "csc": lambda z: 1 / cmath.sin(z),
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e, "i": 1j, "oo": 1234567.891}  # oo: one more unknown


def _approximate(tree, point):
    """(value, largest magnitude on the way) in floats; raises ArithmeticError where undefined."""
    operation, *parts = tree
    if operation == "num":
        value, largest = complex(parts[0]), 0.0
    elif operation in ("sym", "const"):
        value = complex(point[parts[0]] if operation == "sym" else _CONSTANTS[parts[0]])
        largest = 0.0
    else:
        values, sizes = zip(*(_approximate(part, point) for part in parts), strict=True)
        try:
            value = complex(_FLOAT_OPERATIONS[operation](*values))
        except ValueError as error:
            raise ArithmeticError from error
        largest = max(sizes)
    if not cmath.isfinite(value):
        raise ArithmeticError
    return value, max(largest, abs(value))


def _points(names):
    """Rational sample points, the same on every call: first all positive, then of both signs."""
    for number in range(6):
        point = {}
        for name in names:
            draw = random.Random(f"{name} {number}")
            size = Fraction(draw.randint(300, 2500), 1009)
            point[name] = size if number == 0 else size * draw.choice((1, -1))
        yield point


def _trees_equal(a, b, prove):
    if a == b:
        return True
    exact_a, exact_b = _exact(a), _exact(b)
    if exact_a is not None and exact_b is not None:
        return exact_a == exact_b
    real = not {"i"} & (_constants(a) | _constants(b))
    for point in _points(_names(a) | _names(b)):
        try:
            (x, size_x), (y, size_y) = _approximate(a, point), _approximate(b, point)
        except ArithmeticError:
            continue
        if real and abs(x.imag) + abs(y.imag) > 1e-9 * (abs(x) + abs(y)):
            continue  # outside the domain of a real expression: \ln x at x < 0
        if abs(x - y) > 1e-6 * max(abs(x), abs(y)) + 1e-9 * max(size_x, size_y):
            return False
    return prove(a, b)


def _constants(tree):
    if tree[0] == "const":
        return {tree[1]}
    return set().union(*(_constants(part) for part in tree[1:] if isinstance(part, tuple)))


def _same(a, b, prove):
    """Do two values denote the same answer? `prove(tree, tree)` settles what floats cannot."""
    if a[0] == b[0] == "named":
        if a[3] and b[3] and _relations_equal(a[3], b[3], prove):
            return True
        return a[1] == b[1] and _same(a[2], b[2], prove)
    for value, other in ((a, b), (b, a)):
        if value[0] == "chain":
            return all(_same(side, other, prove) for side in value[1])
        if value[0] == "named" and other[0] == "relation":
            return value[3] is not None and _relations_equal(value[3], other, prove)
        if value[0] == "named":
            return _same(value[2], other, prove)
        if value[0] == "list" and len(value[1]) == 1 and other[0] != "list":
            return _same(value[1][0], other, prove)
    if a[0] != b[0]:
        return False
    if a[0] == "expr":
        return _expressions_same(a, b, prove)
    if a[0] == "relation":
        return _relations_equal(a, b, prove)
    if a[0] in ("list", "union"):
        return _same_members(a[1], b[1], prove)
    if a[0] == "tuple":
        return a[1:3] == b[1:3] and _same_rows([a[3]], [b[3]], prove)
    if a[0] == "matrix":
        return _same_rows(a[1], b[1], prove)
    return a == b  # text, base


def _same_rows(a, b, prove):
    return [len(row) for row in a] == [len(row) for row in b] and all(
        _same(x, y, prove) for x, y in zip(itertools.chain(*a), itertools.chain(*b), strict=True)
    )


def _same_members(a, b, prove):
    rest = list(b)
    if len(a) != len(b):
        return False
    for value in a:
        match = next((i for i, other in enumerate(rest) if _same(value, other, prove)), None)
        if match is None:
            return False
        del rest[match]
    return True


def _expressions_same(a, b, prove):
    """x% equals x%, x/100 and x; two percentages are compared as they stand."""
    if a[2] != b[2]:
        percent, plain = (a, b) if a[2] else (b, a)
        hundredth = ("*", percent[1], ("num", Fraction(1, 100)))
        if _trees_equal(hundredth, plain[1], prove):
            return True
    return _trees_equal(a[1], b[1], prove)


def _relations_equal(a, b, prove):
    """Equal after moving terms or a nonzero factor: left - right of one is c times the other's.

    With d(p) the value of left - right at a fixed point p, that is d1 * d2(p) = d2 * d1(p).
    """
    first, second = (("+", side[2], _signed(-1, side[3])) for side in (a, b))
    if a[1] != b[1] or _names(first) != _names(second):
        return False
    for point in _points(_names(first)):
        with contextlib.suppress(ArithmeticError):
            values = [_approximate(tree, point)[0] for tree in (first, second)]
            if min(map(abs, values)) < 1e-6:
                continue
            if a[1] in ("<", "<=") and (values[0] / values[1]).real < 0:
                return False
            at = [_substitute(tree, point) for tree in (first, second)]
            return _trees_equal(("*", first, at[1]), ("*", second, at[0]), prove)
    return False


def _substitute(tree, point):
    if tree[0] == "sym" and tree[1] in point:
        return ("num", point[tree[1]])
    return (tree[0], *(_substitute(p, point) if isinstance(p, tuple) else p for p in tree[1:]))


# ------------------------------------------------------------------------------------------------
# 5 Judge a row

_DECIMAL = re.compile(r"[-+]?[0-9]{1,1000}(?:\.[0-9]{1,1000})?")
# What only math-verify's parser reads, in a worker: not with big numbers or towers of powers, nor
# with signs that it drops (it takes x' for x and 4_2 for 4).
_FOREIGN = re.compile(r"\\(?:int|lim|sum|prod|lfloor|lceil|gcd|max|min)(?![A-Za-z])")
_NOT_FOREIGN = re.compile(r"[0-9]{6}|\^\s*(?:\{[^{}]*\^|\w\s*\^)|!|binom|[':]|[0-9]\s*_")
_NEVER_RIGHT = {"", "none", "null", "nan", "[invalid]"}
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s*)?(?:\(\s*([a-z])\s*\)|([a-z])\s*(?:[:.)]|$))(.*)"
)


def _decide(text, gold, multiple_choice):
    """True, False, or the list of (answer, gold) that only sympy can tell."""
    answer = extract_answer(text)
    open_pairs = []
    for entry in _gold_texts(gold) if answer else ():
        try:
            if _equivalent(answer, entry, multiple_choice, _refer):
                return True
        except _NeedsSympy:
            open_pairs.append((answer, entry))
    return open_pairs or False


def _refer(a, b):
    raise _NeedsSympy


def _gold_texts(gold):
    """The entries of a gold as texts, without those that are never right."""
    if hasattr(gold, "tolist"):  # numpy, torch
        gold = gold.tolist()
    if isinstance(gold, (list, tuple, set, frozenset)):
        return [text for entry in gold for text in _gold_texts(entry)]
    text = str(int(gold) if isinstance(gold, float) and gold.is_integer() else gold)
    text = _trim(text)
    return [] if text.lower() in _NEVER_RIGHT else [text]


def _equivalent(answer, gold, multiple_choice, prove):
    if _DECIMAL.fullmatch(answer) and _DECIMAL.fullmatch(gold):
        return _canonical(answer) == _canonical(gold)
    if max(len(answer), len(gold)) > 2 * MAX_ANSWER:
        return answer == gold
    try:
        answer, gold = _clean(answer), _clean(gold)
        if multiple_choice and _choice(gold):
            return _choice(answer) == _choice(gold)
        as_text = _as_text(gold)
        if as_text in _NEVER_RIGHT or as_text == _as_text(answer):
            return as_text not in _NEVER_RIGHT
        if re.fullmatch(_THOUSANDS, answer) and re.search(r"[0-9], [0-9]", gold):
            answer = answer.replace(",", ", ")  # 100,200 against the list 100, 200
        return _same(_read(answer), _read(gold), prove)
    except _Unreadable:
        pass
    if any(_FOREIGN.search(side) for side in (answer, gold)) and not any(
        len(side) > 200 or _NOT_FOREIGN.search(side) for side in (answer, gold)
    ):
        return prove(_foreign_tree(answer), _foreign_tree(gold))
    return False


def _foreign_tree(cleaned):
    with contextlib.suppress(_Unreadable):
        value = _read(cleaned)
        if value[0] == "expr":
            return value[1]
    return ("latex", _strip_text(cleaned))


def _canonical(number):
    """012.50 -> 12.5, +7 -> 7.0, as text: no limit on digits, no rounding."""
    whole, _, decimals = number.lstrip("+-").partition(".")
    value = f"{whole.lstrip('0') or '0'}.{decimals.rstrip('0') or '0'}"
    return "-" + value if number[0] == "-" and value != "0.0" else value


def _choice(cleaned):
    """The letter a multiple-choice answer picks: C, (C), C: blue; None for none or several."""
    match = _CHOICE.fullmatch(_strip_text(cleaned).strip().lower())
    if not match:
        return None
    words = re.findall(r"[a-z0-9]+", match[3])
    several = words and all(len(word) == 1 or word in ("or", "and") for word in words)
    if (several and not match[3].strip().isdigit()) or re.search(
        r"\([a-z]\)|\b(?:or|and)\W+[a-z]\W*$", match[3]
    ):
        return None
    return match[1] or match[2]


# ------------------------------------------------------------------------------------------------
# 6 Sympy, in worker processes. `python verifier.py --worker` is a server: it imports sympy once,
# forks one child per slot, hands out jobs, kills a child at its limit and forks the next at once.
# The protocol is JSON lines. All of it dies with the parent (end of file on stdin).


def _prove(a, b):
    """Is a - b zero, by sympy: exactly, or to 50 digits at every sample point?"""
    import sympy

    size, settled = _to_sympy(a), False
    difference = size - _to_sympy(b)
    if difference == 0:
        return True
    real = "i" not in _constants(a) | _constants(b)
    for point in itertools.islice(_points(_names(a) | _names(b)), 4):
        values = {_to_sympy(("sym", n)): _to_sympy(("num", v)) for n, v in point.items()}
        at = size.subs(values).evalf(15)
        if not (at.is_number and at.is_finite):
            continue
        digits = abs(int(sympy.log(abs(at), 10).evalf(5))) if at != 0 else 0
        gap = difference.subs(values).evalf(60 + digits + len(str(a)) + len(str(b)))
        if digits > 2000 or not (gap.is_number and gap.is_finite):
            continue
        if real and abs(sympy.im(at)) + abs(sympy.im(gap)) > 1e-9 * abs(at):
            continue  # outside the domain, as in _trees_equal
        if abs(gap) > sympy.Float(10) ** (-50 - digits):
            return False
        settled = True
    return settled or sympy.simplify(difference) == 0


def _to_sympy(tree):
    import sympy

    operation, *parts = tree
    if operation == "latex":
        return _foreign(*parts)
    if operation == "num":
        return sympy.Rational(parts[0].numerator, parts[0].denominator)
    if operation == "sym":
        return sympy.Symbol(parts[0], real=True)
    if operation == "const":
        infinity = sympy.Symbol("oo", positive=True)  # oo - oo has to be 0 here
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "oo": infinity}[parts[0]]
    values = [_to_sympy(part) for part in parts]
    if operation == "root":
        odd = values[1].is_integer and values[1] % 2 == 1
        return sympy.real_root(*values) if odd else values[0] ** (1 / values[1])
    names = {"+": "Add", "*": "Mul", "^": "Pow", "!": "factorial", "binom": "binomial",
             "abs": "Abs", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}  # fmt: skip
    return getattr(sympy, names.get(operation, operation))(*values)


def _foreign(latex):
    """By math-verify's parser."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    config = ConversionConfig(lowercase_symbols=False)
    try:
        expression = latex2sympy(latex, is_real=True, conversion_config=config)
    except Exception as error:
        raise _Unreadable("no LaTeX") from error
    return expression.doit()


def _serve():
    """The server: reads a batch, writes [number, verdict or null] per job, until stdin ends."""
    import latex2sympy2_extended  # noqa: F401  (loaded once, here: children are forked with it)
    import sympy  # noqa: F401

    out, parent, idle, busy = os.dup(1), os.getppid(), [], {}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing but verdicts goes to the parent
    waiting = selectors.DefaultSelector()
    waiting.register(0, selectors.EVENT_READ)
    try:
        while True:
            while not waiting.select(5.0):
                if os.getppid() != parent:  # a process forked by the parent may keep stdin open
                    return
            line = _read_line(0)
            if not line:
                return
            limit_s, jobs = json.loads(line)
            todo = list(enumerate(jobs))[::-1]
            while todo or busy:
                while todo and len(busy) < NUM_WORKERS:
                    number, job = todo.pop()
                    child = idle.pop() if idle else _Child()
                    child.send([limit_s, *job])
                    busy[child.reader] = (child, number, time.monotonic() + limit_s)
                    waiting.register(child.reader, selectors.EVENT_READ)
                next_deadline = min(deadline for _, _, deadline in busy.values())
                ready = waiting.select(max(0.0, next_deadline - time.monotonic()))
                ready = {key.fd for key, _ in ready}
                if 0 in ready:  # the parent is gone, or gave up
                    return
                for fd, (child, number, deadline) in list(busy.items()):
                    if fd not in ready and time.monotonic() < deadline:
                        continue
                    answer = _read_line(fd) if fd in ready else b""
                    waiting.unregister(fd)
                    del busy[fd]
                    if answer:
                        idle.append(child)
                    else:  # late, or dead
                        child.kill()
                    os.write(out, b"[%d, %s]\n" % (number, answer.strip() or b"null"))
    finally:
        for child in [*idle, *(entry[0] for entry in busy.values())]:
            child.kill()


class _Child:
    """A forked worker that takes one job at a time."""

    def __init__(self):
        (stdin, self.writer), (self.reader, stdout) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(stdin, 0)
            os.dup2(stdout, 1)
            os.closerange(2, 256)  # a sibling's pipe kept open would hide the server's end from it
            with contextlib.suppress(BaseException):
                _work()
            os._exit(0)
        os.close(stdin)
        os.close(stdout)

    def send(self, job):
        with contextlib.suppress(BrokenPipeError):  # a dead child shows when it is read
            os.write(self.writer, json.dumps(job).encode() + b"\n")

    def kill(self):
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        os.close(self.reader)
        os.close(self.writer)


def _work():
    import resource

    def limit(what, amount):
        hard = resource.getrlimit(what)[1]
        amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(what, (amount, hard))

    limit(resource.RLIMIT_AS, WORKER_MEMORY)
    limit(resource.RLIMIT_CORE, 0)
    while line := _read_line(0):
        limit_s, answer, gold, multiple_choice = json.loads(line)
        spent_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        limit(resource.RLIMIT_CPU, int(spent_s + limit_s) + 5)  # should the server be gone
        try:
            verdict = _equivalent(answer, gold, multiple_choice, _prove)
        except _Unreadable:
            verdict = False
        except Exception:  # RecursionError and MemoryError too
            verdict = None
        os.write(1, json.dumps(verdict).encode() + b"\n")


def _read_line(fd):
    """One JSON line, or b"" at the end of file. Only one line is ever under way on a pipe."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(fd, 1 << 16)
        if not piece:
            return b""
        line += piece
    return line


_lock = threading.Lock()  # one batch at a time; other threads wait for a bounded time
_server = None  # subprocess.Popen


def _ask_sympy(jobs, limit_s):
    """Verdicts of the jobs (answer, gold, multiple_choice) in order; None where there is none."""
    global _server
    verdicts = [None] * len(jobs)
    todo = list(range(len(jobs)))
    with _lock:
        for _ in range(2):  # a server that died is replaced once
            if _server is None or _server.poll() is not None:
                _stop()
                command = [sys.executable, os.path.abspath(__file__), "--worker"]
                _server = subprocess.Popen(
                    command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C is not for it
                )  # fmt: skip
            try:
                for number, verdict in _exchange([jobs[n] for n in todo], limit_s):
                    verdicts[todo[number]] = verdict
                    todo[number] = None
                break
            except OSError:
                _stop()
                todo = [n for n in todo if n is not None]
            except BaseException:  # Ctrl-C between question and answer: start afresh
                _stop()
                raise
    return verdicts


def _exchange(jobs, limit_s):
    """Send a batch and yield its lines; raises OSError when the server ends or is late."""
    message = json.dumps([limit_s, jobs]).encode() + b"\n"
    stdin, stdout = _server.stdin.fileno(), _server.stdout.fileno()
    deadline = time.monotonic() + START_S + limit_s * (math.ceil(len(jobs) / NUM_WORKERS) + 2)
    os.set_blocking(stdin, False)
    buffer, received = b"", 0
    with selectors.DefaultSelector() as waiting:
        waiting.register(stdin, selectors.EVENT_WRITE)
        waiting.register(stdout, selectors.EVENT_READ)
        while received < len(jobs):
            events = waiting.select(max(0.0, deadline - time.monotonic()))
            if not events:
                raise TimeoutError
            for key, _ in events:
                if key.fd == stdin:
                    message = message[os.write(stdin, message) :]
                    if not message:
                        waiting.unregister(stdin)
                    continue
                piece = os.read(stdout, 1 << 16)
                if not piece:
                    raise BrokenPipeError
                *lines, buffer = (buffer + piece).split(b"\n")
                for line in lines:
                    received += 1
                    yield json.loads(line)


@atexit.register
def _stop():
    """End the server; it kills its children when its stdin closes."""
    global _server
    if _server is not None:
        _server.stdin.close()
        _server.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            _server.wait(1.0)
        _server.kill()
        _server.wait()
        _server = None


def _after_fork():
    """A forked child shares the server's pipes with its parent: let go, and start its own."""
    global _server, _lock
    if _server is not None:
        _server.stdin.close()
        _server.stdout.close()
        _server.returncode = 0  # not our child: nothing to wait for
    _server, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# ------------------------------------------------------------------------------------------------
# 7 Public functions

_errors = 0


def verify(text, gold, multiple_choice=False):
    """Does this response give the gold answer? Never raises, never hangs (2 s), any thread.

    text: str. gold: str, int, float, or a list of those, any of which may match; None, nan, "" and
    "[INVALID]" never do. multiple_choice: the gold is the letter of an option. Returns bool. What
    fails inside counts as wrong and in `error_count`.
    """
    return _grade([text], [gold], [multiple_choice], 2.0)[0][0]


def grade(texts, golds, multiple_choice=None, timeout_s=2.0):
    """`verify` for a batch: a list of 1.0 (right) and 0.0, in order.

    texts, golds, multiple_choice (None: all False): one per row, else ValueError. timeout_s:
    seconds for one row in a worker; n rows that hang cost at most (ceil(n / workers) + 2) times
    that, and count as wrong and as errors. Warns when more than half of the batch fails so.
    """
    flags = [False] * len(texts) if multiple_choice is None else multiple_choice
    if not len(texts) == len(golds) == len(flags):
        raise ValueError(f"{len(texts)} texts, {len(golds)} golds, {len(flags)} flags")
    verdicts, errors = _grade(texts, golds, flags, timeout_s)
    if errors > len(texts) / 2:
        warnings.warn(
            f"the verifier failed on {errors} of {len(texts)} rows, which count as wrong: "
            "rewards of this batch mean nothing",
            RuntimeWarning,
            stacklevel=2,
        )
    return [float(verdict) for verdict in verdicts]


def error_count():
    """Rows since start that could not be judged (an exception, a time limit, a lost worker)."""
    return _errors


def _grade(texts, golds, flags, timeout_s):
    """([bool per row], number of rows that failed)"""
    global _errors
    verdicts, failed, jobs, rows = [], set(), [], []
    for row, (text, gold, flag) in enumerate(zip(texts, golds, flags, strict=True)):
        try:
            verdict = _decide(text, gold, flag)
        except Exception:
            verdict = False
            failed.add(row)
        verdicts.append(verdict is True)
        if verdict not in (True, False):
            jobs += [(answer, entry, bool(flag)) for answer, entry in verdict]
            rows += [row] * len(verdict)
    if jobs:
        unique = list(dict.fromkeys(jobs))
        try:
            answers = dict(zip(unique, _ask_sympy(unique, timeout_s), strict=True))
        except Exception:
            answers = dict.fromkeys(unique)
        for row, job in zip(rows, jobs, strict=True):
            verdicts[row] = verdicts[row] or bool(answers[job])
            if answers[job] is None:
                failed.add(row)
    failed = {row for row in failed if not verdicts[row]}
    with _count_lock:
        _errors += len(failed)
    return verdicts, len(failed)


_count_lock = threading.Lock()

if __name__ == "__main__" and sys.argv[1:] == ["--worker"]:
    _serve()
