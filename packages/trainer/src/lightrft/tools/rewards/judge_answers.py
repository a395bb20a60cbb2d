"""Parsers of a judge's answers: grades, verdicts on two responses, rankings."""

from __future__ import annotations

import re

from lightrft.config.options import is_number
from lightrft.config.printable import one_line
from lightrft.tools.rewards.http import parse_json

MAX_SCORE = 10.0
_THINKING = re.compile(r"<(/?)(?:think|thinking|reasoning|thought)>", re.IGNORECASE)
# Characters that models put around a word: emphasis, quotes, brackets, marks of headings and lists.
_DRESS = r"[\s*_`\"'\[\]()>#:=-]*"
_SCORE = re.compile(
    r"[\s*_`\"'\[\]()>#-]*(?:(?:(?:final|overall|total)\s+)?(?:score|rating|grade)\b"
    r"[\s*_`\"'\[(]*(?:[:=]|is\b)[\s*_`\"'\[(]*|(?=[0-9.]+[\s*_`]*(?:/|out of)))"
    r"([0-9]{1,2}(?:\.[0-9]{1,6})?)(?:[\s*_`]*(?:/|out of)\s*10(?:\.0+)?)?[\s*_`\"'\]).!]*",
    re.ASCII | re.IGNORECASE,
)
_ANY_SCORE = re.compile(r"[\W_]*(?:(?:final|overall|total)\s+)?score[\W_]*:", re.IGNORECASE)
_VERDICT = re.compile(r"Verdict:[ \t]*([AB])", re.ASCII)
_ANY_VERDICT = re.compile(r"[^\w]*verdict[^\w]*:", re.IGNORECASE)
_RANKING = re.compile(
    rf"{_DRESS}(?:ranking\b)?{_DRESS}([0-9]+(?:[\s*_`]*[>,][\s*_`]*[0-9]+)*){_DRESS}\.?{_DRESS}",
    re.ASCII | re.IGNORECASE,
)


def read_score(count: int, content: str) -> list[float]:
    """Return the score of the last line, `Score: N` or `N/10` with any markup, or of a JSON object.

    Raises:
        ValueError: There is no score or more than one, or it is out of range; one line.
    """
    lines = _lines(content)
    match = _SCORE.fullmatch(lines[-1]) if lines else None
    text = match[1] if match else _json_score("\n".join(lines))
    shown = one_line(content[-200:])
    if text is None:
        raise ValueError(f"the last line must be 'Score: N', the answer ends with {shown!r}")
    if sum(bool(_ANY_SCORE.match(line) or _SCORE.fullmatch(line)) for line in lines) > 1:
        raise ValueError(f"there must be one line 'Score: N', the answer has more: {shown!r}")
    score = float(text)
    if not 0 <= score <= MAX_SCORE:
        raise ValueError(f"the score must be from 0 to {MAX_SCORE:g}: got {text}")
    return [score / MAX_SCORE] * count


def verdict_letter(response: str) -> str | None:
    """Return the letter of the last line, `Verdict: A`; None without or with several verdicts."""
    lines = response.rstrip().splitlines()
    match = _VERDICT.fullmatch(lines[-1].strip()) if lines else None
    if match is None or sum(_ANY_VERDICT.match(line) is not None for line in lines) > 1:
        return None
    return match[1]


def read_verdict(count: int, content: str) -> list[float]:
    """Return 1 for the response that the last line names, `Verdict: A`, and 0 for the other.

    Raises:
        ValueError: The last line is no verdict, or there are several; one line.
    """
    letter = verdict_letter("\n".join(_lines(content)))
    if letter is None:
        raise ValueError(
            "there must be one verdict, the last line 'Verdict: A' or 'Verdict: B', the answer "
            f"ends with {one_line(content[-200:])!r}"
        )
    return [float(letter == each) for each in "AB"]


def read_ranking(count: int, content: str) -> list[float]:
    """Return shares by the last line, `Ranking: 2 > 1 > 3`: 1 for the best and 0 for the last.

    Raises:
        ValueError: The last line does not hold each of 1 to `count` once; one line.
    """
    lines = _lines(content)
    match = _RANKING.fullmatch(lines[-1]) if lines else None
    order = re.findall("[0-9]+", match[1]) if match else []
    if sorted(map(int, order)) != list(range(1, count + 1)):
        raise ValueError(
            f"the last line must be 'Ranking: 2 > 1 > ...' with each number from 1 to {count} "
            f"once, the answer ends with {one_line(content[-200:])!r}"
        )
    places = {int(number): place for place, number in enumerate(order)}
    return [1 - places[number] / (count - 1) for number in range(1, count + 1)]


def _lines(content: str) -> list[str]:
    """Return the non-empty lines after the thinking, without surrounding spaces.

    Raises:
        ValueError: The thinking does not end.
    """
    marks = list(_THINKING.finditer(content))
    if marks and not marks[-1][1]:
        raise ValueError("the judge's thinking does not end: raise --judge_args max_tokens=N")
    spoken = content[marks[-1].end() :] if marks else content
    return [line for each in spoken.splitlines() if (line := each.strip())]


def _json_score(text: str) -> str | None:
    body = re.sub(r"^```(?:json)?|```$", "", text.strip()).strip()
    if not body.startswith("{"):
        return None
    try:
        entries = parse_json(body)
    except ValueError:
        return None
    values = entries.items() if isinstance(entries, dict) else ()
    scores = [value for name, value in values if name in ("score", "rating", "grade")]
    return repr(scores[0]) if len(scores) == 1 and is_number(scores[0]) else None
